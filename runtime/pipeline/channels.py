"""Framed messages between workers: one frame a message, of a size that both ends know.

A frame is a header, which states every tensor's type and shape, and room for as many payload
bytes as the channel's last message had. Where the payload is of another size, the header says so
and the payload follows by itself. So no receive is ever posted with a wrong size (gloo aborts the
process, or accepts it in silence), and in the steady state a message is a single transfer into a
buffer that was posted ahead. Sending never blocks; all waits end at the group's time limit.
"""

import json
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import TargetError

HEADER_BYTES = 4096
_LENGTH_BYTES = 8
Value = Tensor | int | float | bool | None | tuple[Any, ...]


def pack(values: tuple[Value, ...]) -> tuple[Tensor, Tensor]:
    """(header, payload) of a message, both of bytes on the CPU.

    Raises:
        TargetError: A value that is no tensor, number or tuple of numbers, or too many of them.
    """
    entries: list[Any] = []
    parts: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensor = value.detach().cpu().contiguous()
            entries.append([str(tensor.dtype)[6:], list(tensor.shape), value.requires_grad])
            parts.append(tensor.reshape(-1).view(torch.uint8))
        else:
            entries.append({"value": _plain(value)})
    text = json.dumps([sum(part.numel() for part in parts), entries]).encode()
    if len(text) > HEADER_BYTES - _LENGTH_BYTES:
        raise TargetError(f"{len(values)} values cross between two stages; the header holds fewer")
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    framed = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    header[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    if len(parts) == 1:
        return header, parts[0]
    return header, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    raise TargetError(
        f"the model cannot be cut here: a {type(value).__name__} would cross between two stages",
        hint="only tensors and numbers can; move the cut",
    )


def payload_bytes(header: Tensor) -> int:
    """Size of the payload that follows a header."""
    return int(_read(header)[0])


def unpack(header: Tensor, payload: Tensor) -> tuple[tuple[Value, ...], tuple[bool, ...]]:
    """The values of a message, and which of the tensors want a gradient back."""
    values: list[Value] = []
    wants: list[bool] = []
    start = 0
    for entry in _read(header)[1]:
        if isinstance(entry, dict):
            value = entry["value"]
            values.append(_tuples(value))
            wants.append(False)
            continue
        dtype, shape = getattr(torch, entry[0]), entry[1]
        size = torch.Size(shape).numel() * dtype.itemsize
        part = payload[start : start + size]
        aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        values.append(aligned.view(dtype).view(shape))
        wants.append(bool(entry[2]))
        start += size
    return tuple(values), tuple(wants)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value


def _read(header: Tensor) -> Any:
    raw = header.numpy().tobytes()
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    return json.loads(raw[_LENGTH_BYTES : _LENGTH_BYTES + length])


class Outbox:
    """Messages on their way: their buffers are kept until they have left."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()
        self._room: dict[tuple[int, bool], int] = {}

    def send(self, values: tuple[Value, ...], peer: int, *, activation: bool) -> None:
        """Start a message to a rank; does not wait."""
        header, payload = pack(values)
        room = self._room.get((peer, activation), 0)
        if payload.numel() == room:
            self._start(torch.cat([header, payload]), peer, activation)
        else:
            self._start(torch.cat([header, header.new_zeros(room)]), peer, activation)
            if payload.numel():
                self._start(payload, peer, activation)
        self._room[peer, activation] = payload.numel()
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()[0].wait()

    def _start(self, part: Tensor, peer: int, activation: bool) -> None:
        work = dist.isend(part, peer, group=self._group, tag=_tag(activation))
        assert work is not None
        self._leaving.append((work, part))

    def flush(self) -> None:
        """Wait until all have left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()


class Inbox:
    """One incoming channel: while messages are expected, the next one's receive is posted."""

    def __init__(self, group: dist.ProcessGroup, peer: int, *, activation: bool) -> None:
        self._group, self._peer, self._tag = group, peer, _tag(activation)
        self._num_expected = 0
        self._room = 0
        self._posted: tuple[dist.Work, Tensor] | None = None

    def expect(self, number: int) -> None:
        """So many more messages will come."""
        self._num_expected += number
        self._post()

    def expect_none(self) -> None:
        """No more messages will come for now. A posted receive stays for the next one."""
        self._num_expected = 0

    def take(self) -> tuple[tuple[Value, ...], tuple[bool, ...]]:
        """The next message; waits for it."""
        assert self._posted is not None
        work, frame = self._posted
        work.wait()
        header, payload = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
        size = payload_bytes(header)
        if size != self._room:
            payload = torch.empty(size, dtype=torch.uint8)
            if size:
                dist.recv(payload, self._peer, group=self._group, tag=self._tag)
        self._room, self._posted = size, None
        self._num_expected -= 1
        self._post()
        return unpack(header, payload)

    def _post(self) -> None:
        if self._posted is None and self._num_expected:
            frame = torch.empty(HEADER_BYTES + self._room, dtype=torch.uint8)
            work = dist.irecv(frame, self._peer, group=self._group, tag=self._tag)
            assert work is not None
            self._posted = (work, frame)


def _tag(activation: bool) -> int:
    return 1 if activation else 2
