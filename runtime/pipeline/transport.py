"""The ways of messages: memory within a host, gloo between hosts, NCCL between devices with it.

There are two gloo groups: one for messages to higher ranks, one for messages to lower ranks. A
group's thread spins while another thread holds the lock of a connection that has received data.
With one group for both directions, this would use a CPU core whenever messages cross.

With NCCL, payloads go from device to device, over a group of two workers for each channel. A group
has one queue, so two workers that send to each other over the same group would deadlock.

``VectorSums`` sums a few numbers over all workers at a step's end, by messages posted ahead. The
workers of a pipeline end a step one after another. Each sends its numbers to all others when it
is done. So the last worker has all numbers at once, and the others wait for a single message. An
all-reduce would start only then and take several messages. For many workers, n * (n - 1) messages
are too many, and an all-reduce is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ...devices.collectives import HOST_COLLECTIVE, payload_collective
from ...devices.host import TORCH_DEVICE
from .. import peers
from ..group import Place, subgroup
from ..neighbours import Arrival, Neighbour, Sent, meet_neighbours

Channel = tuple[int, int, bool]
"""(source, destination, whether it carries activations)."""


@dataclass(frozen=True, slots=True)
class ChannelLine:
    """One channel of a group, as seen from one end."""

    group: dist.ProcessGroup
    peer: int
    tag: int = 0

    def send(self, part: Tensor) -> peers.Transfer:
        """Start to send; keep the tensor until the transfer is done."""
        return peers.started("send", self.group.send, [part], self.peer, self.tag)

    def receive(self, part: Tensor) -> peers.Transfer:
        """Start to receive into a tensor of exactly the size that is sent."""
        return peers.started("receive", self.group.recv, [part], self.peer, self.tag)


@dataclass(frozen=True, slots=True)
class NearLine:
    """One channel to a worker of the same host, as seen from one end."""

    neighbour: Neighbour
    tag: int

    @property
    def peer(self) -> int:
        """The other worker's rank."""
        return self.neighbour.rank

    def send(self, part: Tensor) -> Sent:
        """Send; the tensor may be changed at once."""
        return self.neighbour.send(self.tag, part)

    def receive(self, part: Tensor) -> Arrival:
        """Ask for what is sent next, into a tensor of exactly its size."""
        return self.neighbour.receive(self.tag, part)


AnyLine = ChannelLine | NearLine
Transfer = peers.Transfer | Sent | Arrival
"""Something to wait for: a message that is sent, or one that is to come."""


@dataclass(frozen=True, slots=True)
class ChannelLines:
    """The lines of one channel, as seen from one end.

    Attributes:
        frames: Carries every message's frame.
        aside: Carries gloo messages that are no frames; a group delivers one tag's in order.
        payloads: Carries the payloads that are not in frames.
        device: Device of the payloads.
        copies: Whether what was sent may be changed at once.
    """

    frames: AnyLine
    aside: AnyLine
    payloads: AnyLine
    device: torch.device
    copies: bool = False

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
        near: By rank, the connections to workers of this host.
    """

    rank: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    device: torch.device
    payloads: dict[Channel, dist.ProcessGroup]
    near: Mapping[int, Neighbour] = field(default_factory=dict)

    def line(self, source: int, destination: int, tag: int) -> AnyLine:
        """A line between this worker's host and another worker's."""
        peer = destination if source == self.rank else source
        if peer in self.near:
            return NearLine(self.near[peer], tag)
        return ChannelLine(self.up if source < destination else self.down, peer, tag)

    def lines(self, channel: Channel) -> ChannelLines:
        """The lines of a channel."""
        source, destination, activation = channel
        tag = 1 if activation else 2
        frames, aside = (self.line(source, destination, tag + more) for more in (0, 2))
        group = self.payloads.get(channel)
        payloads = aside if group is None else ChannelLine(group, int(frames.peer > self.rank))
        copies = group is None and frames.peer in self.near
        return ChannelLines(frames, aside, payloads, self.device, copies)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which workers of two tensor-parallel groups send messages to each other.

    Each worker sends its part of a value (channels.py), to all whose parts overlap with it.

    Attributes:
        rank: This worker's rank.
        groups: [groups] the ranks of each group.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]

    def incoming(self, group: int, activation: bool) -> list[tuple[int, Channel]]:
        """The channels on which this worker receives from a group, by position in that group."""
        senders = self.groups[group]
        return [
            (senders.index(source), (source, own, activation))
            for source, own in _meeting(senders, self._own)
            if own == self.rank
        ]

    def outgoing(self, group: int, activation: bool) -> list[tuple[int, Channel]]:
        """The channels on which this worker sends to a group, by position in that group."""
        receivers = self.groups[group]
        return [
            (receivers.index(peer), (own, peer, activation))
            for own, peer in _meeting(self._own, receivers)
            if own == self.rank
        ]

    @property
    def _own(self) -> tuple[int, ...]:
        return next(ranks for ranks in self.groups if self.rank in ranks)


def part(size: int, lane: int, degree: int) -> tuple[int, int]:
    """The (start, end) of the part of a message's value that one worker of a group sends."""
    return lane * size // degree, (lane + 1) * size // degree


def overlap(size: int, lane: int, degree: int, other: int, other_degree: int) -> tuple[int, int]:
    """The (start, end) that the parts of two workers of two groups have in common."""
    first, last = part(size, lane, degree)
    begin, end = part(size, other, other_degree)
    return max(first, begin), max(first, begin, min(last, end))


def _meeting(senders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of workers whose parts overlap, for values of any size."""
    size = len(senders) * len(receivers)
    found = []
    for lane, sender in enumerate(senders):
        for other, receiver in enumerate(receivers):
            first, last = overlap(size, lane, len(senders), other, len(receivers))
            if first < last:
                found.append((sender, receiver))
    return found


def transport_of(place: Place, stages: Sequence[Sequence[Sequence[int]]]) -> Transport | None:
    """Make the transport of this worker; None for a single worker. Call it on all workers."""
    if not place.distributed:
        return None
    up, down = (subgroup(place, backend=HOST_COLLECTIVE) for _ in range(2))
    near = meet_neighbours(place.rank, place.world_size, up, place.start.timeout_seconds)
    backend = payload_collective(place.device, dist.get_backend())
    if backend is None:
        return Transport(place.rank, up, down, torch.device(TORCH_DEVICE), {}, near)
    payloads = connect(place, channels_of(stages), backend)
    return Transport(place.rank, up, down, place.device, payloads, near)


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
                    found |= {(*pair, True) for pair in _meeting(lower, upper)}
                    found |= {(*pair, False) for pair in _meeting(upper, lower)}
    return sorted(found)


_MOST_WORKERS = 16
_TAG = 5


class VectorSums:
    """Sums float64 vectors of equal length over all workers.

    Attributes:
        own: [length] this worker's vector, to be written before each sum.
    """

    def __init__(self, transport: Transport | None, world_size: int, length: int) -> None:
        self._transport = transport
        self._peers: list[tuple[AnyLine, AnyLine, Tensor]] = []
        self._receiving: list[Transfer] = []
        self._sending: list[Transfer] | None = None
        by_messages = transport is not None and world_size <= _MOST_WORKERS
        self._all = torch.zeros((world_size if by_messages else 1, length), dtype=torch.float64)
        self.own = self._all[0]
        if transport is not None and by_messages:
            self.own = self._all[transport.rank]
            own = transport.rank
            self._peers = [
                (transport.line(own, rank, _TAG), transport.line(rank, own, _TAG), self._all[rank])
                for rank in range(world_size)
                if rank != own
            ]

    def expect(self) -> None:
        """Post the receives of the next sum."""
        if not self._receiving:
            self._receiving = [line.receive(vector) for _, line, vector in self._peers]

    def start(self) -> None:
        """Start the sum; ``own`` must stay as it is until ``sum``."""
        if self._peers:
            self.expect()
            self._sending = [line.send(self.own) for line, _, _ in self._peers]
        elif self._transport is not None:
            work = peers.all_reduce(self.own, group=self._transport.up, async_op=True)
            self._sending = [work] if work is not None else []
        else:
            self._sending = []

    def sum(self) -> Tensor:
        """[length] the sum over all workers in order of ranks, so all get the same bits."""
        if self._sending is None:
            self.start()
        for work in self._receiving + (self._sending or []):
            work.wait()
        self._receiving, self._sending = [], None
        return self._all.sum(0) if self._peers else self.own.clone()
