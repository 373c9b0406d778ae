"""Which local device each worker of this host gets."""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from ..schema.errors import HetflowError, TargetError
from ..schema.launch import LaunchConfig, WorkerSlot


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker slot on this host. ``cuda`` is the entry for CUDA_VISIBLE_DEVICES, if any."""

    slot: WorkerSlot
    cuda: str | None = None


def base_type(device_type: str, config: LaunchConfig) -> str:
    """The real type behind a device type of the plan: an emulated one names its base."""
    for device in config.emulated:
        if device.device_type == device_type:
            return device.base_device_type
    return "cpu" if device_type.split(":")[0] == "cpu" else device_type


def seat_workers(
    slots: Sequence[WorkerSlot], config: LaunchConfig, taken: Collection[str | None] = ()
) -> list[Seat]:
    """Give each slot a device of this machine.

    CUDA types get a device each; plain ``cpu`` a core each; emulated types share the cores (see
    ``crowding``).

    Args:
        slots: Who needs a device.
        config: The launch they are of.
        taken: CUDA devices that other workers of the launch hold.

    Raises:
        HetflowError: The machine has fewer devices of a type than the slots need.
    """
    bases = {slot.device_type: base_type(slot.device_type, config) for slot in slots}
    _check_cores(config.workers if taken else slots)
    needed = Counter(slot.device_type for slot in slots if bases[slot.device_type] != "cpu")
    if not needed:
        return [Seat(slot) for slot in slots]
    free = {
        kind: [entry for entry in entries if entry not in taken]
        for kind, entries in _cuda_devices().items()
    }
    seats = []
    for slot in slots:
        kind = bases[slot.device_type]
        if kind == "cpu":
            seats.append(Seat(slot))
            continue
        if not free.get(kind):
            raise _too_few(kind, needed[slot.device_type], len(_cuda_devices().get(kind, [])))
        seats.append(Seat(slot, cuda=free[kind].pop(0)))
    return seats


def imagined_seats(slots: Sequence[WorkerSlot], config: LaunchConfig) -> list[Seat]:
    """The seats on a host that has exactly the devices of these slots, in their order.

    Args:
        slots: Who needs a device.
        config: The launch they are of.
    """
    number = count()
    return [
        Seat(slot, cuda=None if base_type(slot.device_type, config) == "cpu" else str(next(number)))
        for slot in slots
    ]


def _check_cores(slots: Sequence[WorkerSlot]) -> None:
    plain = sum(slot.device_type == "cpu" for slot in slots)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if plain > (cores or 1):
        raise _too_few("cpu", plain, cores or 1)


def _too_few(device_type: str, needed: int, present: int) -> HetflowError:
    return TargetError(
        f"the plan needs {needed} x {device_type}, this machine has {present}",
        hint="solve again for the devices at hand (`hetflow devices`), or launch over several "
        "hosts with --nnodes",
    )


def crowding(slots: Sequence[WorkerSlot], config: LaunchConfig) -> str | None:
    """Warn where emulated devices ask for more arithmetic than the cores can give."""
    speeds = {device.device_type: device.speed for device in config.emulated}
    asked = sum(speeds.get(slot.device_type, 0.0) for slot in slots)
    asked += sum(slot.device_type == "cpu" for slot in slots)
    cores = os.cpu_count() or 1
    if not speeds or asked <= cores:
        return None
    return (
        f"emulated devices ask for {asked:g} cores' worth of arithmetic, this machine has "
        f"{cores}; their passes may overrun their times"
    )


def _cuda_devices() -> dict[str, list[str]]:
    """Entries for CUDA_VISIBLE_DEVICES of the visible devices, by type."""
    from ..runtime.devices import local_device_types

    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [entry.strip() for entry in outer.split(",")] if outer else None
    devices: dict[str, list[str]] = {}
    for index, kind in enumerate(local_device_types()):
        devices.setdefault(kind, []).append(names[index] if names else str(index))
    return devices


def inventory() -> dict[str, int]:
    """CUDA devices of this host by type: what it contributes unless told otherwise."""
    return {kind: len(entries) for kind, entries in _cuda_devices().items()}
