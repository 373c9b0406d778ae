"""The protocol between a scheduler and an engine.

A *lease* is one start of a job's ``hetflow launch`` on given devices. The lease's folder is enough
to find everything that an engine has started, so a scheduler that was killed and started again can
continue: ``start`` of a lease that was started before does nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

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
