"""Trainings of ``benchmarks/digest_table.py``, forked from the tests' preloaded process."""

import importlib.util
import json
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from hetflow.tests import programs

_BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "digest_table.py"
_spec = importlib.util.spec_from_file_location("digest_table", _BENCHMARK)
_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_table)

MAPPINGS = tuple(_table.MAPPINGS)
SHORT = ("--epochs", "2")


def run(
    mapping: str, level: str, folder: Path, *options: str
) -> "subprocess.CompletedProcess[str]":
    """One launch, as it ended."""
    command = _table.command_of(_table.MAPPINGS[mapping], level, folder, options, SHORT)
    return programs.run(command, timeout=_table.LIMIT_SECONDS)


def stopped(
    mapping: str, level: str, folder: Path, step: int, *options: str
) -> "subprocess.CompletedProcess[str]":
    """One launch that gets SIGTERM after so many steps, as it ended."""
    arguments = [*SHORT, "--stop-after", str(step)]
    command = _table.command_of(_table.MAPPINGS[mapping], level, folder, options, arguments)
    return programs.run_until_stopped(
        command, folder / "stopping", folder / "stopped", timeout=_table.LIMIT_SECONDS
    )


def launch(mapping: str, level: str, folder: Path) -> dict[str, str]:
    """The digests of a launch that nothing disturbs, by model."""
    done = run(mapping, level, folder)
    assert done.returncode == 0, done.stderr
    return written(folder)


@cache
def undisturbed(mapping: str, level: str) -> dict[str, str]:
    """The same; made once for all tests of this process."""
    with tempfile.TemporaryDirectory() as folder:
        return launch(mapping, level, Path(folder) / "whole")


def written(folder: Path) -> dict[str, str]:
    """The digests that a launch in this folder left."""
    found: dict[str, str] = json.loads((folder / "digests.json").read_text())
    return found
