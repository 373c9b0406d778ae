"""Profiles and a way to run the command line in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.schema import files
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.profile import BatchPoint, Profile, Sync


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


def profile(device_type: str, slowness: float, model: str = "resnet50") -> Profile:
    return Profile(
        model=model,
        device_type=device_type,
        device_memory_bytes=16 << 30,
        weight_bytes=100 << 20,
        update_seconds=0.004,
        batch_curve=tuple(
            BatchPoint(
                batch_size=size,
                step_seconds=slowness * (0.002 + 0.001 * size),
                peak_memory_bytes=(1 << 30) + size * (50 << 20),
            )
            for size in (8, 16, 32, 64)
        ),
        sync=Sync(num_devices=2, sync_seconds=0.02),
        optimizer=named_optimizer("sgd"),
    )


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
