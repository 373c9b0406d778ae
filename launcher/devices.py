"""Which local device each worker of this host gets."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from ..devices.backend import DEVICES, LocalDevice
from ..devices.cpu import DEVICE_TYPE as CPU
from ..devices.emulated import base_type
from ..devices.local import IMAGINED, accelerators, devices_of_types
from ..schema.errors import HetflowError, TargetError
from ..schema.launch import LaunchConfig, WorkerSlot


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker slot on this host, the kind of its device, and torch's name of that device here."""

    slot: WorkerSlot
    kind: str
    device: str

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What the worker is started with, so that it sees its device and no other.

        Args:
            inherited: The environment that it gets anyway.
        """
        backend = DEVICES.get(self.kind)
        return backend.visibility([self.device]) | backend.worker_environment(inherited)


def seat_workers(
    slots: Sequence[WorkerSlot], config: LaunchConfig, taken: Collection[str] = ()
) -> list[Seat]:
    """Give each slot a device of this machine.

    Each accelerator is one worker's; so is each part of a host, such as a core, but emulated types
    share the cores (see ``crowding``).

    Args:
        slots: Who needs a device.
        config: The launch they are of.
        taken: Devices that other workers of the launch hold.

    Raises:
        HetflowError: The machine has fewer devices of a type than the slots need.
    """
    bases = {slot.device_type: base_type(slot.device_type, config) for slot in slots}
    local = devices_of_types(set(bases.values()))
    hosts_own = {name: device for name, device in local.items() if device.is_host}
    _check_hosts_own(config.workers if taken else slots, hosts_own)
    needed = Counter(slot.device_type for slot in slots)
    free = {
        name: [entry for entry in device.torch_devices if entry not in taken]
        for name, device in local.items()
        if not device.is_host
    }
    seats = []
    for slot in slots:
        base = bases[slot.device_type]
        if base in hosts_own:
            device = hosts_own[base]
            seats.append(Seat(slot, device.kind, device.torch_devices[0]))
            continue
        if not free.get(base):
            present = local[base].num_devices if base in local else 0
            raise _too_few(base, needed[slot.device_type], present)
        seats.append(Seat(slot, local[base].kind, free[base].pop(0)))
    return seats


def imagined_seats(slots: Sequence[WorkerSlot], config: LaunchConfig) -> list[Seat]:
    """The seats on a host that has exactly the devices of these slots, in their order.

    Args:
        slots: Who needs a device.
        config: The launch they are of.
    """
    number = count()
    seats = []
    for slot in slots:
        base = base_type(slot.device_type, config)
        kind = CPU if base == CPU else IMAGINED
        seats.append(Seat(slot, kind, base if base == CPU else f"{kind}:{next(number)}"))
    return seats


def _check_hosts_own(slots: Sequence[WorkerSlot], local: Mapping[str, LocalDevice]) -> None:
    for name, device in local.items():
        needed = sum(slot.device_type == name for slot in slots)
        if needed > device.num_devices:
            raise _too_few(name, needed, device.num_devices)


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
    asked += sum(slot.device_type == CPU for slot in slots)
    cores = os.cpu_count() or 1
    if not speeds or asked <= cores:
        return None
    return (
        f"emulated devices ask for {asked:g} cores' worth of arithmetic, this machine has "
        f"{cores}; their passes may overrun their times"
    )


def inventory() -> dict[str, int]:
    """Accelerators of this host by type: what it contributes unless told otherwise."""
    return {device.device_type: device.num_devices for device in accelerators()}
