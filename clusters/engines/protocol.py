"""The protocol between a scheduler and an engine, and the folder of a lease that they share.

A *lease* is one start of a job's ``hetflow launch`` on given devices. The lease's folder is enough
to find everything that an engine has started, so a scheduler that was killed and started again can
continue: ``start`` of a lease that was started before does nothing.

The folder says what to run, who has it, what was asked, and how it ended. Scheduler, engine and
keeper are processes of their own, perhaps on several hosts; any of them may be killed. They find
each other again by these files. A lease that an engine hands on runs at most once: whichever
process creates ``claim`` first decides, the one that runs it, or the engine, so that it never runs.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ...schema.cluster import Cluster
from ...schema.errors import ProblemError
from ...schema.plugins import Registry

OUTPUT = "output.log"
"""In a lease's folder: what the launch wrote to stdout and stderr."""
FIRST_STEP = "run/first-step"
"""In a lease's folder: an empty file, made when the launch has completed its first step.

It is in the folder of the run, the only one there that the launch of another user may write to.
"""


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """A device by its name (``server0/V100:1``), the server it is on, and whether it works."""

    name: str
    device_type: str
    server: str
    is_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to start.

    Attributes:
        folder: The lease's own, which exists; its name is the lease's.
        command: Program and arguments. No shell reads them.
        directory: Where it runs.
        devices: Those it may use.
        environment: Variables set besides those of the scheduler.
        after: Folders of leases, such as the job's last one, that must be over before this one
            begins, by what the engine knows besides their fate. Some may never have started.
        user: The number of the user whom the command runs as; None: this process's.
        zone: Where to rent the devices, for an engine that rents them; None: anywhere.
        is_spot: Whether it rents spot machines.
    """

    folder: Path
    command: tuple[str, ...]
    directory: Path
    devices: tuple[EngineDevice, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    after: tuple[Path, ...] = ()
    user: int | None = None
    zone: str | None = None
    is_spot: bool = False

    @property
    def server(self) -> str:
        """The server that all devices are on.

        Raises:
            UnsuitableDevicesError: They are on several.
        """
        servers = sorted({device.server for device in self.devices})
        if len(servers) > 1:
            raise UnsuitableDevicesError(
                f"it waits for devices of one node (free were some of {', '.join(servers)})",
                hint="ask for no more devices than one node has",
            )
        return servers[0]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a lease.

    ``absent``: it was never started; ``waiting``: a batch system has it, and has not begun it;
    ``running``: it may compute or write, and has made no step yet; ``training``: it has made its
    first step (the file ``FIRST_STEP`` is there); ``ended``: it is over for good. ``exit_code`` is
    None where nobody saw it end (its host went down, say). ``has_begun`` is False where the launch
    certainly never ran, because the engine failed to start it: no fault of the job's.
    """

    state: Literal["absent", "waiting", "running", "training", "ended"]
    exit_code: int | None = None
    has_begun: bool = True

    @property
    def is_open(self) -> bool:
        """Whether the lease may still compute or write, or begin to."""
        return self.state in ("waiting", "running", "training")


class UnsuitableDevicesError(ProblemError):
    """A lease cannot be started on just these devices; on others of their types it can."""


class Engine(Protocol):
    """Runs launches on its devices."""

    name: str

    def devices(self) -> tuple[EngineDevice, ...]:
        """All devices, those that are down included; always in the same order."""

    def start(self, work: Work) -> None:
        """Start a lease, unless it was started before.

        Raises:
            UnsuitableDevicesError: Not on these devices.
            HetflowError: It cannot be started; says what to do.
        """

    def stop(self, folder: Path) -> None:
        """Ask a lease to save and end; one that is over, or was asked, is left alone."""

    def kill(self, folder: Path) -> None:
        """End a lease at once."""

    def fate(self, folder: Path) -> Fate:
        """What became of a lease."""


@runtime_checkable
class ResizingEngine(Engine, Protocol):
    """An engine some of whose leases may change their devices while they run.

    The scheduler asks the launch itself, through the folder of its run, which this host must see.
    """

    def can_resize(self, held: Sequence[EngineDevice], wanted: Sequence[EngineDevice]) -> bool:
        """Whether a launch on some devices of a server can go over to others there.

        Its processes must be able to use the new ones, beside those that they hold.
        """


@runtime_checkable
class RentingEngine(Engine, Protocol):
    """An engine that rents machines in ``Work.zone``; they may be taken away."""

    rents: bool


@runtime_checkable
class EngineForUsers(Engine, Protocol):
    """An engine that runs a lease as the user whom ``Work.user`` names, where it may."""

    def may_run_as(self, uid: int) -> bool:
        """Whether it may."""


MakeEngine = Callable[[Cluster], Engine]
"""From the pool that the user named to an engine."""

ENGINES: Registry[MakeEngine] = Registry(
    "engine",
    group="hetflow.engines",
    own=(
        "hetflow.clusters.engines.local",
        "hetflow.clusters.engines.ray",
        "hetflow.clusters.engines.skypilot",
        "hetflow.clusters.engines.slurm",
    ),
)


def engine(name: str) -> Callable[[MakeEngine], MakeEngine]:
    """Register an engine.

    Args:
        name: What ``hetflow cluster start --engine`` calls it.

    Returns:
        A decorator that leaves what makes the engine as it is.
    """
    return ENGINES.adding(name)


WORK = "work.json"
SUBMITTED = "submitted.json"
STARTED = "started.json"
ASKED = "asked.json"
ENDED = "ended.json"
LOCK = "lock"
CLAIM = "claim"
ENGINE = "engine"
"""Who claims a lease so that it never runs."""
STOPPED = 143
"""A launch's exit code after SIGTERM: also of one that was asked to end before it began."""


def private(path: str, flags: int) -> int:
    """Open a file that no other user can (``opener``): who can open a lock can hold it."""
    return os.open(path, flags, 0o600)


def write_atomically(path: Path, document: Any) -> None:
    """Write JSON that no reader, nor a crash, ever sees half of; its owner alone reads it."""
    # A job's environment is in it.
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.unlink(missing_ok=True)
    handle = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "w", encoding="utf-8") as stream:
        json.dump(document, stream)
        stream.flush()
        os.fsync(stream.fileno())
    making.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A document that ``write_atomically`` wrote; None where it was not written yet."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return document


def document_of(work: Work) -> dict[str, object]:
    """What a keeper reads of a lease."""
    return {
        "command": list(work.command),
        "directory": str(work.directory),
        "environment": dict(work.environment),
        "devices": [device.name for device in work.devices],
        "user": work.user,
    }


def digest_of(folder: Path) -> str:
    """A name of a lease: the same for whoever knows its folder, and no other's."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]


def claim(folder: Path, by: str) -> bool:
    """Take a lease for good, to run it or so that nobody ever does; False where it was taken."""
    try:
        with (folder / CLAIM).open("x", encoding="utf-8") as stream:
            stream.write(by)
    except FileExistsError:
        return False
    return True


def claimed_by(folder: Path) -> str:
    """Who has a lease that was claimed; empty where that process was killed as it wrote this."""
    return (folder / CLAIM).read_text(encoding="utf-8")


def revoke(folder: Path) -> bool:
    """See that a lease that has not begun never does; False where somebody runs it, or ran it."""
    if not claim(folder, ENGINE):
        return False
    write_atomically(folder / ENDED, {"exit_code": STOPPED})
    return True


def progress(folder: Path) -> Fate:
    """The fate of a lease that an engine has, and that is not over, by how far its launch is."""
    if os.path.lexists(folder / FIRST_STEP):  # another user's link is not followed
        return Fate("training")
    return Fate("running" if (folder / STARTED).exists() else "waiting")


def fate_of_lost(folder: Path) -> Fate:
    """The fate of a lease that runs nowhere any more, and of which no keeper wrote how it ended."""
    claim(folder, ENGINE)  # it may have been lost before it began
    return Fate("ended", has_begun=claimed_by(folder) != ENGINE)
