"""Framed messages between workers: first a header of fixed size, then one packed payload.

The header states every tensor's type and shape, so a message of another size than expected is
read as what it is (gloo aborts the process, or accepts it in silence). Each incoming channel has
a thread that takes messages as they come, ahead of need; sending never blocks. All waits end at
the group's time limit.
"""

import json
import queue
import threading
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

    def send(self, values: tuple[Value, ...], peer: int, *, activation: bool) -> None:
        """Start a message to a rank; does not wait."""
        for part in pack(values):
            if part.numel():
                work = dist.isend(part, peer, group=self._group, tag=_tag(activation))
                assert work is not None
                self._leaving.append((work, part))
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until all have left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()


class Inbox:
    """One incoming channel: a thread receives as many messages as it was told to expect."""

    def __init__(self, group: dist.ProcessGroup, peer: int, *, activation: bool) -> None:
        self._group, self._peer, self._tag = group, peer, _tag(activation)
        self._expected: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[Tensor, Tensor] | BaseException] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, daemon=True).start()

    def expect(self, number: int) -> None:
        """So many more messages will come."""
        self._expected.put(number)

    def take(self) -> tuple[tuple[Value, ...], tuple[bool, ...]]:
        """The next message; waits for it."""
        message = self._arrived.get()
        if isinstance(message, BaseException):
            raise message
        return unpack(*message)

    def close(self) -> None:
        """End the thread."""
        self._expected.put(-1)

    def _run(self) -> None:
        try:
            while (number := self._expected.get()) >= 0:
                for _ in range(number):
                    self._arrived.put(self._receive())
        except BaseException as error:  # handed to the thread that waits for the message
            self._arrived.put(error)

    def _receive(self) -> tuple[Tensor, Tensor]:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.recv(header, self._peer, group=self._group, tag=self._tag)
        payload = torch.empty(payload_bytes(header), dtype=torch.uint8)
        if payload.numel():
            dist.recv(payload, self._peer, group=self._group, tag=self._tag)
        return header, payload


def _tag(activation: bool) -> int:
    return 1 if activation else 2
