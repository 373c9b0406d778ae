"""Devices by name and place: which work, which rest, and which jobs are on them at a decision."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..engines.protocol import EngineDevice
from ..mechanisms.seats import Device, DeviceLayout, Seat
from .leases import Lease
from .store import ClusterStore


class Places:
    """Names of devices, and their places: (type, server among those that have it, number there).

    Types, and the servers of each, are in the order in which the engine lists them.

    Attributes:
        num_devices: Devices of each type.
        num_servers: Servers that have a device.
        sizes: Devices of each type on each server that has it [types][servers].
        layout: These, with which servers they are.
    """

    def __init__(self, devices: Iterable[EngineDevice]) -> None:
        """Number the devices of an engine."""
        listed = list(devices)
        self.num_devices = dict(Counter(device.device_type for device in listed))
        rows: dict[str, dict[str, list[str]]] = {name: {} for name in self.num_devices}
        for device in listed:
            rows[device.device_type].setdefault(device.server, []).append(device.name)
        self.sizes = tuple(
            tuple(len(names) for names in servers.values()) for servers in rows.values()
        )
        self._name = {
            (kind, place, number): name
            for kind, servers in enumerate(rows.values())
            for place, names in enumerate(servers.values())
            for number, name in enumerate(names)
        }
        self._device = {name: device for device, name in self._name.items()}
        servers = list(dict.fromkeys(device.server for device in listed))
        self.num_servers = len(servers)
        self.layout = DeviceLayout(
            self.sizes, tuple(tuple(map(servers.index, row)) for row in rows.values())
        )

    @property
    def largest(self) -> dict[str, int]:
        """Devices of each type on the server that has most of them."""
        return {name: max(row) for name, row in zip(self.num_devices, self.sizes, strict=True)}

    @property
    def servers(self) -> tuple[tuple[int, ...], ...] | None:
        """Devices of each type on each server; None where placement does not count."""
        return self.sizes if any(len(row) > 1 for row in self.sizes) else None

    def device(self, name: str) -> Device:
        """The place of a device."""
        return self._device[name]

    def seat(self, names: Iterable[str]) -> Seat:
        """The places of some devices, in order."""
        return tuple(sorted(self._device[name] for name in names))

    def names(self, seat: Sequence[Device]) -> list[str]:
        """The devices at some places."""
        return [self._name[device] for device in seat]


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Devices that a decision has to do without, and those of jobs.

    Attributes:
        down: Devices that do not work, are drained, or are on a server that rests.
        held: The devices of jobs that run, or are about to; in a resize those after it.
        decided: Those by the last decision, also where a resize has to wait for others.
        kept: Those of jobs that stay where they are, whatever the policy says: on a server that
            rests (only new launches avoid it), before their first step, and all where only idle
            devices are given. A job that must not begin now is there with no device.
        taken: Devices that are not given to others: those of ``kept``, and, where only idle ones
            are given, all that a job still holds.
    """

    down: list[Device]
    held: dict[str, Seat]
    decided: dict[str, Seat]
    kept: dict[str, Seat]
    taken: frozenset[Device]


def occupancy(
    open_leases: Sequence[Lease],
    places: Places,
    devices: Mapping[str, EngineDevice],
    *,
    drained: Collection[str],
    resting: Collection[str],
    waiting: Collection[int] = (),
    only_idle: bool = False,
) -> Occupancy:
    """What a decision sees.

    What is ``drained`` gets no jobs and loses those that it has; no launch could begin on
    ``resting`` servers. Jobs in ``waiting`` must not begin now; with ``only_idle`` nobody is to
    move.
    """
    planned = {str(lease.job): places.seat(lease.devices)
               for lease in open_leases if not lease.holds_devices}  # fmt: skip
    running = {str(lease.job): places.seat(lease.after_resize)
               for lease in open_leases if lease.goes_on}  # fmt: skip
    kept = {}
    for lease in open_leases:
        its = [devices[name] for name in lease.after_resize]
        rests = any(device.server in resting for device in its)
        is_fit = all(device.is_up and not _is_in(drained, device) for device in its)
        if lease.goes_on and is_fit and (rests or lease.is_young):
            # Before its first step, or on a server that rests, a lease stays; on a device that is
            # down or drained it does not.
            kept[str(lease.job)] = places.seat(lease.after_resize)
    if only_idle:
        kept = running | planned
    taken = {device for its in kept.values() for device in its}
    if only_idle:
        # In a resize a launch may be on both sets of devices.
        taken.update(places.seat(name for lease in open_leases for name in lease.held))
    kept |= dict.fromkeys(map(str, waiting), ())
    avoided = {*drained, *resting}
    return Occupancy(
        down=[
            places.device(device.name)
            for device in devices.values()
            if not device.is_up or _is_in(avoided, device)
        ],
        held=planned | running,
        # A planned lease is the later decision.
        decided=planned | running | planned,
        kept=kept,
        taken=frozenset(taken),
    )


def _is_in(names: Collection[str], device: EngineDevice) -> bool:
    """Whether a device's server, or its type, is named."""
    return device.server in names or device.device_type in names


# Servers on which a launch could not begin are left alone for a while, longer each time.
#
# What was wrong there is no fault of the job (its folder was full, a daemon was gone), and would be
# of the next job's launch, too. As with Slurm, which drains such nodes, but hetflow comes back.


FIRST_SECONDS = 10.0
LONGEST_SECONDS = 300.0
_KEY = "rests"


class Rests:
    """Which servers rest, and until when; in the state, so that another scheduler knows."""

    def __init__(self, store: ClusterStore) -> None:
        """Go on where the state is."""
        self._store = store
        # Until when, and how long it was in all, by server.
        self._rests: dict[str, list[float]] = store.get(_KEY) or {}
        self._resting: frozenset[str] = frozenset()

    def begin(self, server: str, now: float) -> float:
        """Let a server rest; for how many seconds more it does."""
        # Launches that fail together count once.
        until, seconds = self._rests.get(server, (-1e18, 0.0))
        if now >= until:
            # A server that fails again soon rests twice as long.
            recent = now - until <= LONGEST_SECONDS
            seconds = min(2.0 * seconds, LONGEST_SECONDS) if recent else FIRST_SECONDS
            until = now + seconds
            self._rests[server] = [until, seconds]
            self._store.set(_KEY, self._rests)
        return until - now

    def forget_future(self, now: float) -> None:
        """Let no rest last longer from now on than it does in all: a clock was set back."""
        for rest in self._rests.values():
            rest[0] = min(rest[0], now + rest[1])
        self._store.set(_KEY, self._rests)

    def forget(self, server: str) -> None:
        """A launch began there: it works."""
        if self._rests.pop(server, None) is not None:
            self._store.set(_KEY, self._rests)

    def resting(self, now: float) -> frozenset[str]:
        """Servers that rest."""
        return frozenset(server for server, (until, _) in self._rests.items() if now < until)

    def somebody_rose(self, now: float) -> bool:
        """Whether a server's rest has ended since this was asked last."""
        before, self._resting = self._resting, self.resting(now)
        return bool(before - self._resting)
