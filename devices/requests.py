"""What ``--device`` asks for, among the devices of this machine.

GPUs go by the short form of their real names (``V100``, ``H200``) or by torch's. Kinds may know
other names: ``cpu:NAME=FRACTION`` is emulated.
"""

from collections.abc import Sequence

from ..schema.errors import ProblemError
from ..schema.options import option
from ..schema.records import nearest
from .backend import DEVICES, DeviceRequest, LocalDevice
from .cpu import DEVICE_TYPE
from .emulated import DEFAULT_SPEEDS, GRAMMAR

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
        if item.lower() == device.device_type.lower():
            return DeviceRequest(
                device_type=device.device_type, local=device, torch_device=device.torch_devices[0]
            )
        if item in device.torch_devices and not device.is_host:
            return DeviceRequest(device_type=device.device_type, local=device, torch_device=item)
    for backend in DEVICES.registered():
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
