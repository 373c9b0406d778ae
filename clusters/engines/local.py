"""Leases as processes on this host, on real or emulated devices, each with a keeper of its own.

A lease's folder holds ``work.json`` (what to run), ``started.json`` and ``ended.json``, written by
its keeper, and ``lock``: a lease is over exactly when nobody holds that.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...devices.backend import DEVICES
from ...devices.cpu import DEVICE_TYPE, GRAMMAR, is_emulated
from ...schema.cluster import Cluster
from ...schema.errors import FileError, ProblemError
from ...schema.options import option
from .keeper import start_ticks, stopped_with_parent
from .protocol import (
    ASKED,
    ENDED,
    LOCK,
    STARTED,
    WORK,
    EngineDevice,
    Fate,
    Work,
    document_of,
    engine,
    private,
    progress,
    read_json,
    write_atomically,
)

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

    def keep(
        self, folder: Path, document: object, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a lease's keeper, which starts the launch, unless that was started before.

        Raises:
            FileError: The folder cannot be written, or the host has no room for a process.
        """
        try:
            self._keep(folder, document, environment or {})
        except OSError as error:
            raise FileError(f"{folder}: {error.strerror}") from None

    def _keep(self, folder: Path, document: object, environment: Mapping[str, str]) -> None:
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


class LocalEngine(HostLeases):
    """Processes of this host; they outlive the scheduler, if they are not ``bound`` to it."""

    name = "local"

    def __init__(self, pool: Cluster, *, bound: bool = False) -> None:
        """Offer devices.

        Args:
            pool: The devices; those beside the CPU and emulated ones are this host's accelerators.
            bound: Whether launches are asked to save and end when this process ends.

        Raises:
            ProblemError: The pool names more than one server.
        """
        if pool.num_servers > 1:
            raise ProblemError(
                f"the engine local is this host, and the pool has {pool.num_servers} servers",
                hint=f"give its devices, such as {option('pool', '2xV100,2xP100')}",
            )
        self._devices = tuple(
            EngineDevice(f"{name}:{number}", name, "localhost")
            for name, count in pool.num_devices.items()
            for number in range(count)
        )
        super().__init__(stopped_with_parent() if bound else None)
        self._accelerators = _accelerators(pool)

    def devices(self) -> tuple[EngineDevice, ...]:
        """All devices; those of this host are up."""
        return self._devices

    def start(self, work: Work) -> None:
        """Start a keeper, which starts the launch.

        Raises:
            FileError: The lease's folder cannot be written.
        """
        self.keep(work.folder, self._document(work))

    def can_resize(self, held: Sequence[EngineDevice], wanted: Sequence[EngineDevice]) -> bool:
        """Whether no accelerator is among them: a launch sees only those that it was started on."""
        return not any(device.name in self._accelerators for device in (*held, *wanted))

    def may_run_as(self, uid: int) -> bool:
        """Whether it is this process's user, or this process is root's."""
        return os.geteuid() in (0, uid)

    def _document(self, work: Work) -> dict[str, object]:
        held = [self._accelerators[device.name] for device in work.devices
                if device.name in self._accelerators]  # fmt: skip
        environment = dict(work.environment)
        for kind in {kind for kind, _ in self._accelerators.values()}:
            # Also where a lease holds none of a kind: it must not see those of others.
            own = [name for one, name in held if one == kind]
            environment |= DEVICES.get(kind).visibility(own)
        return {**document_of(work), "environment": environment}


def _accelerators(pool: Cluster) -> Mapping[str, tuple[str, str]]:
    """The kind, and torch's name, of the pool's devices that are not this host's processors."""
    # Asked of a process of its own: a scheduler that runs for weeks holds no device.
    wanted = {
        name: count
        for name, count in pool.num_devices.items()
        if name != DEVICE_TYPE and not is_emulated(name)
    }
    if not wanted:
        return {}
    answer = subprocess.run(
        [sys.executable, "-m", "hetflow", "devices", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    rows = json.loads(answer.stdout)["devices"] if answer.returncode == 0 else []
    have = {row["device_type"]: (row["kind"], row["torch_devices"]) for row in rows}
    for name, count in wanted.items():
        here = len(have[name][1]) if name in have else 0
        if here < count:
            raise ProblemError(
                f"the pool has {count} x {name}, this host has {here}",
                hint=f"`hetflow devices` lists what it has; emulated types are {GRAMMAR}",
            )
    return {
        f"{name}:{number}": (have[name][0], torch_name)
        for name, count in wanted.items()
        for number, torch_name in enumerate(have[name][1][:count])
    }


engine("local")(LocalEngine)
