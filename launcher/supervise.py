"""Hold the workers of this host: start, stream, watch, stop."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from .failures import Failure, failure_of
from .spawn import Process, WorkerCommand, failure_path, signal_group, start

GRACE_SECONDS = 5.0


class Signals:
    """While it is open, SIGINT, SIGTERM and SIGHUP are noted instead of ending the process."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self.count += 1


class Workers:
    """The workers of this host. The first rank's output is shown; all of it is kept in logs."""

    def __init__(self, folder: Path, *, stdout_to_stderr: bool) -> None:
        self._folder = folder
        self._stdout_to_stderr = stdout_to_stderr
        self._processes: dict[int, Process] = {}
        self._types: dict[int, str] = {}
        self._tees: list[threading.Thread] = []

    def start(self, commands: Sequence[WorkerCommand]) -> None:
        """Start them all. Call from the main thread: their lives hang on the starting thread."""
        for command in commands:
            failure_path(self._folder, command.rank).unlink(missing_ok=True)
            self._types[command.rank] = command.device_type
            self._processes[command.rank] = self._start(command)

    def _start(self, command: WorkerCommand) -> Process:
        out, err = self.logs(command.rank)
        with out.open("wb") as out_stream, err.open("wb") as err_stream:
            if command.rank != 0:
                return start(command, out_stream, err_stream)
        reads, writes = zip(os.pipe(), os.pipe(), strict=True)
        process = start(command, writes[0], writes[1])
        shown = (sys.stderr if self._stdout_to_stderr else sys.stdout, sys.stderr)
        for read, write, log, console in zip(reads, writes, (out, err), shown, strict=True):
            os.close(write)
            tee = threading.Thread(target=_tee, args=(read, log, console), daemon=True)
            tee.start()
            self._tees.append(tee)
        return process

    def logs(self, rank: int) -> tuple[Path, Path]:
        """Where a worker's stdout and stderr are kept."""
        return self._folder / "logs" / f"rank{rank}.out", self._folder / "logs" / f"rank{rank}.err"

    def all_done(self) -> bool:
        """Whether every worker has left with exit code 0."""
        return all(process.poll() == 0 for process in self._processes.values())

    def failures(self) -> list[Failure]:
        """The workers that have failed so far."""
        return [
            failure_of(
                rank,
                self._types[rank],
                process.returncode,
                failure_path(self._folder, rank),
                self.logs(rank)[1],
            )
            for rank, process in self._processes.items()
            if process.poll() not in (None, 0)
        ]

    def running(self) -> list[Failure]:
        """The workers that are still there, stopped ones only where some are, as failures."""
        pids = {r: process.pid for r, process in self._processes.items() if process.poll() is None}
        stopped = [rank for rank, pid in pids.items() if _is_stopped(pid)]
        return [
            Failure(
                exit_code=1,
                error="",
                rank=rank,
                device_type=self._types[rank],
                log=str(self.logs(rank)[1]),
            )
            for rank in stopped or pids
        ]

    def let_save(self, signals: Signals, grace_seconds: float) -> None:
        """Ask the workers to write a checkpoint after the step they are in, and leave.

        Waits until they are gone, the grace is over, or another signal comes.
        """
        asked, deadline = signals.count, time.monotonic() + grace_seconds
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        while any(process.poll() is None for process in self._processes.values()):
            if time.monotonic() > deadline or signals.count > asked:
                return
            time.sleep(0.02)

    def stop(self, signals: Signals | None = None) -> None:
        """End every worker and what it started: SIGTERM, a grace, SIGKILL. No orphan stays."""
        asked = signals.count if signals else 0
        for process in self._processes.values():
            if process.poll() is None:
                signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.poll() is None for process in self._processes.values()):
            impatient = signals is not None and signals.count > asked
            if time.monotonic() > deadline or impatient:
                break
            time.sleep(0.02)
        for process in self._processes.values():
            signal_group(process, signal.SIGKILL)
            process.wait()
        for tee in self._tees:
            tee.join(timeout=2)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process (Linux)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"


def _tee(read: int, log: Path, console: IO[str]) -> None:
    """Copy a pipe to a log and to the console, until its writers are gone."""
    with os.fdopen(read, "rb", buffering=0) as pipe, log.open("ab", buffering=0) as kept:
        shows = True
        while chunk := pipe.read(1 << 16):
            kept.write(chunk)
            shows = shows and _show(chunk, console)


def _show(chunk: bytes, console: IO[str]) -> bool:
    """Write to the console; say whether it is still there (a closed pipe is not an error)."""
    try:
        binary = getattr(console, "buffer", None)
        if binary is not None:
            binary.write(chunk)
        else:
            console.write(chunk.decode("utf-8", errors="replace"))
        console.flush()
    except (OSError, ValueError):
        return False
    return True
