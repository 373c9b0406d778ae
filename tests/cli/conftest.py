"""Profiles and a way to run the command line in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.schema import files
from hetflow.schema.profile import Profile
from hetflow.tests.handmade import profile


@dataclass(frozen=True)
class Answer:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def hetflow(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(code=code, stdout=captured.out, stderr=captured.err)

    return call


@pytest.fixture
def make_profile() -> Callable[..., Profile]:
    return profile


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir()
    files.write(folder / "v100.json", profile("V100", 1.0))
    files.write(folder / "p100.json", profile("P100", 4.0))
    return folder
