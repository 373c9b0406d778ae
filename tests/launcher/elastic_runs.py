"""Launches whose workers change, seen from outside: start, steps, resizes, kills, digests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetflow.schema import files
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.tests import programs
from hetflow.tests.plan_parts import split_plan, whole_group

HETFLOW = [sys.executable, "-m", "hetflow.cli.main"]
SCRIPT = Path(__file__).with_name("elastic_script.py")
NODES, NODE_SAMPLES = 8, 2
STEPS_AN_EPOCH = 3


def plan_of(
    nodes: Sequence[int],
    types: Sequence[str] = (),
    *,
    model: str = "elastic",
    samples: int = NODE_SAMPLES,
) -> Plan:
    """One device for each number of virtual nodes of so many samples."""
    names = types or ["cpu:fast"] * len(nodes)
    return split_plan(
        model=model,
        global_batch_size=sum(nodes) * samples,
        groups=tuple(
            whole_group(
                device_type=name,
                num_devices=1,
                device_batch_size=number * samples,
                virtual_nodes=number,
                virtual_node_batch_size=samples,
            )
            for name, number in zip(names, nodes, strict=True)
        ),
        predicted=Prediction(step_seconds=0.01, samples_per_second=1600.0),
        proof=Proof(
            termination="feasible", objective=0.01, lower_bound=None, gap=None, method="by hand"
        ),
    )


def around_script(path: Path, first: str) -> Path:
    """A script that does something first, then what ``elastic_script.py`` does."""
    last = f'import runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name="__main__")\n'
    path.write_text(first + last)
    return path


def wait_until(happened: Callable[[], Any], seconds: float = 120) -> Any:
    """What ``happened`` returns, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


class Launch:
    """A launch of the script in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[int],
        *options: str,
        epochs: int = 4,
        seconds: float = 0.0,
        holds: Sequence[int] = (),
        script: Path = SCRIPT,
        plan: Plan | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run = folder, folder / "run"
        files.write(folder / "plan.json", plan or plan_of(nodes))
        command = [*HETFLOW, "launch", "--determinism", "elastic", *options, "-o", str(self.run)]
        command += [str(folder / "plan.json"), str(script), str(folder / "digest")]
        command += [str(epochs), str(seconds), *map(str, holds)]
        self.process = programs.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def steps(self) -> list[tuple[float, int, int, int, int]]:
        """(time, step, rank, workers, pid) of every step that a worker has completed."""
        found = []
        for path in self.folder.glob("steps-*"):
            for line in path.read_text().splitlines():
                at, step, rank, size = line.split()
                found.append((float(at), int(step), int(rank), int(size), int(path.name[6:])))
        return sorted(found)

    def wait_for_step(self, number: int, workers: int = 1) -> None:
        """Wait until so many workers have completed a step."""
        wait_until(
            lambda: (
                self.process.poll() is not None
                or len({s[4] for s in self.steps() if s[1] == number}) >= workers
            )
        )
        assert self.process.poll() is None, self.process.communicate()[1]

    def wait_for_newcomers(self, number: int) -> None:
        """Wait until so many workers have ever come to their first batch."""
        logs = self.run / "logs"
        wait_until(
            lambda: sum("prepared" in p.read_text() for p in logs.glob("rank*.out")) >= number
        )
        time.sleep(1.0)  # until they have said so, on a busy machine too

    def go(self, step: int) -> None:
        """Let the workers go on after a step that they hold at."""
        (self.folder / f"go-{step}").touch()

    def pid_of(self, rank: int) -> int:
        """The process that has the rank now."""
        return next(pid for _, _, found, _, pid in reversed(self.steps()) if found == rank)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> int:
        """Send a worker a signal; its process id."""
        pid = self.pid_of(rank)
        os.kill(pid, number)
        return pid

    def resize(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """Run ``hetflow resize``."""
        return programs.run(
            [*HETFLOW, "resize", str(self.run), *options],
            timeout=150,
        )

    def resize_later(self, *options: str) -> "programs.Program | subprocess.Popen[str]":
        """Begin ``hetflow resize``."""
        return programs.start(
            [*HETFLOW, "resize", str(self.run), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def end(self) -> tuple[int, str]:
        """Wait for the end, with no more sleep between steps; exit code and what it said."""
        (self.folder / "hurry").touch()
        _, err = self.process.communicate(timeout=200)
        return self.process.returncode, err

    def digest(self) -> str:
        """Digest of a run that succeeded."""
        code, err = self.end()
        assert code == 0, err
        return (self.folder / "digest").read_text()

    def record(self) -> dict[str, Any]:
        """The run record."""
        found: dict[str, Any] = json.loads((self.run / "run.json").read_text())
        return found
