"""Every Python block and every hetflow command of README and docs works as it stands."""

import os
import re
import sys
from pathlib import Path

import pytest
import typer

from hetflow.cli.main import app, run
from hetflow.tests import programs

from .pages import PAGES, ROOT, Block, Command, blocks, name_of

pytestmark = pytest.mark.processes
_LIMIT_SECONDS = 600.0


def _runs(block: Block) -> bool:
    return block.language == "python" or any(c.hetflow() is not None for c in block.commands())


FAST = [page for page in PAGES if any(b.mark == "" and _runs(b) for b in blocks(page))]
SLOW = [page for page in PAGES if any(block.mark == "slow" for block in blocks(page))]


def test_marks_are_known() -> None:
    for page in PAGES:
        for block in blocks(page):
            known = block.mark in ("", "slow") or block.is_parsed_only
            assert known or block.language not in ("", "bash", "console", "python"), block.where


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_exists(page: Path) -> None:
    for block in blocks(page):
        for command in block.commands():
            arguments = command.hetflow()
            if arguments is not None:
                _parse(command, arguments)


def _parse(command: Command, arguments: list[str]) -> None:
    words = [re.sub(r"\$\w+", "1", word) for word in arguments if word != "..."]
    is_cut = len(words) < len(arguments)
    node, name = typer.main.get_command(app), "hetflow"
    while hasattr(node, "commands") and words:
        two = " ".join(words[:2])  # cluster start
        name = two if two in node.commands else words[0]
        if name not in node.commands:
            name = "hetflow"
            break
        words = words[len(name.split()) :]
        node = node.commands[name]
    assert name != "hetflow" or not words or words[0].startswith("-"), (
        f"{command.block.where}: no command {words[0]}"
    )
    try:
        node.make_context(name, words)
    except Exception as error:
        if is_cut and type(error).__name__ == "MissingParameter":
            return
        pytest.fail(f"{command.block.where}: {command.line}: {error}")


@pytest.mark.parametrize("page", FAST, ids=name_of)
def test_blocks_run(page: Path, sandbox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walk = [block for block in blocks(page) if block.mark == ""]
    _run_page(walk, sandbox, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=name_of)
def test_slow_blocks_run(page: Path, sandbox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walk = [block for block in blocks(page) if not block.is_parsed_only]
    while walk[-1].mark != "slow":  # what follows runs in the fast suite
        walk.pop()
    _run_page(walk, sandbox, capsys)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a reader has it: in a checkout, and in no launch."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("HETFLOW_") or name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(programs.VARIABLE, programs.preloaded())
    return tmp_path


def _run_page(walk: list[Block], sandbox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for block in walk:
        if block.language == "python" and block.title is not None:
            compile(block.text, block.where, "exec")
            (sandbox / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            code = compile("\n" * block.line + block.text, block.where, "exec")
            exec(code, names)
        for command in block.commands():
            _run_command(command, capsys)


def _run_command(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command.hetflow()
    capsys.readouterr()
    if arguments is not None:
        code, said = run(arguments), capsys.readouterr()
        output, errors = said.out, said.err
    elif command.words[:1] == ["python"]:
        done = programs.run([sys.executable, *command.words[1:]], timeout=_LIMIT_SECONDS)
        code, output, errors = done.returncode, done.stdout, done.stderr
    else:
        return
    assert code == 0, f"{command.block.where}: {command.line}: {errors}"
    if command.output is not None and command.block.mark == "":
        expected = re.escape("\n".join(command.output).strip()).replace(r"\.\.\.", ".*")
        assert re.fullmatch(expected, output.strip()), f"{command.block.where}:\n{output}"
