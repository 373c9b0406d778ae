"""The devices of this machine, of all kinds, and the device that a worker runs on."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..schema.cluster import is_former_name
from ..schema.errors import ProblemError
from ..schema.options import option
from ..schema.spelling import nearest
from .backend import DEVICES, DeviceRequest, LocalDevice
from .cpu import DEFAULT_SPEEDS, DEVICE_TYPE, GRAMMAR, cpu_device
from .host import TORCH_DEVICE

if TYPE_CHECKING:
    import torch

IMAGINED = "cuda"
"""The kind of a device that a plan names and no host at hand has."""


def local_devices() -> tuple[LocalDevice, ...]:
    """List every local device type, the CPU last. Imports torch, and every installed plug-in."""
    found = [device for backend in DEVICES.all() for device in backend.local_devices()]
    return tuple(sorted(found, key=lambda device: device.is_host))


def accelerators() -> tuple[LocalDevice, ...]:
    """The devices beside the host's own, by type. Imports torch, and every installed plug-in."""
    return tuple(device for device in local_devices() if not device.is_host)


def devices_of_types(types: Collection[str]) -> dict[str, LocalDevice]:
    """The local devices of some types; the CPU's alone need neither torch nor plug-ins."""
    if set(types) <= {DEVICE_TYPE}:
        return {DEVICE_TYPE: cpu_device()} if types else {}
    found = local_devices()
    exact = {device.device_type: device for device in found if device.device_type in types}
    for name in set(types) - exact.keys():
        meant = [device for device in found if may_be(name, device)]
        if len(meant) == 1:
            exact[name] = meant[0]
    return exact


def may_be(name: str, device: LocalDevice) -> bool:
    """Whether a plan made elsewhere, or earlier, may mean these devices by a type's name.

    An earlier one may leave out what tells unlike GPUs apart, and one from a host that has several
    of a name may add it.
    """
    if is_former_name(name, device.device_type):
        return True
    rest = name.removeprefix(device.device_type)
    if not rest or rest == name:
        return rest == ""
    return all(f"-{part}" in device.distinctions for part in rest.removeprefix("-").split("-"))


def known_as(device: LocalDevice, types: Collection[str]) -> str:
    """What a plan of these types calls a device: the longest name that may mean it, or its own."""
    meant = [name for name in types if may_be(name, device)]
    return max(meant, key=len, default=device.device_type)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A child that sees one device alone: its environment, and torch's name of the device in it."""

    environment: dict[str, str]
    device: str


def pinned(local: LocalDevice, torch_device: str) -> Pinned:
    """Pin a child to one of these devices, as a launch does."""
    device = torch_device if local.is_host else f"{local.kind}:0"
    return Pinned(local.backend.visibility([torch_device]), device)


def pinned_worker(local: LocalDevice, index: int) -> Pinned:
    """Pin one of several workers that have a device each, or share a host's own."""
    return pinned(local, local.torch_devices[0 if local.is_host else index])


def device_of_type(device_type: str, local_rank: int) -> "torch.device | None":
    """The device of a worker whose slot is of a real type; None where this process sees none.

    Accelerators are taken by their number, whatever they call themselves: another launcher may have
    stated the type.
    """
    import torch

    if device_type == DEVICE_TYPE:
        return torch.device(TORCH_DEVICE)
    found = local_devices()
    named = next((device for device in found if device.device_type == device_type), None)
    if named is not None and named.is_host:
        return torch.device(named.torch_devices[0])
    kinds = [device.kind for device in found if not device.is_host]
    if not kinds:
        return None
    return _by_number(found, named.kind if named is not None else kinds[0], local_rank)


def own_type(local_rank: int, known: Collection[str]) -> str | None:
    """The device type of this process where it is not stated: an accelerator's, else the CPU.

    Args:
        local_rank: This process's number on its host.
        known: The plan's types.

    Returns:
        One of ``known``; None where this device is none of them.
    """
    found = accelerators()
    if not found:
        return DEVICE_TYPE if DEVICE_TYPE in known else None
    device = _by_number(found, found[0].kind, local_rank)
    own = next(entry for entry in found if str(device) in entry.torch_devices)
    name = known_as(own, known)
    return name if name in known else None


def first_device() -> "torch.device":
    """What a script under plain python runs on: the first accelerator, else the CPU."""
    import torch

    found = accelerators()
    return torch.device(found[0].kind, 0) if found else torch.device(TORCH_DEVICE)


def numbered(device: "torch.device", local_rank: int | None) -> "torch.device":
    """A device with its index: NCCL and streams need the index of an accelerator.

    Args:
        device: As a script has stated it, such as ``cuda``.
        local_rank: The worker's number on its host; None takes torch's current device.
    """
    import torch

    found = [entry for entry in accelerators() if entry.kind == device.type]
    if device.index is not None or not found:
        return device
    if local_rank is None:
        return torch.empty(0, device=device).device
    return _by_number(found, device.type, local_rank)


def _by_number(found: Collection[LocalDevice], kind: str, number: int) -> "torch.device":
    import torch

    total = sum(device.num_devices for device in found if device.kind == kind)
    return torch.device(kind, number if number < total else 0)


# What ``--device`` asks for, among the devices of this machine.
#
# GPUs go by the short form of their real names (``V100``, ``H200``) or by torch's. ``V100-32GB``
# tells one from others of its name on other hosts. Kinds may know other names:
# ``cpu:NAME=FRACTION`` is emulated.

_HINT = f"`hetflow devices` lists them; {GRAMMAR} emulates a slower CPU"


def parse_requests(texts: Sequence[str], local: Sequence[LocalDevice]) -> tuple[DeviceRequest, ...]:
    """Read ``--device`` items; none means every accelerator's type, or the CPU where there is none.

    Raises:
        ProblemError: A type that this machine has not, a bad speed, or one name twice.
    """
    items = [item.strip() for text in texts for item in text.split(",")]
    if not items:
        items = [device.device_type for device in local if not device.is_host] or [DEVICE_TYPE]
    requests = tuple(_request(item, local) for item in items)
    names = [request.device_type for request in requests]
    for name in names:
        if names.count(name) > 1:
            raise ProblemError(f"{option('devices')}: {name} is asked for twice; keep one")
    return requests


def _request(item: str, local: Sequence[LocalDevice]) -> DeviceRequest:
    for device in local:
        own, first = device.device_type, device.torch_devices[0]
        if item.lower() == own.lower():
            return DeviceRequest(device_type=own, local=device, torch_device=first)
        if item in device.torch_devices and not device.is_host:
            return DeviceRequest(device_type=own, local=device, torch_device=item)
        if item.startswith(f"{own}-") and may_be(item, device):
            return DeviceRequest(device_type=item, local=device, torch_device=first)
    for backend in DEVICES.registered:
        found = backend.requested(item, local)
        if found is not None:
            return found
    raise ProblemError(_unknown(item, local), hint=_HINT)


def _unknown(item: str, local: Sequence[LocalDevice]) -> str:
    known = [device.device_type for device in local] + list(DEFAULT_SPEEDS)
    known += [name for device in local if not device.is_host for name in device.torch_devices]
    guess = nearest(item, known)
    mend = f"did you mean {guess!r}?" if guess else f"it has {', '.join(dict.fromkeys(known))}"
    return f"{option('devices', repr(item))}: this machine has no such device; {mend}"
