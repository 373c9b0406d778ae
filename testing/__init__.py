"""Test training scripts for GPUs where there are none: a CUDA device in software, with a clock.

    from hetflow import testing

    gpus = testing.gpus("V100,A100", tmp_path)
    gpus.run(["torchrun", "--nproc-per-node=2", "train.py"])
    timeline = gpus.timeline()
    assert timeline.hidden_share > 0.8

docs/gpus.md says what it shows, and what it cannot.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .fakecuda import build, cards
from .timeline import REAL, DeadlockError, Rates, Timeline, timeline_of

__all__ = ["DeadlockError", "Gpus", "Rates", "Timeline", "gpus"]

SITE = Path(__file__).parent / "fakecuda" / "site"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """A machine of software GPUs. A process with its ``environment`` sees them as CUDA devices.

    Args:
        folder: Where programs run, and what they leave.
        environment: All variables of such a process.
    """

    folder: Path
    environment: Mapping[str, str] = field(repr=False)

    def run(
        self, command: Sequence[str | Path], timeout_seconds: float = 600.0
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program in the folder to its end; its output is text.

        Raises:
            subprocess.CalledProcessError: It failed; a note has what it said on stderr.
            subprocess.TimeoutExpired: It took longer.
        """
        try:
            return subprocess.run(
                command,
                env=dict(self.environment),
                cwd=self.folder,
                timeout=timeout_seconds,
                check=True,
                capture_output=True,
                text=True,
            )
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)  # else a failed test shows the exit status alone
            raise

    @property
    def faults(self) -> list[str]:
        """Races and wrong collectives so far, of all processes."""
        found = Path(self.environment["FAKECUDA_FAULTS"]).glob("faults-*")
        return sorted({line for path in found for line in path.read_text().splitlines()})

    def timeline(self, rates: Rates = REAL) -> Timeline:
        """When all that ran so far would have run on the devices.

        Raises:
            DeadlockError: Collectives wait for each other, so real devices would hang.
        """
        return timeline_of(Path(self.environment["FAKECUDA_TIMELINE"]), rates)


def gpus(machine: str, folder: Path, **settings: str) -> Gpus:
    """A machine with these GPUs, of a torch that is built for CPUs.

    Args:
        machine: Its cards: ``V100,A100``; ``V100:64MiB`` has less memory.
        folder: An empty folder, such as pytest's ``tmp_path``; it is made where there is none.
        settings: Further variables; docs/gpus.md lists those of the device.

    Raises:
        CannotBuild: There is no compiler, or torch is no CPU build.
        ValueError: There is no such card.
    """
    build.library()
    cards.machine({"FAKECUDA": machine})
    folder = folder.resolve()  # programs run there, where a path from here would lead elsewhere
    kept = {name: folder / name.lower() for name in ("FAKECUDA_FAULTS", "FAKECUDA_TIMELINE")}
    for path in kept.values():
        path.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH")))),
        "FAKECUDA": machine,
        **{name: str(path) for name, path in kept.items()},
        **settings,
    }
    return Gpus(folder=folder, environment=environment)
