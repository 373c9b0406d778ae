"""Framed messages between workers: one transfer a message, of a size that both ends know.

A frame is a header of fixed size and room for as many payload bytes as the channel's last message
had. The header counts the messages and says whether this one is laid out as the last: if so, its
payload is in the frame. If not, what follows by itself is a description (every tensor's type and
shape) and the payload, of the sizes that the header states. So no receive is ever posted with a
wrong size (gloo aborts the process, or accepts it in silence), nothing is described twice, and in
the steady state a message is a single transfer into a buffer that was posted ahead. Sending never
blocks; all waits end at the group's time limit.

Where payloads have a line of their own (transport.py), frames are headers only, and the payload
follows from device to device.
"""

from collections import deque
from struct import Struct
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import TargetError
from .messages import ALIGNMENT, Layout, Message, Value, describe, key_of, undescribe, write
from .transport import Line

# Message number, bytes of the description that follows (0: as the last), of the payload.
_NUMBERS = Struct("=3q")
HEADER_BYTES = ALIGNMENT
_CPU = torch.device("cpu")


class _Frame(NamedTuple):
    """A frame that serves again for messages of one layout, once it has left."""

    whole: Tensor
    header: memoryview
    rooms: tuple[Value, ...]

    @classmethod
    def of(cls, layout: Layout, *, is_inside: bool) -> "_Frame":
        """A frame with room for the payload, or for the header only."""
        whole = _frame(layout.num_bytes if is_inside else 0)
        rooms = layout.rooms(whole[HEADER_BYTES:]) if is_inside else ()
        return cls(whole, whole.numpy().data, rooms)


class Outbox:
    """The sending end of a channel. Buffers are kept until they have left."""

    def __init__(self, host: Line, payload: Line | None = None, device: torch.device = _CPU):
        """Take the line for frames; the one for payloads, and where they stand, if apart."""
        self._host, self._apart, self._device = host, payload, device
        self._key: tuple[Any, ...] | None = None
        self._layout = Layout(())
        self._number = 0
        self._leaving: deque[tuple[list[tuple[dist.Work, Tensor]], _Frame | None]] = deque()
        self._free: list[_Frame] = []

    def send(self, values: tuple[Value, ...], limit: int | None = None) -> None:
        """Start a message.

        Args:
            values: Tensors (of any device) and plain values.
            limit: The most messages that may be under way, this one included: the caller knows
                that older ones have arrived. (gloo never tells that a transfer is done, one has
                to wait for it.) None for any number.

        Raises:
            TargetError: A value that cannot cross.
        """
        key = key_of(values)
        if key == self._key:
            self._send_alike(values)
        else:
            self._send_new(values, key)
        while limit is not None and len(self._leaving) > limit:
            self._let_go()

    def _send_alike(self, values: tuple[Value, ...]) -> None:
        """Send a message that is laid out as the last, in a frame that has left if there is one."""
        is_inside = self._apart is None
        frame = self._free.pop() if self._free else _Frame.of(self._layout, is_inside=is_inside)
        size = self._layout.num_bytes
        _NUMBERS.pack_into(frame.header, 0, self._number, 0, size)
        self._number += 1
        if is_inside:
            write(values, frame.rooms)
        parts = [(self._host.send(frame.whole), frame.whole)]
        if size and self._apart is not None:
            parts.append(self._send_payload(values, self._apart))
        self._leaving.append((parts, frame))

    def _send_new(self, values: tuple[Value, ...], key: tuple[Any, ...]) -> None:
        """Send a message that is laid out unlike the last, with its description."""
        # The other end expects the last layout's frame.
        frame = _frame(self._layout.num_bytes if self._apart is None else 0)
        text = describe(key)
        self._key, self._layout, self._free = key, Layout.of(key), []
        _NUMBERS.pack_into(frame.numpy().data, 0, self._number, len(text), self._layout.num_bytes)
        self._number += 1
        description = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [(self._host.send(part), part) for part in (frame, description)]
        if self._layout.num_bytes:
            parts.append(self._send_payload(values, self._apart or self._host))
        # Frames of the layout before must not come back.
        self._leaving = deque((leaving, None) for leaving, _ in self._leaving)
        self._leaving.append((parts, None))

    def _send_payload(self, values: tuple[Value, ...], line: Line) -> tuple[dist.Work, Tensor]:
        payload = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=self._device)
        write(values, self._layout.rooms(payload))
        return line.send(payload), payload

    def _let_go(self) -> None:
        parts, frame = self._leaving.popleft()
        for work, _ in parts:
            work.wait()
        if frame is not None:
            self._free.append(frame)

    def flush(self) -> None:
        """Wait until all have left."""
        while self._leaving:
            self._let_go()


class Inbox:
    """The receiving end: while messages are expected, the next one's receive is posted."""

    def __init__(self, host: Line, payload: Line | None = None, device: torch.device = _CPU):
        """Take the same as the channel's ``Outbox``, seen from this end."""
        self._host, self._apart, self._device = host, payload, device
        self._layout = Layout(())
        self._number = 0
        self._num_expected = 0
        self._posted: tuple[dist.Work, Tensor] | None = None

    def expect(self, number: int) -> None:
        """So many more messages will come."""
        self._num_expected += number
        self._post()

    def expect_none(self) -> None:
        """No more messages will come for now. A posted receive stays for the next one."""
        self._num_expected = 0

    def take(self) -> Message:
        """The next message; waits for it.

        Raises:
            TargetError: Another message than the next: the workers do not run the same lists.
        """
        assert self._posted is not None
        work, frame = self._posted
        work.wait()
        number, num_described, size = _NUMBERS.unpack_from(frame.numpy().data)
        if number != self._number:
            raise TargetError(
                f"rank {self._host.peer} sent message {number} where {self._number} was due"
            )
        payload = frame[HEADER_BYTES:]
        if num_described:
            text = torch.empty(num_described, dtype=torch.uint8)
            self._host.receive(text).wait()
            self._layout = Layout.of(undescribe(text.numpy().tobytes()))
        if num_described or self._apart is not None:
            payload = torch.empty(size, dtype=torch.uint8, device=self._device)
            if size:
                (self._apart or self._host).receive(payload).wait()
        self._posted = None
        self._number += 1
        self._num_expected -= 1
        self._post()
        return self._layout.read(payload)

    def _post(self) -> None:
        if self._posted is None and self._num_expected:
            frame = _frame(self._layout.num_bytes if self._apart is None else 0)
            self._posted = (self._host.receive(frame), frame)


def _frame(room: int) -> Tensor:
    return torch.empty(HEADER_BYTES + room, dtype=torch.uint8)
