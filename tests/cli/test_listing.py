"""Commands are listed without being imported, and only the one that is used is built."""

import subprocess
import sys

import typer

from hetflow.cli.main import COMMANDS, app

LOADED = """
import sys
from hetflow.cli.main import run
run(sys.argv[1:])
print(*sorted(sys.modules))
"""


def test_help_imports_no_command() -> None:
    loaded = _loaded("--help")
    commands = {f"hetflow.cli.{each.where.split('.')[0]}" for each in COMMANDS.values()}
    assert "hetflow.cli.listing" in loaded
    assert not loaded & (commands | {"pydantic", "numpy"})


def test_a_command_of_two_words_is_built_alone() -> None:
    loaded = _loaded("cluster", "drain", "--help")
    assert "hetflow.cli.cluster" in loaded
    assert not loaded & {"hetflow.cli.rent", "hetflow.cli.simulate"}


def test_every_listed_command_is_built_under_its_name() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {name: command.name for name, command in commands.items()} == {
        name: name for name in COMMANDS
    }


def test_every_command_can_answer_in_json() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = {name: {each.name for each in commands[name].params} for name in COMMANDS}
    assert [name for name, known in flags.items() if "json" not in known] == []


def _loaded(*arguments: str) -> set[str]:
    """The modules that one command imports."""
    answer = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True
    )
    return set(answer.stdout.splitlines()[-1].split())
