"""Hosts with GPUs for tests: the real ones of this machine, or hosts of the software device."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hetflow.testing import SITE
from hetflow.testing.fakecuda import build
from hetflow.testing.timeline import REAL, Rates, Timeline, timeline_of
from hetflow.tests import programs

HETFLOW = [sys.executable, "-m", "hetflow.cli.main"]


@dataclass(frozen=True, slots=True)
class Host:
    """A host with GPUs. ``types`` are the device types that were asked for, in that order."""

    folder: Path
    types: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    is_real: bool = False

    def also(self, **settings: str) -> "Host":
        """The same host, with other variables."""
        return replace(self, environment={**self.environment, **settings})

    def start(self, *arguments: str | Path, **streams: Any) -> Any:
        """Start ``hetflow`` with these arguments."""
        return programs.start(
            [*HETFLOW, *arguments], env=self.environment, cwd=self.folder, **streams
        )

    def run(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run ``hetflow`` with these arguments to its end."""
        command = [*HETFLOW, *arguments]
        return programs.run(command, env=self.environment, cwd=self.folder, timeout=150)

    def done(self, *arguments: str | Path) -> str:
        """What ``hetflow`` says on stdout; it must succeed."""
        found = self.run(*arguments)
        assert found.returncode == 0, found.stderr
        return found.stdout

    def python(self, text: str) -> str:
        """What a Python program says on stdout; it must succeed."""
        path = self.folder / "program.py"
        path.write_text(text)
        command = [sys.executable, path]
        found = programs.run(command, env=self.environment, cwd=self.folder, timeout=150)
        assert found.returncode == 0, found.stderr
        return found.stdout

    def timeline(self, rates: Rates = REAL) -> Timeline:
        """When all that ran so far would have run on the devices."""
        return timeline_of(Path(self.environment["FAKECUDA_TIMELINE"]), rates)

    @property
    def faults(self) -> list[str]:
        """Races and wrong collectives so far, of all processes."""
        folder = Path(self.environment.get("FAKECUDA_FAULTS", self.folder / "none"))
        return sorted({line for path in folder.glob("faults-*") for line in _lines(path)})


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@cache
def real_types() -> tuple[str, ...]:
    """The device types of the GPUs of this machine, one item a GPU, the most frequent first."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = subprocess.run([*HETFLOW, "devices", "--json"], capture_output=True, check=True)
    devices = [d for d in json.loads(found.stdout)["devices"] if d["device_type"] != "cpu"]
    devices.sort(key=lambda device: -device["num_devices"])
    return tuple(d["device_type"] for d in devices for _ in range(d["num_devices"]))


def software_environment(machine: str) -> dict[str, str]:
    """The environment in which processes see a machine of the software device."""
    return {
        **os.environ,
        programs.VARIABLE: programs.preloaded("software device"),
        "PYTHONPATH": str(SITE),
        "FAKECUDA": machine,
    }


def software_host(folder: Path, machine: str, **settings: str) -> Host:
    """A host of the software device; skips the test where that cannot be built.

    Args:
        folder: Of the test.
        machine: Its cards, as FAKECUDA names them.
        settings: Further variables; a timeline's folder is one in ``folder``.
    """
    try:
        build.library()
    except build.CannotBuild as error:
        pytest.skip(str(error))
    faults = folder / "faults"
    faults.mkdir(exist_ok=True)
    if "FAKECUDA_TIMELINE" in settings:
        timeline = folder / settings["FAKECUDA_TIMELINE"]
        timeline.mkdir(exist_ok=True)
        settings["FAKECUDA_TIMELINE"] = str(timeline)
    environment = {**software_environment(machine), "FAKECUDA_FAULTS": str(faults), **settings}
    cards = [item.partition(":")[0].partition("/")[0] for item in machine.split(",")]
    return Host(folder, tuple(dict.fromkeys(cards)), environment)


def host_for(folder: Path, *numbers: int) -> Host:
    """A host with so many GPUs of a first type, of a second, and so on.

    The machine's own GPUs where there are any; the test is skipped where they are too few.
    """
    found = real_types()
    if not found:
        kinds = ("V100", "A100", "T4")[: len(numbers)]
        cards = [kind for kind, number in zip(kinds, numbers, strict=True) for _ in range(number)]
        return software_host(folder, ",".join(cards))
    kinds = tuple(dict.fromkeys(found))
    if len(kinds) < len(numbers):
        pytest.skip(f"needs GPUs of {len(numbers)} types; this machine has {', '.join(kinds)}")
    for kind, number in zip(kinds, numbers, strict=False):
        if found.count(kind) < number:
            pytest.skip(f"needs {number} x {kind}; this machine has {found.count(kind)}")
    return Host(folder, kinds[: len(numbers)], dict(os.environ), is_real=True)


GpuHost = Callable[..., Host]
