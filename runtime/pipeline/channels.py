"""Framed messages between workers: one transfer per message, of a size that both ends know.

A frame is a header of fixed size and a buffer for the payload below. The header has the message's
number and two sizes: that of a description (every tensor's dtype and shape; 0 if the message has
the layout of the one before) and that of the payload. A description is sent as a message of its
own, and so is a payload that is larger than the frame's buffer. So no receive is ever posted with a
wrong size (gloo would abort the process, or accept it silently); and in the steady state a message
is a single transfer into a buffer that was posted ahead. Sending never blocks. All waits end at the
group's time limit.

Where payloads have a channel of their own (transport.py), frames consist of headers only, and the
payload follows from device to device. It is received on a stream of the channel's own. The host is
ahead of its device, so the receive is posted while earlier passes run, and waits for none of them.

Sender and receiver compute the size of receive buffers independently. Messages are counted in
blocks. A buffer is as large as the payload of the last message two blocks earlier, so the receives
of two blocks can be posted ahead. Small messages have long blocks. Their receives are then posted
many at a time and not between passes: each posted receive wakes a thread of the sender, which is
busy computing.
"""

import json
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...devices.backend import backend_of
from ...schema.errors import TargetError
from .. import peers
from ..tensor.operators import TensorGroup, check_length
from .transport import ChannelLines, Transfer, overlap, part

Value = Tensor | int | float | bool | None | tuple[Any, ...]
Message = tuple[tuple[Value, ...], tuple[bool, ...]]
"""Values, and for each whether a gradient must be sent back."""

ALIGNMENT = 64  # bytes; of every tensor in a payload, as torch's own allocator gives


class _Part(NamedTuple):
    """One value of a message: where a tensor's bytes are in the payload, or the value itself."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    wants: bool
    start: int
    end: int
    value: Value = None


class MessageLayout:
    """Where the values of a message are in its payload, and which of them want a gradient."""

    def __init__(self, parts: tuple[_Part, ...]) -> None:
        self.parts = parts
        self.num_bytes = max((part.end for part in parts), default=0)
        self.wants = tuple(part.wants for part in parts)

    @classmethod
    def of(cls, key: tuple[Any, ...]) -> "MessageLayout":
        """The layout of values with this key (``key_of``)."""
        parts, start = [], 0
        for entry in key:
            if len(entry) == 1:
                parts.append(_Part(None, (), False, 0, 0, _tuples(json.loads(entry[0]))))
                continue
            dtype, shape, wants = entry
            end = start + torch.Size(shape).numel() * dtype.itemsize
            parts.append(_Part(dtype, tuple(shape), wants, start, end))
            start = -(-end // ALIGNMENT) * ALIGNMENT
        return cls(tuple(parts))

    def places(self, payload: Tensor) -> tuple[Value, ...]:
        """A view of each tensor in a payload; other values as they are."""
        return tuple(
            part.value
            if part.dtype is None
            else payload[part.start : part.end].view(part.dtype).view(part.shape)
            for part in self.parts
        )


def write(values: tuple[Value, ...], places: tuple[Value, ...]) -> None:
    """Copy the tensors of a message into its payload (``places`` from ``MessageLayout.places``)."""
    for value, place in zip(values, places, strict=True):
        if isinstance(place, Tensor):
            assert isinstance(value, Tensor)
            place.copy_(value.detach())


def key_of(values: tuple[Value, ...]) -> tuple[Any, ...]:
    """The key of a message's layout: equal keys have equal layouts.

    Raises:
        TargetError: A value is no tensor, number or tuple of numbers.
    """
    return tuple(
        (value.dtype, value.shape, value.requires_grad)
        if isinstance(value, Tensor)
        else (json.dumps(_plain(value)),)
        for value in values
    )


def describe(key: tuple[Any, ...]) -> bytes:
    """Write a key as text that ``undescribe`` reads; nothing is pickled."""
    entries = [
        entry if len(entry) == 1 else [str(entry[0])[6:], list(entry[1]), entry[2]] for entry in key
    ]
    return json.dumps(entries).encode()


def undescribe(text: bytes) -> tuple[Any, ...]:
    """Read the key that ``describe`` wrote."""
    return tuple(
        (entry[0],) if len(entry) == 1 else (getattr(torch, entry[0]), tuple(entry[1]), entry[2])
        for entry in json.loads(text)
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    raise TargetError(
        f"the model cannot be cut here: a {type(value).__name__} would cross between two stages",
        hint="only tensors and numbers can; move the cut",
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value


_MOST_MESSAGES, _MOST_BYTES = 8, 1 << 18  # in one block


class Rooms:
    """The buffer sizes of a channel's frames that may be outstanding.

    Attributes:
        ahead: Bytes for the payload of the next message's frame and of those behind it.
    """

    def __init__(self) -> None:
        self.ahead = deque([0, 0])
        self._lengths = deque([1, 1])

    def passed(self, num_bytes: int) -> None:
        """Note a message's payload; buffers of frames like it should have so many bytes."""
        self.ahead.popleft()
        self._lengths[0] -= 1
        # The last message of a block sizes the block after the next: the receives of the next are
        # posted already. Both ends count messages alike, so they need not tell each other sizes.
        # Blocks of small messages are longer, as all of a block's receives are posted at once.
        if not self._lengths[0]:
            self._lengths.popleft()
            length = max(1, min(_MOST_MESSAGES, _MOST_BYTES // max(num_bytes, 1)))
            self._lengths.append(length)
            self.ahead.extend([num_bytes] * length)


# Message number, bytes of the description that follows (0: same layout), bytes of the payload.
_NUMBERS = Struct("=3q")
HEADER_BYTES = ALIGNMENT


class _Frame(NamedTuple):
    """A buffer for messages of one layout, and views of its parts."""

    whole: Tensor
    header: memoryview
    payload: Tensor
    layout: MessageLayout
    values: tuple[Value, ...]
    """Views of the values in the payload; empty if they do not fit."""

    @classmethod
    def of(cls, layout: MessageLayout, room: int) -> "_Frame":
        """A frame whose buffer has ``room`` bytes for the payload."""
        whole = torch.empty(HEADER_BYTES + room, dtype=torch.uint8)
        payload = whole[HEADER_BYTES:]
        values = layout.places(payload) if layout.num_bytes <= room else ()
        return cls(whole, whole.numpy().data, payload, layout, values)


class Outbox:
    """The sending end of a channel. Buffers are kept until their messages were sent."""

    def __init__(self, lines: ChannelLines) -> None:
        self._lines, self._are_joined = lines, lines.are_joined
        self._key: tuple[Any, ...] | None = None
        self._layout = MessageLayout(())
        self._number, self._rooms = 0, Rooms()
        self._leaving: deque[tuple[list[tuple[Transfer, Tensor]], _Frame]] = deque()
        self._free: list[_Frame] = []

    def send(self, values: tuple[Value, ...]) -> None:
        """Start to send a message of tensors (on any device) and plain values.

        Its buffer is kept until ``release``: gloo reports the end of a transfer only to those who
        wait for it.

        Raises:
            TargetError: A value cannot be sent.
        """
        key, text = key_of(values), b""
        # Described only where the layout changes, which is at the first message and at short last
        # batches. Frames of the old layout have views at other places, so none is kept.
        if key != self._key:
            text = describe(key)
            self._key, self._layout, self._free = key, MessageLayout.of(key), []
        frame, size = self._frame(self._rooms.ahead[0]), self._layout.num_bytes
        _NUMBERS.pack_into(frame.header, 0, self._number, len(text), size)
        fits = size <= self._rooms.ahead[0]
        if fits:
            write(values, frame.values)
        parts: list[tuple[Transfer, Tensor]] = []
        parts.append((self._lines.frames.send(frame.whole), frame.whole))
        if text:
            description = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            parts.append((self._lines.aside.send(description), description))
        if not fits:
            payload = torch.empty(size, dtype=torch.uint8, device=self._lines.device)
            write(values, self._layout.places(payload))
            parts.append((self._lines.payloads.send(payload), payload))
        self._number += 1
        self._rooms.passed(size if self._are_joined else 0)
        if self._lines.copies:  # through shared memory: the frame is free already
            self._free.append(frame)
            return
        self._leaving.append((parts, frame))

    def _frame(self, room: int) -> _Frame:
        """A frame with a buffer of this size, reused if one has been sent."""
        while self._free:
            frame = self._free.pop()
            if frame.whole.numel() == HEADER_BYTES + room:
                return frame
        return _Frame.of(self._layout, room)

    def release(self) -> None:
        """Wait until the oldest message was sent, and use its buffer again."""
        if not self._leaving:  # all were copied as they were sent
            return
        parts, frame = self._leaving.popleft()
        for work, _ in parts:
            work.wait()
        if frame.layout is self._layout:
            self._free.append(frame)

    def flush(self) -> None:
        """Wait until all messages were sent."""
        while self._leaving:
            self.release()


class ReceiveQueue:
    """The receiving end of a channel; the receives of the next messages are posted ahead."""

    def __init__(self, lines: ChannelLines) -> None:
        self._lines, self._are_joined = lines, lines.are_joined
        self._layout = MessageLayout(())
        self._number, self._rooms = 0, Rooms()
        self._posted: deque[tuple[Transfer, _Frame]] = deque()
        self._backend = backend_of(lines.device)
        self._stream = None if self._are_joined else self._backend.side_stream(lines.device)
        self._post()

    def take(self) -> Message:
        """Wait for the next message and return it.

        Raises:
            TargetError: The message has another number, or a size that does not match its values:
                the workers do not run the same schedule.
        """
        work, frame = self._posted.popleft()
        work.wait()
        number, num_described, size = _NUMBERS.unpack_from(frame.header)
        if number != self._number:
            raise self._refusal(f"message {number} where {self._number} was due")
        if num_described:
            text = torch.empty(num_described, dtype=torch.uint8)
            self._lines.aside.receive(text).wait()
            self._layout = MessageLayout.of(undescribe(text.numpy().tobytes()))
        layout = self._layout
        if size != layout.num_bytes:
            raise self._refusal(
                f"{size} bytes in message {number}, whose values have {layout.num_bytes}"
            )
        if size > self._rooms.ahead[0]:
            values = layout.places(self._received(size))
        else:
            values = frame.values if frame.layout is layout else layout.places(frame.payload)
        self._number += 1
        self._rooms.passed(size if self._are_joined else 0)
        self._post()
        return values, layout.wants

    def _received(self, size: int) -> Tensor:
        """The payload of a message that has one apart; the computing stream waits for it."""
        # On a stream of its own: NCCL lets a receive wait for all that its stream was asked before,
        # and passes that are queued there need not end for a message to come.
        with nullcontext() if self._stream is None else self._backend.on_stream(self._stream):
            payload = torch.empty(size, dtype=torch.uint8, device=self._lines.device)
            self._lines.payloads.receive(payload).wait()
        if self._stream is not None:
            computing: Any = self._backend.current_stream(self._lines.device)
            computing.wait_stream(self._stream)
            # Else the allocator would give the memory out again as soon as Python lets go of it,
            # to the stream that it was taken on, while the computing one still reads.
            payload.record_stream(computing)
        return payload

    def _post(self) -> None:
        # Views are made here, many in a row, and not between two passes.
        ahead = self._rooms.ahead
        while len(self._posted) < len(ahead):
            frame = _Frame.of(self._layout, ahead[len(self._posted)])
            self._posted.append((self._lines.frames.receive(frame.whole), frame))

    def _refusal(self, sent: str) -> TargetError:
        return TargetError(f"rank {self._lines.frames.peer} sent {sent}")


# Send the values of a stage from one tensor-parallel group to another in parts (thesis 4.4.1).
#
# A value that crosses between stages is equal on every worker of a group. So each worker sends
# only its part of it, and the receiving group joins the parts by an all-gather (scatter/gather).
# Between groups of unlike degrees each worker sends to all whose parts overlap its own. Over all
# links of two groups, each byte of the value is sent once.
#
# A value of which every worker has a share of its own (the output of a column-parallel layer) goes
# whole to the worker at the same position. With sequence parallelism a worker has some tokens of a
# value; they go to those who need them, and nothing is joined.


class Holding(IntEnum):
    """What each worker of a tensor-parallel group holds of a value."""

    WHOLE = 0
    OWN = 1  # a share that only workers at the same position can use
    TOKENS = 2  # a part of the tokens, the last dimension but one


Holdings = tuple[Holding, ...]
"""[values of a message]; empty if all are whole."""


class Received(NamedTuple):
    """A message, and what this worker holds of its values."""

    message: Message
    holdings: Holdings

    def of_gradients(self) -> Holdings:
        """The layout of the gradients of the values, in order of those that have one."""
        _, wants = self.message
        pairs = zip(self.holdings, wants, strict=True) if self.holdings else ()
        found = tuple(holding for holding, wanted in pairs if wanted)
        return found if any(found) else ()


class Sender:
    """The sending end of all channels to one group.

    Args:
        outboxes: (the receiver's position in its group, the channel) for each worker sent to.
        degree: Number of workers in the other group.
    """

    def __init__(
        self, outboxes: Sequence[tuple[int, Outbox]], group: TensorGroup, degree: int
    ) -> None:
        self._outboxes, self._group, self._degree = outboxes, group, degree

    def send(self, values: tuple[Value, ...], holdings: Holdings) -> None:
        """Start to send this worker's parts; see ``Outbox.send``."""
        if self._degree == self._group.degree == 1:
            for _, outbox in self._outboxes:
                outbox.send(values)
            return
        holdings = holdings or (Holding.WHOLE,) * len(values)
        notes = tuple(_note(*pair) for pair in zip(values, holdings, strict=True))
        for other, outbox in self._outboxes:
            parts = (
                value if note is None else self._part(value, holding, other)
                for value, note, holding in zip(values, notes, holdings, strict=True)
            )
            outbox.send((*parts, notes))

    def _part(self, value: Value, holding: Holding, other: int) -> Tensor:
        assert isinstance(value, Tensor)
        group, given = self._group, value.detach()
        if holding is Holding.TOKENS:
            size = given.shape[-2] * group.degree
            check_length(size, self._degree)
            start, _ = part(size, group.lane, group.degree)
            first, last = overlap(size, group.lane, group.degree, other, self._degree)
            own = given.narrow(-2, first - start, last - first)
        else:
            first, last = overlap(given.numel(), group.lane, group.degree, other, self._degree)
            own = given.reshape(-1)[first:last]
        return own.requires_grad_() if value.requires_grad else own

    def release(self) -> None:
        """Wait until the oldest message was sent."""
        for _, outbox in self._outboxes:
            outbox.release()


class Receiver:
    """The receiving end of all channels from one group.

    Args:
        inboxes: (the sender's position in its group, the channel) for each worker heard from.
        degree: Number of workers in the other group.
        device: Where parts are joined.
    """

    def __init__(
        self,
        inboxes: Sequence[tuple[int, ReceiveQueue]],
        group: TensorGroup,
        degree: int,
        device: torch.device,
    ) -> None:
        self._inboxes, self._group, self._degree = inboxes, group, degree
        self._device = device

    def take(self) -> Received:
        """Wait for the next message, and join its parts. All workers of the group call it."""
        messages = [(lane, inbox.take()) for lane, inbox in self._inboxes]
        _, (values, wants) = messages[0]
        if self._degree == self._group.degree == 1:
            return Received((values, wants), ())
        *found, notes = values
        assert isinstance(notes, tuple)
        split = [number for number, note in enumerate(notes) if isinstance(note, tuple)]
        parts = [
            self._own_part(torch.Size(notes[n]), [(lane, m[0][n]) for lane, m in messages])
            for n in split
        ]
        for number, whole in zip(split, self._joined(parts), strict=True):
            found[number] = whole.view(notes[number])
        for number, note in enumerate(notes):
            if note is True and len(messages) > 1:
                pieces: list[Any] = [message[0][number] for _, message in messages]
                found[number] = torch.cat(pieces, -2).to(self._device)
        holdings = tuple(_held(*pair) for pair in zip(found, notes, strict=True))
        return Received((tuple(found), wants[:-1]), holdings if any(holdings) else ())

    def _own_part(self, shape: torch.Size, pieces: list[tuple[int, Any]]) -> "_Share":
        """This worker's part of a value, from the pieces of all that send to it."""
        group, size = self._group, shape.numel()
        first, last = part(size, group.lane, group.degree)
        if len(pieces) == 1:
            return _Share(pieces[0][1].to(self._device), size)
        own = pieces[0][1].new_empty(last - first, device=self._device)
        for lane, piece in pieces:
            begin, end = overlap(size, group.lane, group.degree, lane, self._degree)
            own[begin - first : end - first] = piece
        return _Share(own, size)

    def _joined(self, parts: list["_Share"]) -> list[Tensor]:
        """The whole values, flat, from the parts of this worker's group: one all-gather for all."""
        # As bytes, whatever the values' types: one latency for a message.
        degree = self._group.degree
        if degree == 1:
            return [own for own, _ in parts]
        # A row is one worker's parts as bytes, padded to equal lengths.
        starts, end = [], 0
        for own, size in parts:
            starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
            end = starts[-1] + -(-size // degree) * own.element_size()
        if not end:
            return [own for own, _ in parts]
        if len(parts) > 1:
            end = -(-end // ALIGNMENT) * ALIGNMENT
        first = parts[0].own.view(torch.uint8)
        row = first
        if len(parts) > 1 or first.numel() < end:
            row = first.new_zeros(end)
            for (own, _), start in zip(parts, starts, strict=True):
                row[start : start + own.nbytes] = own.view(torch.uint8)
        rows = row.new_empty(degree * end)
        peers.all_gather(rows, row, group=self._group.group)
        table = rows.view(degree, end)
        return [
            _whole(table[:, start:], own.dtype, size, degree)
            for (own, size), start in zip(parts, starts, strict=True)
        ]


class _Share(NamedTuple):
    """A worker's part of a value, flat, and the number of elements of the whole."""

    own: Tensor
    size: int


def _whole(rows: Tensor, dtype: torch.dtype, size: int, degree: int) -> Tensor:
    """One value from the rows of all workers, which begin with their parts as bytes."""
    most = -(-size // degree) * dtype.itemsize
    if size % degree == 0:
        return rows[:, :most].view(dtype).reshape(-1)
    found = []
    for lane in range(degree):
        first, last = part(size, lane, degree)
        found.append(rows[lane, : (last - first) * dtype.itemsize].view(dtype))
    return torch.cat(found)


def _note(value: Value, holding: Holding) -> Value:
    """What a message says of a value: the shape of one sent in parts, True for tokens, or None."""
    if not isinstance(value, Tensor) or holding is Holding.OWN:
        return None
    return True if holding is Holding.TOKENS else tuple(value.shape)


def _held(value: Value, note: Value) -> Holding:
    if note is True:
        return Holding.TOKENS
    return Holding.OWN if note is None and isinstance(value, Tensor) else Holding.WHOLE
