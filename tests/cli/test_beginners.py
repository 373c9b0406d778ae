"""What a beginner meets: options by environment and file, and mistakes answered in plain words."""

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import Field, TypeAdapter, ValidationError

from hetflow.cli.main import app, plain_message, run

PROFILES = str(Path(__file__).parents[2] / "examples" / "virtualflow_6_5")
SOLVE = ["solve", "--profiles", PROFILES, "--gpus", "2xV100,8xP100"]


def variables_of(command: object, prefix: str) -> list[str]:
    with typer.main.get_command(app).make_context("hetflow", ["x"], resilient_parsing=True) as top:
        top.auto_envvar_prefix = prefix
        context = command.make_context(command.name, [], parent=top, resilient_parsing=True)  # type: ignore[attr-defined]
        found = [
            parameter.envvar or f"{context.auto_envvar_prefix}_{parameter.name.upper()}"
            for parameter in command.params  # type: ignore[attr-defined]
        ]
    return [name for each in found for name in ([each] if isinstance(each, str) else each)]


def test_each_option_has_a_variable_that_a_shell_can_set() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {"cluster start", "rent prices"} <= commands.keys()
    for command in commands.values():
        bad = [name for name in variables_of(command, "HETFLOW") if not name.isidentifier()]
        assert not bad, command.name


def test_a_command_of_two_words_takes_options_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETFLOW_CLUSTER_STOP_STATE", str(tmp_path / "here"))
    monkeypatch.setenv("HETFLOW_RENT_PRICES_WORK_HOURS", "7.5")
    assert run(["rent", "prices", "m.json", "--rate", "V100=1", "--show-config"]) == 0
    assert (
        "work_hours = 7.5  (environment HETFLOW_RENT_PRICES_WORK_HOURS)" in capsys.readouterr().out
    )


@pytest.mark.parametrize("command", ["launch", "submit", "rent run"])
def test_an_option_that_is_none_is_not_taken_for_a_file(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), "--restarts", "0", "plan.json", "train.py"]) == 2
    assert "hetflow: No such option: --restarts" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["split", "pipeline", "parallel"])
def test_the_table_of_solve_counts_for_each_kind_of_plan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hetflow.toml").write_text('[solve]\ngpus = "4xV100"\n')
    monkeypatch.chdir(tmp_path)
    asked = ["solve", kind, "--profiles", PROFILES, "--batch-size", "64", "--show-config"]
    assert run(asked) == 0
    assert "gpus = '4xV100'  (file hetflow.toml)" in capsys.readouterr().out


def test_a_table_takes_options_under_their_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hetflow.toml").write_text(
        '["cluster start"]\nround = 45\n[import]\nformat = "aws-spot-prices"\n'
    )
    monkeypatch.chdir(tmp_path)
    assert run(["cluster", "start", "--show-config"]) == 0
    assert "round = 45.0  (file hetflow.toml)" in capsys.readouterr().out
    assert run(["import", "x", "--show-config"]) == 0
    assert "format = 'aws-spot-prices'  (file hetflow.toml)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("[solv]\ngpus = 'a'", "no command is called 'solv'", "did you mean 'solve'?"),
        ("[solve]\nbatchsize = 8", "[solve] has no option 'batchsize'", "mean 'batch-size'?"),
        ("[solve]\nxyzzy = 8", "[solve] has no option 'xyzzy'", "see `hetflow solve --help`"),
        ("solve = 8", "solve must be a table such as [solve]", None),
    ],
)
def test_what_a_config_file_misspells_is_named(
    text: str,
    said: str,
    hint: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "hetflow.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run(["devices"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"hetflow: hetflow.toml: {said}"
    assert len(lines) == (1 if hint is None else 2)
    assert hint is None or hint in lines[1]


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, "abc", "must be a whole number, got 'abc'"),
        (Annotated[int, Field(ge=1)], "0", "must be at least 1, got '0'"),
        (Annotated[float, Field(le=1)], "2", "must be at most 1, got '2'"),
        (float, "x", "must be a number, got 'x'"),
    ],
)
def test_what_pydantic_says_of_a_value_is_put_in_plain_words(
    kind: Any, value: str, said: str
) -> None:
    with pytest.raises(ValidationError) as found:
        TypeAdapter(kind).validate_python(value)
    error = typer.BadParameter(found.value.errors()[0]["msg"], param_hint="--batch-size")
    error.__cause__ = found.value
    assert plain_message(error) == f"Invalid value for --batch-size: {said}"


@pytest.mark.parametrize(
    ("option", "value"), [("--batch-size", "abc"), ("--batch-size", "0"), ("--gap", "2")]
)
def test_a_bad_value_is_one_plain_line(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SOLVE, "--batch-size", "8", option, value]) == 2
    first, *hint = capsys.readouterr().err.splitlines()
    assert option in first
    assert "Input should" not in first
    assert hint in ([], ["hint: see `hetflow solve --help`"])


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [("--schedule", "1fb1", "1f1b"), ("--strategy", "pipelin", "pipeline")],
)
def test_a_name_that_is_nearly_known_is_guessed(
    option: str, value: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SOLVE, "--batch-size", "8192", option, value]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.endswith(f"; did you mean '{meant}'?")
    assert "Value error" not in first
