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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import TargetError
from .messages import ALIGNMENT, Layout, Message, Value, describe, key_of, undescribe
from .transport import Line

# Message number, bytes of the description that follows (0: as the last), of the payload.
_NUMBERS = Struct("=3q")
HEADER_BYTES = ALIGNMENT
_CPU = torch.device("cpu")


class Outbox:
    """The sending end of a channel. Buffers are kept until they have left."""

    def __init__(self, host: Line, payload: Line | None = None, device: torch.device = _CPU):
        """Take the line for frames; the one for payloads, and where they stand, if apart."""
        self._host, self._apart, self._device = host, payload, device
        self._key: tuple[Any, ...] | None = None
        self._layout = Layout(())
        self._number = 0
        self._leaving: deque[list[tuple[dist.Work, Tensor]]] = deque()

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
        is_new, last_size = key != self._key, self._layout.num_bytes
        if is_new:
            self._key, self._layout = key, Layout.of(key)
        size, text = self._layout.num_bytes, describe(key) if is_new else b""
        frame = _frame(last_size if self._apart is None else 0)
        _NUMBERS.pack_into(frame.numpy().data, 0, self._number, len(text), size)
        self._number += 1
        is_inside = self._apart is None and not is_new
        if is_inside:
            self._layout.write(values, frame[HEADER_BYTES:])
        parts = [(self._host.send(frame), frame)]
        if is_new:
            description = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            parts.append((self._host.send(description), description))
        if size and not is_inside:
            payload = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._layout.write(values, payload)
            parts.append(((self._apart or self._host).send(payload), payload))
        self._leaving.append(parts)
        while limit is not None and len(self._leaving) > limit:
            self._let_go()

    def _let_go(self) -> None:
        for work, _ in self._leaving.popleft():
            work.wait()

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
