"""What messages travel over: gloo between hosts, NCCL between devices that have it.

With NCCL, payloads go from device to device, over a group of two for each channel: a group has
one queue, and two workers that send to each other over one would both wait for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..group import Place, subgroup

Channel = tuple[int, int, bool]
"""(source, destination, whether it carries activations)."""


@dataclass(frozen=True, slots=True)
class Line:
    """One channel of a group, seen from one end."""

    group: dist.ProcessGroup
    peer: int
    tag: int = 0

    def send(self, part: Tensor) -> dist.Work:
        """Start to send; the tensor must be kept until the work is done."""
        return self.group.send([part], self.peer, self.tag)

    def receive(self, part: Tensor) -> dist.Work:
        """Start to receive into a tensor of exactly the size that is sent."""
        return self.group.recv([part], self.peer, self.tag)


@dataclass(frozen=True, slots=True)
class Transport:
    """The groups of one worker.

    Attributes:
        rank: This worker.
        host: All workers, on their CPUs.
        device: Where payloads stand.
        payloads: [channels] the group of its two ends; empty where payloads travel by ``host``.
    """

    rank: int
    host: dist.ProcessGroup
    device: torch.device
    payloads: dict[Channel, dist.ProcessGroup]

    def lines(self, channel: Channel) -> tuple[Line, Line | None]:
        """A channel's line for frames, and the one for payloads where they travel apart."""
        source, destination, activation = channel
        peer = destination if source == self.rank else source
        host = Line(self.host, peer, 1 if activation else 2)
        group = self.payloads.get(channel)
        return host, None if group is None else Line(group, int(peer > self.rank))


def transport_of(place: Place, stages: Sequence[Sequence[int]]) -> Transport | None:
    """The transport of this worker; None where there is one worker only. Call it on all.

    Args:
        place: This worker.
        stages: [stages] the ranks that hold each.
    """
    if not place.distributed:
        return None
    host = subgroup(place, backend="gloo")
    backend = payload_backend(place.device, dist.get_backend())
    if backend is None:
        return Transport(place.rank, host, torch.device("cpu"), {})
    return connect(place, host, channels_of(stages), backend)


def payload_backend(device: torch.device, default: str) -> str | None:
    """The backend for payloads between devices; None where they go through the hosts.

    Two workers that share one GPU cannot use NCCL; the default group is then on gloo
    (``choose_backend``), and so is this.
    """
    return "nccl" if device.type == "cuda" and default == "nccl" else None


def connect(
    place: Place, host: dist.ProcessGroup, channels: Sequence[Channel], backend: str
) -> Transport:
    """A transport with a group for each channel. Every worker makes all groups, in one order."""
    payloads: dict[Channel, dist.ProcessGroup] = {}
    for channel in channels:
        group = subgroup(place, sorted(channel[:2]), backend=backend)
        if place.rank in channel[:2]:
            payloads[channel] = group
    return Transport(place.rank, host, place.device, payloads)


def channels_of(stages: Sequence[Sequence[int]]) -> list[Channel]:
    """Every channel that a schedule over these stages may use, sorted."""
    found: set[Channel] = set()
    for here, there in zip(stages[:-1], stages[1:], strict=True):
        for lower in here:
            for upper in there:
                if lower != upper:
                    found |= {(lower, upper, True), (upper, lower, False)}
    return sorted(found)
