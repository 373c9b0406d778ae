"""Which devices work, and which jobs are on them, as mechanisms are told it at a decision."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..engines.protocol import EngineDevice
from ..mechanisms.cluster.seats import Device, Seat
from .leases import Lease
from .places import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Devices that a decision has to do without, and those of jobs.

    Attributes:
        down: Devices that do not work, are drained, or are on a server that rests.
        held: The devices of jobs that run, or are about to; in a resize those after it.
        decided: Those by the last decision, also where a resize has to wait for others.
        kept: Those of jobs that run on a server that rests: only new launches avoid it.
    """

    down: list[Device]
    held: dict[str, Seat]
    decided: dict[str, Seat]
    kept: dict[str, Seat]


def occupancy(
    open_leases: Sequence[Lease],
    places: Places,
    devices: Mapping[str, EngineDevice],
    *,
    drained: Collection[str],
    resting: Collection[str],
) -> Occupancy:
    """What a decision sees.

    Args:
        open_leases: All that are not over.
        places: Where devices are.
        devices: By name, as the engine sees them now.
        drained: Servers and device types that are to get no jobs, and lose those that they have.
        resting: Servers on which no launch could begin.
    """
    planned = {str(lease.job): places.seat(lease.devices)
               for lease in open_leases if not lease.holds_devices}  # fmt: skip
    running = {str(lease.job): places.seat(lease.after_resize)
               for lease in open_leases if lease.goes_on}  # fmt: skip
    kept = {}
    for lease in open_leases:
        its = [devices[name] for name in lease.after_resize]
        if (
            lease.goes_on
            and any(device.server in resting for device in its)
            and all(device.is_up and not _is_in(drained, device) for device in its)
        ):
            kept[str(lease.job)] = places.seat(lease.after_resize)
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
    )


def _is_in(names: Collection[str], device: EngineDevice) -> bool:
    """Whether a device's server, or its type, is named."""
    return device.server in names or device.device_type in names
