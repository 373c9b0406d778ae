"""Two launchers on one machine, as on two hosts, seen from outside."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from hetflow.schema import files
from hetflow.tests import programs

from .elastic_runs import SCRIPT, plan_of, wait_until
from .test_hosts import free_port

TYPES = ("cpu:slow", "cpu:fast")  # what hosts 0 and 1 have


class Hosts:
    """A launch over two hosts; the first rank, which saves, is on host 1.

    Args:
        folder: Of its own.
        number: Of the launch in this folder.
        nodes: Virtual nodes of the two workers.
        options: Of both launchers.
        seconds: How long the script sleeps in each step.
        epochs: Of the script.
        script: The training script; it gets the digest's file, ``epochs`` and ``seconds``.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        nodes: Sequence[int],
        *options: str,
        seconds: float = 0.0,
        epochs: int = 4,
        script: Path = SCRIPT,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        files.write(folder / "plan.json", plan_of(nodes, TYPES[::-1]), force=True)
        endpoint = f"127.0.0.1:{free_port()}"
        self.runs = [folder / f"run{number}-{node}" for node in range(2)]
        self.errors = [folder / f"errors{number}-{node}" for node in range(2)]
        self.processes = []
        for node in range(2):
            command = [sys.executable, "-m", "hetflow.cli.main", "launch"]
            command += ["--determinism", "elastic", *options, "--nnodes", "2"]
            command += ["--node-rank", str(node), "--rdzv-endpoint", endpoint]
            command += ["--devices", f"1x{TYPES[node]}", "-o", str(self.runs[node])]
            command += [str(folder / "plan.json"), str(script), str(folder / "digest")]
            with self.errors[node].open("wb") as errors:
                self.processes.append(self._start([*command, str(epochs), str(seconds)], errors))

    def _start(
        self, command: list[str], errors: IO[bytes]
    ) -> "programs.Program | subprocess.Popen[str]":
        return programs.start(command, stdout=subprocess.DEVNULL, stderr=errors, env=os.environ)

    def steps(self) -> list[tuple[int, int, int]]:
        """(step, rank, process) of every step that a worker has completed."""
        found = []
        for path in self.folder.glob("steps-*"):
            for line in path.read_text().splitlines():
                _, step, rank, _ = line.split()
                found.append((int(step), int(rank), int(path.name[6:])))
        return sorted(found)

    def wait_for_step(self, number: int, after: Sequence[int] = ()) -> None:
        """Wait until both ranks have done a step, in processes that are not in ``after``."""
        wait_until(
            lambda: (
                any(process.poll() is not None for process in self.processes)
                or len({s[1] for s in self.steps() if s[0] == number and s[2] not in after}) == 2
            )
        )
        assert all(process.poll() is None for process in self.processes), self.said()

    def pid_of(self, rank: int) -> int:
        """The process of a rank."""
        return next(pid for _, found, pid in reversed(self.steps()) if found == rank)

    def said(self) -> list[str]:
        """What each launcher said."""
        return [path.read_text() for path in self.errors]

    def end(self) -> list[int]:
        """Wait for both; their exit codes."""
        return [process.wait(timeout=200) for process in self.processes]
