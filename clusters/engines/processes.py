"""Leases as processes of this host, each with a keeper of its own.

A lease's folder holds ``work.json`` (what to run), ``started.json`` and ``ended.json``, written by
its keeper, and ``lock``: a lease is over exactly when nobody holds that.
"""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ...schema.errors import FileError
from .keeper import start_ticks
from .lease_folder import (
    ASKED,
    ENDED,
    LOCK,
    STARTED,
    WORK,
    private,
    progress,
    read_json,
    write_atomically,
)
from .protocol import Fate

_KEEPER = "hetflow.clusters.engines.keeper"


class HostLeases:
    """The leases of one host; they outlive whoever started them, if that is not ``bound``."""

    def __init__(self, bind: Callable[[], None] | None = None) -> None:
        """Hold none yet.

        Args:
            bind: Called in each keeper before it begins, to tie it to this process. None: keepers
                outlive it.
        """
        self._bind = bind
        self.keepers: dict[Path, subprocess.Popen[bytes]] = {}
        self._asked: set[Path] = set()

    def start(
        self, folder: Path, document: object, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a lease's keeper, which starts the launch, unless that was started before.

        Args:
            folder: The lease's.
            document: What the keeper reads (``work.json``).
            environment: Variables set besides those of this process.

        Raises:
            FileError: The folder cannot be written, or the host has no room for a process.
        """
        try:
            self._start(folder, document, environment or {})
        except OSError as error:
            raise FileError(f"{folder}: {error.strerror}") from None

    def _start(self, folder: Path, document: object, environment: Mapping[str, str]) -> None:
        with open(folder / LOCK, "w", opener=private) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # it runs
            if (folder / STARTED).exists():
                return  # it ran
            write_atomically(folder / WORK, document)
            self.keepers[folder] = subprocess.Popen(
                [sys.executable, "-m", _KEEPER, str(folder), str(lock.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
                env={**os.environ, **environment},
                preexec_fn=self._bind,
            )

    def stop(self, folder: Path) -> None:
        """Send the launch SIGTERM, once: a second one would end it before it has saved."""
        if folder in self._asked or (folder / ASKED).exists():
            return
        if _signal(folder, signal.SIGTERM):
            self._asked.add(folder)  # also where the disk is full
            write_atomically(folder / ASKED, {})

    def kill(self, folder: Path) -> None:
        """Send the launch SIGKILL; its workers die with it."""
        _signal(folder, signal.SIGKILL)

    def fate(self, folder: Path) -> Fate:
        """What became of a lease, by its lock and what its keeper wrote."""
        if is_locked(folder):
            return progress(folder)
        keeper = self.keepers.pop(folder, None)
        if keeper is not None:
            keeper.wait()  # it held the lock to its end
        self._asked.discard(folder)
        ended = read_json(folder / ENDED)
        if ended is not None:
            return Fate("ended", ended["exit_code"])
        return Fate("ended") if (folder / STARTED).exists() else Fate("absent")


def _signal(folder: Path, number: int) -> bool:
    """Send a lease's launch a signal; False where it is not there, or not there yet."""
    started = read_json(folder / STARTED)
    if started is None or started["pid"] is None or not is_locked(folder):
        return False
    if start_ticks(started["pid"]) != started["ticks"]:
        return False
    with suppress(ProcessLookupError):
        os.kill(started["pid"], number)
    return True


def is_locked(folder: Path) -> bool:
    """Whether a lease's keeper or launch is there, on a host that shares the folder's locks."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
