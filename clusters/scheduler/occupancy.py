"""Which devices work, and which jobs are on them, as mechanisms are told it at a decision."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..engines.protocol import EngineDevice
from ..mechanisms.cluster.layout import Layout
from ..mechanisms.cluster.seats import Device, Seat
from .leases import Lease


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
        self.layout = Layout(
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

    Args:
        open_leases: All that are not over.
        places: Where devices are.
        devices: By name, as the engine sees them now.
        drained: Servers and device types that are to get no jobs, and lose those that they have.
        resting: Servers on which no launch could begin.
        waiting: Jobs that must not begin now.
        only_idle: Whether nobody is to move, and only devices that nobody holds are given.
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
            kept[str(lease.job)] = places.seat(lease.after_resize)
    if only_idle:
        kept = running | planned
    taken = {device for its in kept.values() for device in its}
    if only_idle:
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
        decided=planned | running | planned,
        kept=kept,
        taken=frozenset(taken),
    )


def _is_in(names: Collection[str], device: EngineDevice) -> bool:
    """Whether a device's server, or its type, is named."""
    return device.server in names or device.device_type in names
