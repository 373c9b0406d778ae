"""Registries: own things first, plug-ins on first need, faults in one line."""

import importlib
import sys
from pathlib import Path

import pytest

from hetflow import plugins
from hetflow.cli.main import run
from hetflow.planning.checks.judges import JUDGES
from hetflow.planning.schedules.registry import generate, schedule
from hetflow.schema.errors import ProblemError
from hetflow.schema.plugins import Registry
from hetflow.schema.schedule import SCHEDULES
from hetflow.solvers.allocation.policy import POLICIES

GROUP = "hetflow.tests_of_plugins"


def declared(site: Path, distribution: str, entry_points: dict[str, str]) -> None:
    folder = site / f"{distribution}-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def things() -> Registry[str]:
    registry: Registry[str] = Registry("thing", group=GROUP, own=())
    sys.modules["registry_under_test"] = type(sys)("registry_under_test")
    sys.modules["registry_under_test"].things = registry  # type: ignore[attr-defined]
    return registry


def registers(site: Path, module: str, name: str, more: str = "") -> None:
    (site / f"{module}.py").write_text(
        f"{more}\nfrom registry_under_test import things\n"
        f"things.add({name!r}, 'of {module}', {module!r})\n"
    )


def test_a_plug_in_is_loaded_when_somebody_asks_for_it(site, things) -> None:
    registers(site, "first_plugin", "one")
    registers(site, "second_plugin", "two")
    assert things.names() == ()
    declared(site, "both", {"one": "first_plugin", "two": "second_plugin"})
    assert things.names() == ("one", "two")
    assert "first_plugin" not in sys.modules
    assert things.get("one") == "of first_plugin"
    assert "second_plugin" not in sys.modules
    assert things.loaded("two") is None
    assert things.all() == ("of first_plugin", "of second_plugin")


def test_a_broken_plug_in_hurts_only_those_who_ask_for_it(site, things) -> None:
    registers(site, "sound_plugin", "sound")
    registers(site, "broken_plugin", "broken", more="raise RuntimeError('no luck')")
    declared(site, "pieces", {"sound": "sound_plugin", "broken": "broken_plugin"})
    assert things.get("sound") == "of sound_plugin"
    assert "broken" in things.names()
    with pytest.raises(ProblemError) as caught:
        things.get("broken")
    assert caught.value.message == (
        "plug-in 'broken' of pieces 1.5 (broken_plugin) cannot be loaded: RuntimeError: no luck"
    )
    assert caught.value.hint == "fix or uninstall that distribution"


def test_a_plug_in_without_its_module_is_named(site, things) -> None:
    declared(site, "empty", {"gone": "no_such_module_at_all"})
    with pytest.raises(ProblemError, match="'gone' of empty 1.5 .* ModuleNotFoundError"):
        things.get("gone")


def test_an_entry_point_must_have_the_name_that_is_registered(site, things) -> None:
    registers(site, "other_plugin", "other")
    declared(site, "misnamed", {"wanted": "other_plugin"})
    with pytest.raises(ProblemError, match="of misnamed 1.5 .* registers no thing 'wanted'"):
        things.get("wanted")


def test_one_name_is_registered_once(things) -> None:
    things.add("one", "mine", "a.module")
    things.add("one", "mine, reloaded", "a.module")
    assert things.get("one") == "mine, reloaded"
    with pytest.raises(ProblemError, match="thing 'one' is registered by a.module and by b.module"):
        things.add("one", "theirs", "b.module")


def test_two_distributions_may_not_have_one_name(site, things) -> None:
    registers(site, "one_plugin", "same")
    registers(site, "another_plugin", "same")
    declared(site, "one", {"same": "one_plugin"})
    declared(site, "another", {"same": "another_plugin"})
    with pytest.raises(ProblemError, match="thing 'same' is registered by .*_plugin and by"):
        things.get("same")


def test_an_unknown_name_gets_a_guess_or_a_hint(things) -> None:
    things.add("gpipe", "it", "a.module")
    with pytest.raises(ProblemError, match="unknown thing 'gpip'; known are gpipe") as caught:
        things.get("gpip")
    assert caught.value.hint == "did you mean 'gpipe'?"
    with pytest.raises(ProblemError) as caught:
        things.get("xyzzy")
    assert caught.value.hint == f"install the plug-in that has it (entry points {GROUP})"


def test_an_error_in_a_plug_in_names_it_and_ends_with_2(site, monkeypatch, capsys) -> None:
    (site / "odd_plugin.py").write_text(
        "from hetflow.plugins import policy\n"
        "import odd_helpers\n"
        "@policy('odd', title='t', sense='max', unit='1')\n"
        "def goal(jobs):\n"
        "    return odd_helpers.level(jobs)\n"
    )
    (site / "odd_helpers.py").write_text("def level(jobs):\n    return [][3]\n")
    importlib.import_module("odd_plugin")
    asked = ["allocate", "sample:jobs.csv", "--throughputs", "sample:throughputs.csv"]
    asked += ["--gpus", "2xV100", "--policy", "odd"]
    try:
        assert run(asked) == 2
        said = capsys.readouterr().err
        assert "the plug-in of policy 'odd' (" in said
        assert "odd_plugin.py, line 5) failed: IndexError: list index out of range" in said
        assert "a bug" not in said
        assert "Traceback" not in said
        monkeypatch.setattr("odd_helpers.level", lambda _: 3)
        assert run(asked) == 2
        assert "the goal of policy 'odd' returned int, which has no optimise" in (
            capsys.readouterr().err
        )
    finally:
        POLICIES.remove("odd")


ASKED = ["allocate", "sample:jobs.csv", "--throughputs", "sample:throughputs.csv"]
ASKED += ["--gpus", "2xV100,2xP100,2xK80", "--policy", "strict"]


@pytest.fixture
def strict(site, capsys):
    """Run a policy, with a judge, whose goal has the given body; the exit code and stderr."""

    def ran(*body: str, judged: str = "jobs.steps") -> tuple[int, str]:
        (site / "strict_plugin.py").write_text(
            "from hetflow.plugins import *\n"
            f"judge('strict', Judge(level=lambda pool: {judged}), module=__name__)\n"
            "@policy('strict', title='t', sense='max', unit='1')\n"
            "def goal(jobs):\n" + "".join(f"    {line}\n" for line in body)
        )
        importlib.import_module("strict_plugin")
        try:
            return run(ASKED), capsys.readouterr().err
        finally:
            POLICIES.remove("strict")
            JUDGES.remove("strict")

    return ran


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        ("raise OSError('no licence server')", "OSError: no licence server"),
        ("open('/no/weights.json')", "FileNotFoundError: "),
        ("import no_such_solver", "ModuleNotFoundError: No module named 'no_such_solver'"),
    ],
)
def test_any_exception_of_a_plug_in_is_named_as_its_own(strict, line: str, failed: str) -> None:
    code, said = strict(line)
    assert code == 2
    assert "the plug-in of policy 'strict' (" in said
    assert f"strict_plugin.py, line 5) failed: {failed}" in said
    assert "a bug" not in said


def test_a_goal_of_another_shape_is_refused_in_a_line(strict) -> None:
    code, said = strict("return MaxMin(level=jobs.steps[:2])")
    assert code == 2
    assert "the level of the policy's goal has the shape (2,), not (6,)" in said


def test_what_a_plug_in_returned_is_not_called_a_bug_of_hetflow_alone(strict) -> None:
    code, said = strict("return MaxMin(level=jobs.steps)", judged="3")
    assert code == 1
    assert "a bug, of hetflow or of what a plug-in returned (" in said
    assert "policy 'strict'" in said


def test_a_schedule_from_outside_must_be_a_schedule(site) -> None:
    schedule("loose")(lambda shape: "FB")
    try:
        with pytest.raises(ProblemError, match="schedule 'loose' generated str, not a Schedule"):
            generate("loose", pipeline_parallel_size=2, num_microbatches=4)
    finally:
        SCHEDULES.remove("loose")


def test_a_policy_from_outside_finds_all_goals_in_plugins() -> None:
    for name in ("Total", "Ratio", "LeastCurve", "WaterFilling", "MaxMin"):
        assert issubclass(getattr(plugins, name), plugins.Goal)
    assert {
        "Deployment",
        "Entity",
        "Floats",
        "Instance",
        "Kind",
        "LeastAttained",
        "Outcome",
        "Pool",
    } <= set(plugins.__all__)
