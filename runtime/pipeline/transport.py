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

import contextlib
import hashlib
import mmap
import os
import select
import socket
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ...devices.collectives import HOST_COLLECTIVE, payload_collective
from ...devices.host import TORCH_DEVICE
from ...schema.errors import PeerLostError, TargetError
from .. import peers
from ..group import Place, subgroup

# Messages between workers of one host, through memory that both of them see.
#
# gloo hands every message to a thread of its own, in the sender until a receive is posted and in
# the receiver until the message is read. If all cores compute, the kernel lets such a thread wait
# for a time slice, milliseconds where the passes take as long. Here the sender copies a message
# into shared memory and tells the receiver by a packet; the receiver copies it out when it wants
# it. A worker that waits is woken by the packet, on the core that its own waiting has left free. No
# other thread takes part.
#
# Two workers have one connection for all their messages, a Unix socket. Each lends the other a file
# in memory whose slots it fills. A slot is filled again when the receiver has said that it took the
# message, so sending does not wait for the receiver. When a worker ends, its socket closes; what it
# has sent can still be read, and after that its loss shows at once.


_PACKET = struct.Struct("=3q")  # what it says and of which messages, a slot, bytes
_NUM_KINDS = 3
_MOST_INSIDE = 1024  # bytes of a message that travels in its packet
_MEETING_SECONDS = 20.0
_HOST_FACTS = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net")
_KEY_BYTES, _NAME_BYTES = 32, 32
_CREDENTIALS = struct.Struct("=3i")  # process, user, group


class _Kind(IntEnum):
    """What a packet says."""

    INSIDE = 0
    """Here is a message."""
    FILLED = 1
    """A message is in this slot of the sender's."""
    TAKEN = 2
    """The message in this slot of the receiver's was copied; it may fill the slot again."""


class Sent:
    """A message that was sent: the buffer that it came from is free."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once."""


_SENT = Sent()


class Arrival:
    """A message to come; those with one tag must be waited for in the order they were asked for."""

    __slots__ = ("_neighbour", "_part", "_tag")

    def __init__(self, neighbour: "Neighbour", tag: int, part: Tensor) -> None:
        self._neighbour, self._tag, self._part = neighbour, tag, part

    def wait(self) -> None:
        """Wait until it is in its tensor.

        Raises:
            PeerLostError: The other worker is gone, or sent nothing within the time limit.
        """
        self._neighbour.take(self._tag, self._part)


class Neighbour:
    """The connection to another worker of this host. For one thread.

    Args:
        rank: The other worker's, for errors.
        connection: A socket that keeps packets apart (SOCK_SEQPACKET).
        own_file: Descriptor of the file in memory that this worker fills.
        their_file: Descriptor of the other's.
        limit_seconds: How long to wait for the other worker.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        own_file: int,
        their_file: int,
        limit_seconds: float,
    ) -> None:
        self.rank, self._limit_seconds = rank, limit_seconds
        connection.setblocking(False)
        self._connection = connection
        self._own, self._theirs = _Slots(own_file), _Slots(their_file)
        self._poll = select.poll()
        self._arrived: dict[int, deque[bytes | tuple[int, int]]] = defaultdict(deque)
        self._is_closed = False
        self.close = weakref.finalize(self, _close, connection, own_file, their_file)

    def send(self, tag: int, part: Tensor) -> Sent:
        """Send a contiguous tensor of the host's; its memory is free when this returns.

        Raises:
            PeerLostError: The other worker is gone, or read no packet within the time limit.
        """
        given = _bytes_of(part)
        if given.numel() <= _MOST_INSIDE:
            packet = _packet(_Kind.INSIDE, tag, 0, given.numel()) + given.numpy().tobytes()
            self._tell(packet)
            return _SENT
        # Packets that say that slots are free may lie unread; only then the file grows. It never
        # waits for a slot: two workers that send to each other would wait for ever.
        slot = self._own.free(given.numel())
        if slot is None:
            self._read()
            slot = self._own.free(given.numel())
        if slot is None:
            slot = self._own.more(given.numel())
        # The packet after the copy: who reads it finds the message whole.
        self._own.memory(slot, given.numel()).copy_(given)
        self._tell(_packet(_Kind.FILLED, tag, slot, given.numel()))
        return _SENT

    def receive(self, tag: int, part: Tensor) -> Arrival:
        """Ask for the next message with this tag; it has exactly the tensor's size."""
        return Arrival(self, tag, part)

    def take(self, tag: int, part: Tensor) -> None:
        """Wait for the next message with this tag, and copy it into a tensor; see ``Arrival``."""
        arrived, wanted = self._arrived[tag], _bytes_of(part)
        if not arrived:
            self._read()
        while not arrived:
            self._wait(select.POLLIN, "receive")
            self._read()
        found = arrived.popleft()
        size = len(found) if isinstance(found, bytes) else found[1]
        if size != wanted.numel():
            raise TargetError(f"rank {self.rank} sent {size} bytes where {wanted.numel()} were due")
        if isinstance(found, bytes):
            if found:
                wanted.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
            return
        slot, size = found
        wanted.copy_(self._theirs.memory(slot, size))
        # After the copy: from here on the sender may write over it.
        with contextlib.suppress(PeerLostError):  # it may have ended since it sent this
            self._tell(_packet(_Kind.TAKEN, tag, slot, size))

    def _tell(self, packet: bytes) -> None:
        """Send a packet; where the socket has no room, wait until the other worker has read."""
        while True:
            try:
                self._connection.send(packet)
                return
            except BlockingIOError:
                # Reads too while it waits: the other may be here as well, with a full socket.
                self._wait(select.POLLIN | select.POLLOUT, "send")
                self._read()
            except OSError as error:
                raise self._lost("send") from error

    def _read(self) -> None:
        while not self._is_closed:
            try:
                packet = self._connection.recv(_PACKET.size + _MOST_INSIDE)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # said once where the other left packets unread; its own follow
            if not packet:
                self._is_closed = True
                return
            said, slot, size = _PACKET.unpack_from(packet)
            # By tag, each in the order sent: messages of several channels come mixed.
            tag, kind = divmod(said, _NUM_KINDS)
            if kind == _Kind.TAKEN:
                self._own.give_back(slot, size)
            else:
                inside = packet[_PACKET.size :]
                self._arrived[tag].append(inside if kind == _Kind.INSIDE else (slot, size))

    def _wait(self, events: int, what: str) -> None:
        if self._is_closed:
            raise self._lost(what)
        self._poll.register(self._connection, events)
        if not self._poll.poll(1e3 * self._limit_seconds):
            raise PeerLostError(
                f"waited in vain for another worker in {what}: timed out after "
                f"{self._limit_seconds:g} s waiting for rank {self.rank}",
                timed_out=True,
            )

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(f"lost another worker in {what}: rank {self.rank} is gone")


class _Slots:
    """A file in memory, in slots: places for messages of up to a power of two of bytes.

    Memory is taken only for the pages that messages have touched.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: dict[int, Tensor] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = 0

    def memory(self, slot: int, size: int) -> Tensor:
        # Mapped once for each slot: a mapping costs a system call, and a fault for each page.
        known = self._memory.get(slot)
        if known is None:
            pages = mmap.mmap(self._descriptor, _room(size), offset=slot)
            known = self._memory[slot] = torch.frombuffer(pages, dtype=torch.uint8)
        return known[:size]

    def free(self, size: int) -> int | None:
        """Take a free slot with room for so many bytes; None where there is none."""
        known = self._free[_room(size)]
        return known.pop() if known else None

    def more(self, size: int) -> int:
        slot = self._end  # a slot is named by its first byte in the file
        self._end += _room(size)
        os.ftruncate(self._descriptor, self._end)
        return slot

    def give_back(self, slot: int, size: int) -> None:
        """Let a slot, which held a message of so many bytes, be filled again."""
        self._free[_room(size)].append(slot)


def _room(size: int) -> int:
    # A power of two, so that messages of like sizes share slots; whole pages, as mmap maps those.
    return max(mmap.ALLOCATIONGRANULARITY, 1 << (size - 1).bit_length())


def _packet(kind: _Kind, tag: int, slot: int, size: int) -> bytes:
    return _PACKET.pack(_NUM_KINDS * tag + kind, slot, size)


def _bytes_of(part: Tensor) -> Tensor:
    """[bytes] a contiguous tensor's memory."""
    flat = part.detach().reshape(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _close(connection: socket.socket, *files: int) -> None:
    connection.close()
    for descriptor in files:
        os.close(descriptor)


def meet_neighbours(
    rank: int, world_size: int, group: dist.ProcessGroup, limit_seconds: float
) -> dict[int, Neighbour]:
    """Connect with the workers that are on this host. Call it on all workers of a group.

    Returns:
        By rank, the connections. None where a worker could not make one of its own: then messages
        travel over the group between all of them.

    Raises:
        PeerLostError: A worker is gone.
    """
    with _Listener(world_size) as listener:
        rows = _told(listener.row, rank, world_size, group)
        near = [r for r, row in enumerate(rows) if r != rank and listener.is_near(row)]
        try:
            found = listener.connect(rank, {r: rows[r] for r in near}, limit_seconds)
        except (OSError, ValueError):
            found = None
        # All or none: if one end sent through memory and the other received over the group, both
        # would wait.
        answers = _told(bytes([found is not None]), rank, world_size, group)
    return found or {} if all(answer == b"\1" for answer in answers) else {}


def _told(row: bytes, rank: int, world_size: int, group: dist.ProcessGroup) -> list[bytes]:
    """[workers] what each worker says; all say as many bytes."""
    # A sum in which each row has one term that is not 0: no byte overflows.
    rows = torch.zeros((world_size, len(row)), dtype=torch.uint8)
    rows[rank] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    peers.all_reduce(rows, group=group)
    return [said.numpy().tobytes() for said in rows]


class _Listener:
    """Where the other workers of this host connect to this one.

    Attributes:
        row: What the others must know: the host, and the socket's name.
    """

    def __init__(self, world_size: int) -> None:
        self._key, self._socket, name = b"\0" * _KEY_BYTES, None, b""
        try:
            # The boot and not the host's name, which several hosts may share. The network's
            # namespace too: the socket's name is known in one only, and containers share a boot.
            facts = [Path(_HOST_FACTS[0]).read_text(), os.readlink(_HOST_FACTS[1]), os.getuid()]
            self._socket = _unix_socket()
            self._socket.bind("")  # the kernel chooses a name, which is no file's
            self._socket.listen(world_size)
            name = self._socket.getsockname()
            self._key = hashlib.sha256(repr(facts).encode()).digest()
        except (OSError, AttributeError):  # another system than Linux
            pass
        self.row = self._key + name.ljust(_NAME_BYTES, b"\0")

    def __enter__(self) -> "_Listener":
        return self

    def __exit__(self, *failure: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def is_near(self, row: bytes) -> bool:
        """Whether a row is of a worker on this host, of the same user."""
        return any(self._key) and row[:_KEY_BYTES] == self._key

    def connect(
        self, rank: int, rows: dict[int, bytes], limit_seconds: float
    ) -> dict[int, Neighbour]:
        """Connect with these workers, all of which call it."""
        if not rows:
            return {}
        assert self._socket is not None
        own: dict[int, int] = {}
        theirs: dict[int, int] = {}
        joined: dict[int, socket.socket] = {}
        with ExitStack() as undone:
            # Of two workers the higher rank connects and the lower accepts. All connect and give
            # before any accepts: the kernel takes both into the listener's queue, so none waits.
            for other, row in rows.items():
                own[other] = os.memfd_create("hetflow-messages", os.MFD_CLOEXEC)
                undone.callback(os.close, own[other])
                if other < rank:
                    joined[other] = undone.enter_context(_unix_socket())
                    joined[other].connect(b"\0" + row[_KEY_BYTES:].strip(b"\0"))
                    _give(joined[other], rank, own[other])
            self._socket.settimeout(_MEETING_SECONDS)
            for _ in range(sum(other > rank for other in rows)):
                connection = undone.enter_context(self._socket.accept()[0])
                # A name in the abstract namespace has no file mode: any user may connect.
                if _user_of(connection) != os.getuid():
                    raise ValueError("another user's process connected")
                other, descriptor = _given(connection)
                undone.callback(os.close, descriptor)
                joined[other], theirs[other] = connection, descriptor
                _give(connection, rank, own[other])
            for other in rows:
                if other < rank:
                    _, theirs[other] = _given(joined[other])
                    undone.callback(os.close, theirs[other])
            undone.pop_all()  # all have met: from here on ``Neighbour`` closes what it is given
        return {
            other: Neighbour(other, joined[other], own[other], theirs[other], limit_seconds)
            for other in rows
        }


def _unix_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_MEETING_SECONDS)
    return made


def _give(connection: socket.socket, rank: int, descriptor: int) -> None:
    socket.send_fds(connection, [struct.pack("=q", rank)], [descriptor])


def _given(connection: socket.socket) -> tuple[int, int]:
    """The other's rank, and the descriptor of its file."""
    connection.settimeout(_MEETING_SECONDS)
    said, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
    if len(said) != 8 or len(descriptors) != 1:
        raise ValueError("no file came")
    (rank,) = struct.unpack("=q", said)
    return rank, descriptors[0]


def _user_of(connection: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(user)


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
    size = len(senders) * len(receivers)  # of so many elements both groups have whole parts
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

    ``stages`` are [stages] the tensor-parallel groups that hold each, as ranks.
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
