"""Public functions refuse arguments of the wrong type, or out of range, in one sentence."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import pytest

import hetflow
from hetflow.api.calls import checks
from hetflow.cli.asking import flag_of
from hetflow.schema.arguments import Arguments, fault_of
from hetflow.schema.errors import FileError, HetflowError, ProblemError
from hetflow.schema.options import asked_of, spelled_by
from hetflow.schema.records import Count, Fraction
from hetflow.schema.requests.rent import RentRequest
from hetflow.tests import handmade

POINT = handmade.profile("V100", 1.0, model="m")
VERBS = [
    getattr(hetflow, name)
    for name in hetflow.__all__
    if name[0].islower() and name not in ("cluster", "plugins", "prepare", "rent")
] + [getattr(module, name) for module in (hetflow.cluster, hetflow.rent) for name in module.__all__]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_argument_of_every_public_function_is_checked(verb: Callable[..., Any]) -> None:
    arguments = Arguments(verb)
    assert arguments.kinds
    for name in arguments.kinds:
        fault = fault_of(object(), arguments.kind_of(name), name)
        assert fault is not None
        assert fault.startswith(f"{name} must be ")
    given = dict.fromkeys(arguments.kinds, object())
    if any(p.kind is p.VAR_KEYWORD for p in signature(verb).parameters.values()):
        required = (asked.name for asked in asked_of(RentRequest) if asked.is_required)
        given |= dict.fromkeys(set(required) - {"offers"}, object())
    with pytest.raises(ProblemError, match=" must be .*, got <object"):
        verb(**given)


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ("foo", Literal["auto", "split"], 'x must be "auto" or "split", got \'foo\''),
        ("Auto", Literal["auto", "split"] | None,
         'x must be "auto", "split" or None, got \'Auto\'; did you mean "auto"?'),
        (3, Path | str, "x must be a Path or a string, got 3"),
        ("abc", Sequence[str], "x must be a list of strings, got 'abc'"),
        ("a", Sequence[Path | str], "x must be a list of Path or string, got 'a'"),
        (["a", 1], Sequence[str] | None, "x[1] must be a string, got 1"),
        ((1, 2, 3), tuple[int, int], "x must hold 2 values, got (1, 2, 3)"),
        ({"a": "b"}, float | Mapping[str, float], "x['a'] must be a number, got 'b'"),
        ({1: 2.0}, Mapping[str, float], "a key of x must be a string, got 1"),
        (True, int, "x must be a whole number, got True"),
        (2.0, int | None, "x must be a whole number or None, got 2.0"),
        (1, bool, "x must be True or False, got 1"),
        (float("nan"), Fraction, "x must be >= 0 and finite, got nan"),
        (10**400, Fraction, f"x must be >= 0 and finite, got 1{'0' * 56}..."),
        (0, Count, "x must be >= 1, got 0"),
        ([3, 10**13], Sequence[Count], "x[1] must be <= 1000000000000, got 10000000000000"),
        (1.5, Fraction | None, "x must be <= 1, got 1.5"),
        (3, Callable[[int], None] | None, "x must be a function or None, got 3"),
    ],
)  # fmt: skip
def test_a_fault_is_told_in_a_sentence(value: Any, kind: Any, said: str) -> None:
    assert fault_of(value, kind, "x") == said


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, float),
        (0.5, Fraction),
        (None, Count | None),
        (["a"], Sequence[str]),
        ((), Sequence[str]),
        ((1, 2), tuple[int, int]),
        ({"a": 1}, Mapping[str, float]),
        (print, Callable[[str], None]),
        (object(), Any),
    ],
)
def test_what_fits_is_taken(value: Any, kind: Any) -> None:
    assert fault_of(value, kind, "x") is None


def test_faults_that_were_silent_or_tracebacks(tmp_path: Path) -> None:
    def refused(call: Callable[[], object]) -> str:
        with pytest.raises(HetflowError) as caught:
            call()
        return str(caught.value)

    solve: Callable[..., Any] = hetflow.solve
    assert refused(lambda: solve([POINT], "V100", batch_size=16, strategy="foo")) == (
        'strategy must be "auto", "split", "pipeline" or "parallel", got \'foo\''
    )
    assert refused(lambda: solve(None, "V100", batch_size=16)) == (
        "profiles must be a list of Profile, a Path or a string, got None"
    )
    assert refused(lambda: solve([POINT], "V100", batch_size=0)) == (
        "batch_size must be >= 1, got 0"
    )
    rent: Callable[..., Any] = hetflow.rent.deadline
    offer = {"work_seconds": 1.0, "deadline_seconds": 2.0, "spot_dollars_per_hour": 1.0}
    assert refused(lambda: rent([], on_demand_dollars_per_hour=0.0, **offer)) == (
        "on_demand_dollars_per_hour must be > 0, got 0.0"
    )
    with spelled_by(flag_of):
        assert refused(lambda: rent([], on_demand_dollars_per_hour=1e300, **offer)) == (
            "--on-demand must be <= 1e+09, got 1e+300"
        )
        assert refused(lambda: solve([POINT], "V100", batch_size=10**13)) == (
            "--batch-size must be <= 1000000000000, got 10000000000000"
        )
        assert refused(lambda: solve([POINT], None, batch_size=1)).startswith("--gpus must be")
    assert refused(lambda: hetflow.Cluster.parse(None)) == "text must be a string, got None"  # type: ignore[arg-type]
    assert refused(lambda: hetflow.solve([POINT], "pool.json", batch_size=16)) == (
        "pool='pool.json' is the name of a file, not of devices"
    )
    plan = hetflow.solve([POINT], "V100", batch_size=16)
    hetflow.write(tmp_path / "plan.json", plan)
    (tmp_path / "train.py").touch()
    (worker,) = hetflow.dry_run(tmp_path / "plan.json", tmp_path / "train.py", folder="run")
    assert worker.arguments[-1] == str(tmp_path / "train.py")
    for path in ("a\0b", "x" * 5000):
        assert "cannot be written: " in refused(partial(hetflow.write, path, plan))
        assert "cannot be read: " in refused(partial(hetflow.read, path))
    with pytest.raises(TypeError, match=r"solve\(\) missing a required argument: 'batch_size'"):
        solve([POINT], "V100")
    assert hetflow.check(tmp_path / "plan.json", [POINT], "V100") == []
    with pytest.raises(FileError, match="nothing: no such file"):
        hetflow.check("nothing")
    hetflow.write(tmp_path / "pool.json", hetflow.Cluster.parse("V100"))
    with pytest.raises(FileError, match=r"pool\.json: must be hetflow\.plan/2 or .*cluster/1"):
        hetflow.check(tmp_path / "pool.json")


def test_an_option_that_there_is_not_is_no_longer_passed_over() -> None:
    for verb in (hetflow.export, hetflow.launch, hetflow.simulate):
        with pytest.raises(TypeError, match="unexpected keyword argument 'sed'; did .* 'seed'"):
            verb("a", "b", "c", sed=1)  # type: ignore[call-arg, arg-type]


def test_a_decorated_function_is_checked_before_it_runs() -> None:
    called = []

    @checks
    def verb(pool: str, names: Sequence[str] = ()) -> None:
        called.append(pool)

    with pytest.raises(ProblemError, match="names must be a list of strings, got 'ab'"):
        verb("x", "ab")
    assert called == []
    verb("x", ["ab"])
    assert called == ["x"]
