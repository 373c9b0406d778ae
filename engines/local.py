"""Leases as processes on this host, on real or emulated devices."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..devices.backend import DEVICES, LocalDevice
from ..devices.emulated import is_emulated
from ..devices.local import devices_of_types
from ..schema.cluster import Cluster
from ..schema.errors import FileError, ProblemError
from .keeper import ENDED, LOCK, STARTED, WORK, start_ticks, write_atomically
from .protocol import EngineDevice, Fate, Work
from .registry import engine

_KEEPER = "hetflow.engines.keeper"
_ASKED = "asked.json"


class LocalEngine:
    """Processes of this host; they outlive the scheduler.

    A lease's folder holds ``work.json`` (what to run), ``started.json`` and ``ended.json``, written
    by its keeper, and ``lock``: a lease is over exactly when nobody holds that.
    """

    name = "local"

    def __init__(self, pool: Cluster) -> None:
        """Offer devices.

        Args:
            pool: The devices; all but emulated ones are this host's.

        Raises:
            ProblemError: The pool names more than one server, or what this host has not.
        """
        if pool.num_servers > 1:
            raise ProblemError(
                f"the engine local is this host, and the pool has {pool.num_servers} servers",
                hint="give its devices, such as --gpus 2xV100,2xP100",
            )
        self._devices = tuple(
            EngineDevice(f"{name}:{number}", name, "localhost")
            for name, count in pool.num_devices.items()
            for number in range(count)
        )
        self._keepers: dict[Path, subprocess.Popen[bytes]] = {}
        self._local = _local_devices(pool)

    def devices(self) -> tuple[EngineDevice, ...]:
        """All devices; those of this host are up."""
        return self._devices

    def start(self, work: Work) -> None:
        """Start a keeper, which starts the launch.

        Raises:
            FileError: The lease's folder cannot be written.
        """
        with (work.folder / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # it runs
            if (work.folder / STARTED).exists():
                return  # it ran
            try:
                write_atomically(work.folder / WORK, self._document(work))
            except OSError as error:
                raise FileError(f"{work.folder}: {error.strerror}") from None
            self._keepers[work.folder] = subprocess.Popen(
                [sys.executable, "-m", _KEEPER, str(work.folder), str(lock.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )

    def _document(self, work: Work) -> dict[str, object]:
        return {
            "command": list(work.command),
            "directory": str(work.directory),
            "environment": {**work.environment, **self._visibility(work.devices)},
            "devices": [device.name for device in work.devices],
        }

    def _visibility(self, held: Sequence[EngineDevice]) -> dict[str, str]:
        """The environment in which a launch sees its own accelerators alone."""
        seen: dict[str, list[str]] = {}
        for local in self._local.values():
            if not local.is_host:
                seen.setdefault(local.kind, [])
        for device in held:
            known = self._local.get(device.device_type)
            if known is not None and not known.is_host:
                number = int(device.name.rpartition(":")[2])
                seen[known.kind].append(known.torch_devices[number])
        environment: dict[str, str] = {}
        for kind, names in seen.items():
            environment |= DEVICES.get(kind).visibility(names)
        return environment

    def stop(self, folder: Path) -> None:
        """Send the launch SIGTERM, once: a second one would end it before it has saved."""
        if not (folder / _ASKED).exists() and _signal(folder, signal.SIGTERM):
            write_atomically(folder / _ASKED, {})

    def kill(self, folder: Path) -> None:
        """Send the launch SIGKILL; its workers die with it."""
        _signal(folder, signal.SIGKILL)

    def fate(self, folder: Path) -> Fate:
        """What became of a lease, by its lock and what its keeper wrote."""
        if _is_locked(folder):
            return Fate("running")
        keeper = self._keepers.pop(folder, None)
        if keeper is not None:
            keeper.wait()  # it held the lock to its end
        ended = _read(folder / ENDED)
        if ended is not None:
            return Fate("ended", ended["exit_code"])
        return Fate("ended") if (folder / STARTED).exists() else Fate("absent")


def _signal(folder: Path, number: int) -> bool:
    """Send a lease's launch a signal; False where it is not there, or not there yet."""
    started = _read(folder / STARTED)
    if started is None or started["pid"] is None or not _is_locked(folder):
        return False
    if start_ticks(started["pid"]) != started["ticks"]:
        return False
    with suppress(ProcessLookupError):
        os.kill(started["pid"], number)
    return True


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _read(path: Path) -> dict[str, int] | None:
    try:
        document: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return document


def _local_devices(pool: Cluster) -> dict[str, LocalDevice]:
    """This host's devices of the pool's types; emulated types need none of their own.

    Raises:
        ProblemError: The host has fewer of a type.
    """
    wanted = {name: n for name, n in pool.num_devices.items() if not is_emulated(name)}
    found = devices_of_types(wanted)
    for name, number in wanted.items():
        present = found[name].num_devices if name in found else 0
        if present < number:
            raise ProblemError(
                f"the pool has {number} x {name}, this host {present}",
                hint="`hetflow devices` lists what it has, and how to name emulated types",
            )
    return found


engine("local")(LocalEngine)
