"""A cluster in memory: profiles made by hand, and an engine whose leases end when a test says."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetflow.clusters.engines.protocol import (
    OUTPUT,
    EngineDevice,
    Fate,
    UnsuitableDevicesError,
    Work,
)
from hetflow.clusters.scheduler.submission import Submission
from hetflow.tests import programs


def profile(device_type: str, seconds: float, speed: float) -> dict[str, object]:
    """A profile of one pass of 4 to 16 samples on an emulated type."""
    return {
        "schema": "hetflow.profile/1", "model": "tiny", "device_type": device_type,
        "device_memory_bytes": 1 << 30, "weight_bytes": 1000, "update_seconds": 0.001,
        "emulation": {"speed": speed, "base_device_type": "cpu"},
        "batch_curve": [
            {"batch_size": size, "step_seconds": seconds * size / 4, "peak_memory_bytes": 1 << 20}
            for size in (4, 8, 16)
        ],
        "sync": {"num_devices": 2, "sync_seconds": 0.001},
    }  # fmt: skip


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """A folder of profiles of a model on a fast and a slow emulated type."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for name, seconds, speed in (("cpu:fast", 0.02, 0.1), ("cpu:slow", 0.04, 0.05)):
        path = folder / f"{name.replace(':', '-')}.json"
        path.write_text(json.dumps(profile(name, seconds, speed)))
    return folder


@pytest.fixture
def asked(tmp_path: Path, profiles: Path) -> Callable[..., Submission]:
    """Make a job with sane defaults."""
    script = tmp_path / "train.py"
    script.write_text("")

    def make(name: str, **given: object) -> Submission:
        values: dict[str, object] = {
            "name": name, "script": str(script), "directory": str(tmp_path),
            "profiles": str(profiles), "batch_size": 16, "steps": 1000.0, "virtual_nodes": 4,
        }  # fmt: skip
        return Submission(**{**values, **given})  # type: ignore[arg-type]

    return make


@dataclass
class FakeEngine:
    """Leases that do nothing. It fails the test when two of them share a device or a job."""

    number: int = 4
    down: set[str] = field(default_factory=set)
    running: dict[Path, Work] = field(default_factory=dict)
    ended: dict[Path, int | None] = field(default_factory=dict)
    stopping: set[Path] = field(default_factory=set)
    heeds: bool = True
    waiting: set[int] = field(default_factory=set)
    """Jobs whose launches a batch system has not begun."""
    starting: set[int] = field(default_factory=set)
    """Jobs whose launches have begun, and have made no step."""
    never_began: set[Path] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    """Devices on which nothing can be started."""
    servers: dict[str, str] = field(default_factory=dict)
    """Of each type; ``here`` where it is not named."""
    name: str = "fake"
    kinds: tuple[str, ...] = ("cpu:fast", "cpu:slow")

    def devices(self) -> tuple[EngineDevice, ...]:
        return tuple(
            EngineDevice(
                f"{kind}:{i}", kind, self.servers.get(kind, "here"), f"{kind}:{i}" not in self.down
            )
            for kind in self.kinds
            for i in range(self.number)
        )

    def start(self, work: Work) -> None:
        if work.folder in self.running or work.folder in self.ended:
            return
        held = {device.name for device in work.devices}
        if held & self.refused:
            raise UnsuitableDevicesError("it waits for other devices")
        for other in self.running.values():
            assert other.folder.parent != work.folder.parent  # of one job
        self.check_free(held)
        assert not held & self.down
        self.running[work.folder] = work

    def check_free(self, held: set[str]) -> None:
        for other in self.running.values():
            assert not held & {device.name for device in other.devices}

    def stop(self, folder: Path) -> None:
        self.stopping.add(folder)
        if self.heeds and folder in self.running:
            self.end(folder, 143)

    def kill(self, folder: Path) -> None:
        self.end(folder, 137)

    def end(self, folder: Path, code: int | None, said: str = "") -> None:
        del self.running[folder]
        self.ended[folder] = code
        (folder / OUTPUT).write_text(said)

    def fail_to_begin(self, folder: Path) -> None:
        self.never_began.add(folder)
        self.end(folder, None)

    def fate(self, folder: Path) -> Fate:
        if folder in self.running:
            job = int(folder.parent.parent.name)
            if job in self.waiting:
                return Fate("waiting")
            return Fate("running" if job in self.starting else "training")
        if folder not in self.ended:
            return Fate("absent")
        return Fate("ended", self.ended[folder], has_begun=folder not in self.never_began)

    def jobs(self) -> dict[int, Path]:
        """The lease of each job that runs."""
        return {int(folder.parent.parent.name): folder for folder in self.running}


@pytest.fixture
def engine() -> FakeEngine:
    """Four fast devices and four slow ones."""
    return FakeEngine()


def write_workplace(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a script, and profiles whose steps take 20 and 40 ms, for commands that run there."""
    monkeypatch.setenv(programs.VARIABLE, programs.preloaded())
    monkeypatch.setenv("HETFLOW_STATE", str(folder / "state"))
    (folder / "train.py").write_text(script)
    (folder / "profiles").mkdir()
    for name, seconds, speed in (("cpu:fast", 0.005, 0.2), ("cpu:slow", 0.01, 0.1)):
        path = folder / "profiles" / f"{name.replace(':', '-')}.json"
        path.write_text(json.dumps(profile(name, seconds, speed)))
