"""The library for a group's collectives, and the device that its tensors must be on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .backend import DEVICES, backend_of
from .host import COLLECTIVE, TORCH_DEVICE

# Read NCCL's watchdog messages: why it aborted a process.
#
# The watchdog aborts a process that waited too long for another or lost it, and also one whose own
# device failed. No Python runs any more by then, so the messages on stderr are the only evidence.


NUM_LINES = 1000
"""Of a log's end that hold what it says, and the stacks of C++ that follow."""
_WAITED_IN_VAIN = "Watchdog caught collective operation timeout"
_LOST_ANOTHER = "remote process exited"
_OWN_DEVICE = "CUDA error"
_MAX_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogAbort:
    """An abort for lack of another process; ``timed_out`` where it waited for it in vain."""

    said: str
    timed_out: bool


def find_abort(lines: Sequence[str]) -> WatchdogAbort | None:
    """The abort that a log tells of; None for none, or one for an error of the own device."""
    if any(_OWN_DEVICE in line for line in lines):
        return None
    for sign in (_WAITED_IN_VAIN, _LOST_ANOTHER):
        for line in lines:
            if sign in line:
                said = line[line.index(sign) :][:_MAX_CHARACTERS]
                return WatchdogAbort(said=said, timed_out=sign == _WAITED_IN_VAIN)
    return None


if TYPE_CHECKING:
    import torch

HOST_COLLECTIVE = COLLECTIVE
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = dict.fromkeys(INTERFACE_VARIABLES, "lo")
"""For processes that exchange: all of them are on this host."""


def choose_collective(device: "torch.device", identities: Sequence[str | None]) -> str:
    """The devices' library if every worker has a device of its own, else the hosts' (gloo)."""
    own = backend_of(device).collective
    distinct = None not in identities and len(set(identities)) == len(identities)
    return own if distinct and is_built(own) else HOST_COLLECTIVE


def is_built(collective: str) -> bool:
    """Whether this torch has the library."""
    import torch.distributed as dist

    known: Any = getattr(dist, f"is_{collective}_available", None)
    return dist.is_available() and (known is None or bool(known()))


def is_on_devices(group: "torch.distributed.ProcessGroup | None" = None) -> bool:
    """Whether the collectives of this worker's group go from device to device.

    The host then returns from a collective before it is complete.
    """
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_backend(group) != HOST_COLLECTIVE


def wire_device(
    device: "torch.device", group: "torch.distributed.ProcessGroup | None" = None
) -> "torch.device":
    """The device that tensors to send must be on: the worker's own, or the host."""
    import torch

    return device if is_on_devices(group) else torch.device(TORCH_DEVICE)


def current_wire_device() -> "torch.device":
    """The ``wire_device`` of the default group, for the device that is current."""
    import torch
    import torch.distributed as dist

    own = dist.get_backend()
    kinds = (b.kind for b in DEVICES.registered if b.collective == own != HOST_COLLECTIVE)
    return torch.device(next(kinds, TORCH_DEVICE))


def payload_collective(device: "torch.device", default: str) -> str | None:
    """The library for payloads between devices; None where they go through the hosts.

    Two workers that share one device cannot use its library; the default group is then the hosts'
    (``choose_collective``), and so is this.
    """
    backend = backend_of(device)
    return backend.collective if not backend.is_host and backend.collective == default else None
