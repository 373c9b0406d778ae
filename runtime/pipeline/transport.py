"""What messages travel over: gloo between hosts, NCCL between devices that have it.

There are two gloo groups: one for messages to higher ranks, one for messages to lower ranks. A
group's thread spins while another thread holds the lock of a connection that has received data.
With one group for both directions this would cost a core whenever messages cross.

With NCCL, payloads go from device to device, over a group of two for each channel: a group has
one queue, and two workers that send to each other over the same group would deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...devices.collectives import HOST_COLLECTIVE, payload_collective
from ...devices.host import TORCH_DEVICE
from .. import peers
from ..group import Place, subgroup

Channel = tuple[int, int, bool]
"""(source, destination, whether it carries activations)."""


@dataclass(frozen=True, slots=True)
class Line:
    """One channel of a group, seen from one end."""

    group: dist.ProcessGroup
    peer: int
    tag: int = 0

    def send(self, part: Tensor) -> peers.Transfer:
        """Start to send; the tensor must be kept until the work is done."""
        return peers.send_over(self.group, part, self.peer, self.tag)

    def receive(self, part: Tensor) -> peers.Transfer:
        """Start to receive into a tensor of exactly the size that is sent."""
        return peers.receive_over(self.group, part, self.peer, self.tag)


@dataclass(frozen=True, slots=True)
class Lines:
    """One channel, seen from one end.

    Attributes:
        frames: What every message is announced on.
        aside: What is no frame: a group hands out transfers of one tag in order.
        payloads: The payloads that are not in frames.
        device: Where payloads stand.
    """

    frames: Line
    aside: Line
    payloads: Line
    device: torch.device

    @property
    def are_joined(self) -> bool:
        """Whether payloads may be in frames."""
        return self.payloads is self.aside


@dataclass(frozen=True, slots=True)
class Transport:
    """The groups of one worker.

    Attributes:
        rank: This worker.
        up: All workers, on their CPUs: to higher ranks.
        down: The same, to lower ranks.
        device: Where payloads stand.
        payloads: [channels] the group of its two ends; empty where payloads travel by the hosts.
    """

    rank: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    device: torch.device
    payloads: dict[Channel, dist.ProcessGroup]

    def line(self, source: int, destination: int, tag: int) -> Line:
        """A line between the hosts of this worker and another."""
        peer = destination if source == self.rank else source
        return Line(self.up if source < destination else self.down, peer, tag)

    def lines(self, channel: Channel) -> Lines:
        """A channel's lines."""
        source, destination, activation = channel
        tag = 1 if activation else 2
        frames, aside = (self.line(source, destination, tag + more) for more in (0, 2))
        group = self.payloads.get(channel)
        payloads = aside if group is None else Line(group, int(frames.peer > self.rank))
        return Lines(frames, aside, payloads, self.device)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which workers of two groups talk to each other.

    What crosses stages is whole on every worker of a group. A receiver has one source: the worker
    of the other group at its own place, or in proportion where degrees differ.

    Attributes:
        rank: This worker.
        groups: The ranks of each group.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]

    def incoming(self, group: int, activation: bool) -> Channel:
        """The channel on which this worker hears from a group."""
        own = next(ranks for ranks in self.groups if self.rank in ranks)
        return (_source(self.groups[group], own, self.rank), self.rank, activation)

    def outgoing(self, group: int, activation: bool) -> list[Channel]:
        """The channels on which this worker sends to a group; may be none."""
        own = next(ranks for ranks in self.groups if self.rank in ranks)
        return [
            (self.rank, peer, activation)
            for peer in self.groups[group]
            if _source(own, self.groups[group], peer) == self.rank
        ]


def _source(senders: Sequence[int], receivers: Sequence[int], receiver: int) -> int:
    return senders[receivers.index(receiver) * len(senders) // len(receivers)]


def transport_of(place: Place, stages: Sequence[Sequence[Sequence[int]]]) -> Transport | None:
    """The transport of this worker; None where there is one worker only. Call it on all.

    Args:
        place: This worker.
        stages: [stages] the groups that hold each.
    """
    if not place.distributed:
        return None
    up, down = (subgroup(place, backend=HOST_COLLECTIVE) for _ in range(2))
    backend = payload_collective(place.device, dist.get_backend())
    if backend is None:
        return Transport(place.rank, up, down, torch.device(TORCH_DEVICE), {})
    payloads = connect(place, channels_of(stages), backend)
    return Transport(place.rank, up, down, place.device, payloads)


def connect(
    place: Place, channels: Sequence[Channel], backend: str
) -> dict[Channel, dist.ProcessGroup]:
    """[channels of this worker] a group for each. Every worker makes all groups, in one order."""
    payloads: dict[Channel, dist.ProcessGroup] = {}
    for channel in channels:
        group = subgroup(place, sorted(channel[:2]), backend=backend)
        if place.rank in channel[:2]:
            payloads[channel] = group
    return payloads


def channels_of(stages: Sequence[Sequence[Sequence[int]]]) -> list[Channel]:
    """Every channel that a schedule over these stages may use, sorted.

    Args:
        stages: [stages] the groups that hold each.
    """
    found: set[Channel] = set()
    for here, there in zip(stages[:-1], stages[1:], strict=True):
        for lower in here:
            for upper in there:
                if lower != upper:
                    found |= {(_source(lower, upper, rank), rank, True) for rank in upper}
                    found |= {(_source(upper, lower, rank), rank, False) for rank in lower}
    return sorted(found)
