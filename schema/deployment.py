"""Deployment: a plan, the script that it trains and the hosts that it needs, for another launcher.

An exporter turns it into what some tool starts: a Slurm script, a Kubernetes manifest, ...
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import ProblemError
from .options import option

PORT = 29400
"""Of the rendezvous store on host 0, where the target does not choose one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that may be rented for a host.

    Attributes:
        cloud: Such as ``aws``.
        place: Region or zone as the market names it; empty if unknown.
        instance_type: Such as ``p3.2xlarge``.
        is_spot: Whether it may be taken away.
        dollars_per_hour: Of the whole machine.
    """

    cloud: str
    place: str
    instance_type: str
    is_spot: bool
    dollars_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Hosts that offer the launch the same devices; their ranks follow each other.

    Attributes:
        num_hosts: How many.
        devices: Device type -> number on each host; all of them work.
        machines: What may be rented for such a host, in order of preference; empty if unknown.
    """

    num_hosts: int
    devices: Mapping[str, int]
    machines: tuple[Machine, ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of devices of one host, which is its number of workers."""
        return sum(self.devices.values())

    @property
    def offered(self) -> str:
        """The devices of one host, as ``hetflow launch --devices`` reads them."""
        return ",".join(f"{number}x{name}" for name, number in self.devices.items())

    def one_type(self, target: str) -> tuple[str, int]:
        """The only device type of a host, and its number.

        Raises:
            ProblemError: A host has several.
        """
        if len(self.devices) > 1:
            parts = ",".join(f"1x({number}x{name})" for name, number in self.devices.items())
            raise ProblemError(
                f"{target} cannot ask for {self.offered} in one host",
                hint=f"put each type on hosts of its own: {option('hosts', repr(parts))}",
            )
        return next(iter(self.devices.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A launch to start elsewhere.

    Attributes:
        name: Of the job: small letters, digits and hyphens.
        model: The plan's model.
        plan: The plan's path, as the user gave it.
        plan_text: The plan's file.
        script: What stands after ``python``: the script and its arguments.
        groups: The hosts, in order of their ranks.
        names: Device type -> what the target calls it.
        virtual_types: Device types that no cluster knows by itself (emulated ones).
        host_types: Device types that every host has, so that none need be asked for.
        directory: Where to start; None: where the target starts jobs.
        setup: Lines of shell that run before the launch on each host, as the user wrote them.
        seed: Seed of every random stream.
        determinism: Which runs must end in the same bits.
        pins: Variables that workers need for that before they start; hetflow's launcher sets them
            itself.
        checkpoint: Folder of checkpoints that all hosts see; None writes none.
        checkpoint_every: Steps between checkpoints.
        cpus_per_device: Processors to ask for beside each device.
        image: The container image; None where the user gave none.
        volume: Name of a volume claim, and the path at which hosts see it; None for none.
        directives: Lines for the scheduler, as the user wrote them (``--partition=gpu``).
    """

    name: str
    model: str
    plan: str
    plan_text: str
    script: tuple[str, ...]
    groups: tuple[HostGroup, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    virtual_types: frozenset[str] = frozenset()
    host_types: frozenset[str] = frozenset()
    directory: str | None = None
    setup: tuple[str, ...] = ()
    seed: int = 0
    determinism: str = "none"
    pins: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str | None = None
    checkpoint_every: int = 0
    cpus_per_device: int = 1
    image: str | None = None
    volume: tuple[str, str] | None = None
    directives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ProblemError(
                f"job name {self.name!r} must be at most 40 small letters, digits and hyphens"
            )
        for text in (self.plan, *self.script, *self.setup, self.directory, self.checkpoint):
            if text is not None and not _can_be_written(text):
                raise ProblemError(
                    f"{text!r} cannot stand in a script: it is no text in UTF-8, or holds NUL"
                )
        if not self.script or self.script == ("-m",):
            raise ProblemError(
                "there is no script to start",
                hint="put the script last, with its own arguments after it",
            )
        known = {name for group in self.groups for name in group.devices}
        for name in self.names:
            if name not in known:
                raise ProblemError(
                    f"{option('names', f'{name}=...')}: the plan has no {name}",
                    hint=f"it has {', '.join(sorted(known))}",
                )

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all groups."""
        return sum(group.num_hosts for group in self.groups)

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts, which is the number of workers."""
        return sum(group.num_hosts * group.num_devices for group in self.groups)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Rank of each group's first host."""
        ranks = [0]
        for group in self.groups:
            ranks.append(ranks[-1] + group.num_hosts)
        return tuple(ranks[:-1])

    @property
    def summary(self) -> str:
        """What is started where, in one line for people."""
        hosts = ", ".join(f"{group.num_hosts} x ({group.offered})" for group in self.groups)
        return f"{self.num_devices} workers on {self.num_hosts} host(s): {hosts}"

    def name_of(self, device_type: str, target: str) -> str:
        """What the target calls a device type; its own name where the user gave no other.

        Raises:
            ProblemError: The type is emulated, and nothing was said to stand in for it.
        """
        if device_type in self.names:
            return self.names[device_type]
        if device_type in self.virtual_types:
            raise ProblemError(
                f"the plan's {device_type} is emulated: {target} has no such device",
                hint="solve for devices that are there; or say what stands in for it on this "
                f"cluster: {option('names', f'{device_type}=NAME')}",
            )
        return device_type


def _can_be_written(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # a path whose bytes are no text
        return False


def job_name(text: str) -> str:
    """A name that every target takes for a job, made of any text."""
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (kept if kept[:1].isalpha() else f"job-{kept}")[:40].strip("-")
