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
from contextlib import nullcontext
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...devices.backend import backend_of
from ...schema.errors import TargetError
from .transport import Lines, Transfer

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


class Layout:
    """Where the values of a message are in its payload, and which of them want a gradient."""

    def __init__(self, parts: tuple[_Part, ...]) -> None:
        self.parts = parts
        self.num_bytes = max((part.end for part in parts), default=0)
        self.wants = tuple(part.wants for part in parts)

    @classmethod
    def of(cls, key: tuple[Any, ...]) -> "Layout":
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
    """Copy the tensors of a message into its payload (``places`` from ``Layout.places``)."""
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
    layout: Layout
    values: tuple[Value, ...]
    """Views of the values in the payload; empty if they do not fit."""

    @classmethod
    def of(cls, layout: Layout, room: int) -> "_Frame":
        """A frame whose buffer has ``room`` bytes for the payload."""
        whole = torch.empty(HEADER_BYTES + room, dtype=torch.uint8)
        payload = whole[HEADER_BYTES:]
        values = layout.places(payload) if layout.num_bytes <= room else ()
        return cls(whole, whole.numpy().data, payload, layout, values)


class Outbox:
    """The sending end of a channel. Buffers are kept until their messages were sent."""

    def __init__(self, lines: Lines) -> None:
        self._lines, self._are_joined = lines, lines.are_joined
        self._key: tuple[Any, ...] | None = None
        self._layout = Layout(())
        self._number, self._rooms = 0, Rooms()
        self._leaving: deque[tuple[list[tuple[Transfer, Tensor]], _Frame]] = deque()
        self._free: list[_Frame] = []

    def send(self, values: tuple[Value, ...], limit: int | None = None) -> None:
        """Start to send a message.

        Args:
            values: Tensors (on any device) and plain values.
            limit: The largest number of messages outstanding, this one included: the caller knows
                that older ones were received. gloo reports the end of a transfer only to those who
                wait for it. None for any number.

        Raises:
            TargetError: A value cannot be sent.
        """
        key, text = key_of(values), b""
        if key != self._key:
            text = describe(key)
            self._key, self._layout, self._free = key, Layout.of(key), []
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
        if self._lines.copies:
            self._free.append(frame)
            return
        self._leaving.append((parts, frame))
        while limit is not None and len(self._leaving) > limit:
            self._let_go()

    def _frame(self, room: int) -> _Frame:
        """A frame with a buffer of this size, reused if one has been sent."""
        while self._free:
            frame = self._free.pop()
            if frame.whole.numel() == HEADER_BYTES + room:
                return frame
        return _Frame.of(self._layout, room)

    def _let_go(self) -> None:
        parts, frame = self._leaving.popleft()
        for work, _ in parts:
            work.wait()
        if frame.layout is self._layout:
            self._free.append(frame)

    def flush(self) -> None:
        """Wait until all messages were sent."""
        while self._leaving:
            self._let_go()


class Inbox:
    """The receiving end of a channel; the receives of the next messages are posted ahead."""

    def __init__(self, lines: Lines) -> None:
        self._lines, self._are_joined = lines, lines.are_joined
        self._layout = Layout(())
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
            self._layout = Layout.of(undescribe(text.numpy().tobytes()))
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
        with nullcontext() if self._stream is None else self._backend.on_stream(self._stream):
            payload = torch.empty(size, dtype=torch.uint8, device=self._lines.device)
            self._lines.payloads.receive(payload).wait()
        if self._stream is not None:
            computing: Any = self._backend.current_stream(self._lines.device)
            computing.wait_stream(self._stream)
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
