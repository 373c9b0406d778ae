"""Errors name the argument in Python, and the flag on the command line."""

from pathlib import Path
from typing import Literal, TypedDict, Unpack

import pytest

import hetflow
from hetflow.api.naming import flags_are_meant, names_arguments
from hetflow.cli.main import run
from hetflow.schema.errors import HetflowError, LaunchError, ProblemError


class Options(TypedDict, total=False):
    on_failure: str


@names_arguments(gpus="pool", state_bytes="optimizer=State(...)")
def verb(
    message: str,
    hint: str | None = None,
    *,
    pool: str = "",
    runs: str = "",
    schedule: str = "",
    kind: Literal["split", "pipeline"] = "split",
    gap: float = 0,
    num_stages: int = 1,
    repetitive: bool = False,
    **options: Unpack[Options],
) -> None:
    raise ProblemError(message, hint=hint)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("give either --gpus or --runs", "give either pool or runs"),
        ("for example --gpus 2xV100", 'for example pool="2xV100"'),
        ("--gpus '2x': cannot read it", "pool='2x': cannot read it"),
        ("--gap concerns pipelines", "gap concerns pipelines"),
        ("add --runs DIR, or leave --gap out", "add runs=DIR, or leave gap out"),
        ("add --repetitive --schedule 2bw", 'add repetitive=True, schedule="2bw"'),
        ("--kind pipeline is needed", 'kind="pipeline" is needed'),
        ("--num-stages 3: too many", "num_stages=3: too many"),
        ("give --on-failure replace: start", 'give on_failure="replace": start'),
        ("add --layers, or run `hetflow a --gap`", "add --layers, or run `hetflow a --gap`"),
        ("my--gap.json and a/--gap stay", "my--gap.json and a/--gap stay"),
        ("say --schedule a|b, or --state-bytes", "say schedule a|b, or optimizer=State(...)"),
    ],
)
def test_flags_become_arguments_where_a_program_calls(written: str, said: str) -> None:
    with pytest.raises(HetflowError) as caught:
        verb(written, written)
    assert [caught.value.message, caught.value.hint, str(caught.value)] == [said, said, said]
    with flags_are_meant(), pytest.raises(HetflowError) as kept:
        verb(written)
    assert [kept.value.message, kept.value.hint] == [written, None]


def test_what_a_script_says_of_its_own_flags_stays() -> None:
    @names_arguments()
    def launch(gap: float = 0) -> None:
        raise LaunchError("worker 0 failed: no argument --gap 3", hint="leave --gap out")

    with pytest.raises(LaunchError) as caught:
        launch()
    assert str(caught.value) == caught.value.message == "worker 0 failed: no argument --gap 3"
    assert caught.value.hint == "leave gap out"


def test_a_public_function_and_its_command_name_their_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProblemError) as caught:
        hetflow.resize(tmp_path)
    error = caught.value
    assert (error.message, error.hint) == (
        "give either pool or plan",
        'for example pool="2xV100"',
    )
    assert run(["resize", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "hetflow: give either --gpus or --plan\nhint: for example --gpus 2xV100\n"
    )
    with pytest.raises(ProblemError, match="continuous trace needs jobs_per_hour, in jobs"):
        hetflow.simulate("continuous-single", "sample:throughputs.csv", "4xV100")
