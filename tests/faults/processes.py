"""The processes of a campaign's runs, found by a mark in their environment (Linux)."""

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO
from unittest import mock

from hetflow.runtime.preload import VARIABLE, Preload, serving
from hetflow.runtime.protocol.environment import pins
from hetflow.tests.programs import COMMANDS, Program

MARK = "HETFLOW_TEST_CAMPAIGN"
# What a launch sets for its workers: with these, one preloaded process serves commands and workers.
_SETTINGS = {**pins("elastic"), "PYTHONUNBUFFERED": "1"}
OWN_PRELOADED_EVERY = 4


class Processes:
    """All that descends from commands started with ``environment``.

    The system shows the environment that a process was started with; a worker forked from a
    preloaded process shows the preloaded one's, which was started with the same mark.

    Args:
        mark: A name that no others have.
    """

    def __init__(self, mark: str) -> None:
        # No preloaded process that others started: it would not have the mark.
        self.environment = {**os.environ, **_SETTINGS, MARK: mark, VARIABLE: ""}
        self._mark = f"{MARK}={mark}".encode()
        self.seen: set[int] = set()
        self._standing: set[int] = set()

    def stand(self) -> None:
        """From now on, leave out those that are alive now."""
        self._standing |= self.alive().keys()

    def alive(self) -> dict[int, dict[bytes, bytes]]:
        """Environments by process id; without zombies."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) in self._standing:
                continue
            try:
                settings = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if self._mark in settings and not is_gone(int(folder.name)):
                pairs = (setting.split(b"=", 1) for setting in settings if b"=" in setting)
                found[int(folder.name)] = {pair[0]: pair[1] for pair in pairs}
        self.seen |= found.keys()
        return found

    def workers(self) -> list[int]:
        """The workers, newcomers too, in the order of their start."""
        return sorted(filter(_is_worker, self.alive()), key=lambda pid: (_started(pid), pid))

    def wait_until_gone(self, seconds: float) -> list[int]:
        """Those that are still there then."""
        deadline = time.monotonic() + seconds
        while (left := list(self.alive())) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.alive():
            send(pid, signal.SIGKILL)

    def shared_memory(self) -> list[str]:
        """What one of them left in shared memory."""
        names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
        return [name for name in names if any(f"_{pid}_" in name for pid in self.seen)]


class Commands:
    """Starts commands that have the mark, as forks of one preloaded process that has it too.

    Their workers are forked from it as well. Every fourth command starts a preloaded process of its
    own instead, as a launch does for users.

    Args:
        processes: The mark.
        socket: Where the preloaded process listens; it was started with the mark.
        preload: A connection to it.
    """

    def __init__(self, processes: Processes, socket: Path, preload: Preload) -> None:
        self.processes = processes
        self._socket, self._preload = str(socket), preload
        self._num_started = 0

    def start(
        self,
        command: Sequence[str],
        *,
        temporary: Path,
        stdout: int | IO[bytes],
        stderr: int,
    ) -> Program:
        """Start a command of hetflow.

        Args:
            command: The command.
            temporary: Its folder for temporary files.
            stdout: As for ``subprocess.Popen``.
            stderr: As ``stdout``.
        """
        self._num_started += 1
        has_own = self._num_started % OWN_PRELOADED_EVERY == 0
        environment = {**self.processes.environment, "TMPDIR": str(temporary)}
        environment[VARIABLE] = "" if has_own else self._socket
        forked = self._preload.start(command, environment, stdout=stdout, stderr=stderr)
        if forked is None:
            raise RuntimeError("the campaign's preloaded process has ended")
        return Program(forked, command)


@contextmanager
def marked_commands() -> Iterator[Commands]:
    """Commands with a mark of their own; torch is imported once for all of them."""
    processes = Processes(uuid.uuid4().hex)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hetflow-faults-"))
        with mock.patch.dict(os.environ, processes.environment):
            socket = stack.enter_context(serving(Path(folder), COMMANDS))
        preload = stack.enter_context(Preload(str(socket)))
        preload.wait(processes.environment, lambda: None)
        processes.stand()
        yield Commands(processes, socket, preload)


def _is_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"hetflow.runtime.worker" in command


def _started(pid: int) -> int:
    """When it started, in clock ticks since the system did; 0 where it has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in "ZX"


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
