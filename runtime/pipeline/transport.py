"""The process groups for messages: gloo between hosts, NCCL between devices that support it.

There are two gloo groups: one for messages to higher ranks, one for messages to lower ranks. A
group's thread spins while another thread holds the lock of a connection that has received data.
With one group for both directions, this would use a CPU core whenever messages cross.

With NCCL, payloads go from device to device, over a group of two workers for each channel. A group
has one queue, so two workers that send to each other over the same group would deadlock.
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
    """One channel of a group, as seen from one end."""

    group: dist.ProcessGroup
    peer: int
    tag: int = 0

    def send(self, part: Tensor) -> peers.Transfer:
        """Start to send; keep the tensor until the transfer is done."""
        return peers.send_over(self.group, part, self.peer, self.tag)

    def receive(self, part: Tensor) -> peers.Transfer:
        """Start to receive into a tensor of exactly the size that is sent."""
        return peers.receive_over(self.group, part, self.peer, self.tag)


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of one channel, as seen from one end.

    Attributes:
        frames: Carries every message's frame.
        aside: Carries gloo messages that are no frames; a group delivers one tag's in order.
        payloads: Carries the payloads that are not in frames.
        device: Device of the payloads.
    """

    frames: Line
    aside: Line
    payloads: Line
    device: torch.device

    @property
    def are_joined(self) -> bool:
        """Whether frames may contain payloads."""
        return self.payloads is self.aside


@dataclass(frozen=True, slots=True)
class Transport:
    """The process groups of one worker.

    Attributes:
        rank: This worker's rank.
        up: All workers, on their CPUs; for messages to higher ranks.
        down: All workers, on their CPUs; for messages to lower ranks.
        device: Device of the payloads.
        payloads: By channel, the group of its two ends; empty if payloads go through the hosts.
    """

    rank: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    device: torch.device
    payloads: dict[Channel, dist.ProcessGroup]

    def line(self, source: int, destination: int, tag: int) -> Line:
        """A line between this worker's host and another worker's."""
        peer = destination if source == self.rank else source
        return Line(self.up if source < destination else self.down, peer, tag)

    def lines(self, channel: Channel) -> Lines:
        """The lines of a channel."""
        source, destination, activation = channel
        tag = 1 if activation else 2
        frames, aside = (self.line(source, destination, tag + more) for more in (0, 2))
        group = self.payloads.get(channel)
        payloads = aside if group is None else Line(group, int(frames.peer > self.rank))
        return Lines(frames, aside, payloads, self.device)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which workers of two tensor-parallel groups send messages to each other.

    A message between stages is whole on every worker of a group. A receiver has one source: the
    worker of the other group at its own position, or in proportion where the degrees differ.

    Attributes:
        rank: This worker's rank.
        groups: [groups] the ranks of each group.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]

    def incoming(self, group: int, activation: bool) -> Channel:
        """The channel on which this worker receives from a group."""
        own = next(ranks for ranks in self.groups if self.rank in ranks)
        return (source_of(self.groups[group], own, self.rank), self.rank, activation)

    def outgoing(self, group: int, activation: bool) -> list[Channel]:
        """The channels on which this worker sends to a group; there may be none."""
        own = next(ranks for ranks in self.groups if self.rank in ranks)
        return [
            (self.rank, peer, activation)
            for peer in self.groups[group]
            if source_of(own, self.groups[group], peer) == self.rank
        ]


def source_of(senders: Sequence[int], receivers: Sequence[int], receiver: int) -> int:
    """The worker of a group from which a worker of the next group receives a value."""
    return senders[receivers.index(receiver) * len(senders) // len(receivers)]


def transport_of(place: Place, stages: Sequence[Sequence[Sequence[int]]]) -> Transport | None:
    """Make the transport of this worker; None for a single worker. Call it on all workers.

    Args:
        place: This worker among the others.
        stages: [stages] the tensor-parallel groups that hold each stage, as ranks.
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
    """Make a group for each channel of this worker; all workers make all groups, in one order."""
    payloads: dict[Channel, dist.ProcessGroup] = {}
    for channel in channels:
        group = subgroup(place, sorted(channel[:2]), backend=backend)
        if place.rank in channel[:2]:
            payloads[channel] = group
    return payloads


def channels_of(stages: Sequence[Sequence[Sequence[int]]]) -> list[Channel]:
    """Every channel that a schedule over these stages may use, sorted.

    Args:
        stages: [stages] the tensor-parallel groups that hold each stage, as ranks.
    """
    found: set[Channel] = set()
    for here, there in zip(stages[:-1], stages[1:], strict=True):
        for lower in here:
            for upper in there:
                if lower != upper:
                    found |= {(source_of(lower, upper, rank), rank, True) for rank in upper}
                    found |= {(source_of(upper, lower, rank), rank, False) for rank in lower}
    return sorted(found)
