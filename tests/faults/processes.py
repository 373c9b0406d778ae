"""The processes of one run, found by a mark in their environment (Linux)."""

import os
import signal
import time
from pathlib import Path

MARK = "HETFLOW_TEST_CAMPAIGN"


class Processes:
    """All that descends from commands started with ``environment``.

    The system shows the environment that a process was started with; a worker forked from a
    preloaded process shows the preloaded one's, which its launch started with the same mark.

    Args:
        mark: A name that no other run has.
    """

    def __init__(self, mark: str) -> None:
        # No preloaded process that others started: it would not have the mark.
        self.environment = {**os.environ, MARK: mark, "HETFLOW_PRELOAD": ""}
        self._mark = f"{MARK}={mark}".encode()
        self.seen: set[int] = set()

    def alive(self) -> dict[int, dict[bytes, bytes]]:
        """Environments by process id; without zombies."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
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
