"""Plain values with tensors on their way to other workers, as in checkpoints: nothing is unpickled.

A message is a header, which holds the values as JSON and the tensors' dtypes and shapes, and the
tensors' bytes behind it. Its length is sent first: gloo may fail, or accept a transfer silently,
if the length differs from the buffer's.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices.collectives import current_wire_device
from ..schema.errors import TargetError
from . import peers
from .checkpoints.checkpoint import ALIGNMENT, DTYPES, bytes_of, copy_to_host, decode, encode
from .nested_tensors import byte_view

CHUNK_BYTES = 64 << 20
"""Bytes of one transfer: small tensors are joined, large ones cut."""
Carry = Callable[[Tensor], Tensor]
"""Sends a flat tensor, or fills it with what comes; returns it where its reader wants it."""


@dataclass(frozen=True, slots=True)
class Message:
    """Nested plain values with tensors, ready to be sent.

    Attributes:
        header: The values as JSON, and the dtypes and shapes of the tensors.
        tensors: The tensors, in order.
    """

    header: bytes
    tensors: list[Tensor]

    @classmethod
    def of(
        cls,
        value: Any,
        what: str = "state",
        *,
        strange: str = "a tensor of dtype {} cannot be sent",
        copy: Callable[[Tensor], Tensor] = copy_to_host,
    ) -> "Message":
        """Make a message.

        Args:
            value: The nested values.
            what: What they are, for error messages.
            strange: The error for a tensor of another dtype than checkpoints have.
            copy: Makes the tensor to send of one among the values.

        Raises:
            TargetError: They hold an object that is no plain data, or such a tensor.
        """
        tensors: list[Tensor] = []
        encoded = encode(value, tensors, what, copy=copy)
        kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        for kind, _ in kinds:
            if kind not in DTYPES:
                raise TargetError(strange.format(kind))
        return cls(json.dumps({"value": encoded, "tensors": kinds}).encode(), tensors)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the contents. Waits for the tensors' device."""
        digest = hashlib.sha256(self.header)
        for tensor in self.tensors:
            digest.update(bytes_of(copy_to_host(tensor)))
        return digest.digest()

    def value(self, device: torch.device | None = None) -> Any:
        """The values, with tensors on a device; by default where they are."""
        tensors = self.tensors if device is None else [t.to(device) for t in self.tensors]
        return decode(json.loads(self.header)["value"], tensors)


def carried(message: Message | None, carry: Carry) -> Message:
    """Send a message, or receive one where it is None. All that take part call it."""
    if message is not None:
        device = message.tensors[0].device if message.tensors else None
        header = torch.frombuffer(bytearray(message.header), dtype=torch.uint8).to(device)
        parts = [part for tensor in (header, *message.tensors) for part in _padded(tensor)]
        # Lengths first, for which the receiver has room; it makes room for the rest by them. Then
        # one stream of bytes: thousands of small tensors would cost a latency each.
        carry(torch.tensor([len(header), sum(map(len, parts))]))
        for chunk in _chunks(parts):
            carry(chunk)
        return message
    length, total = carry(torch.zeros(2, dtype=torch.int64)).tolist()
    data = None
    for at in range(0, total, CHUNK_BYTES):
        part = carry(torch.empty(min(CHUNK_BYTES, total - at), dtype=torch.uint8))
        data = part.new_empty(total) if data is None and len(part) < total else data
        if data is None:  # as a rule: it came at once
            data = part
        else:
            data[at : at + len(part)] = part
    assert data is not None  # every message has a header
    said = data[:length].cpu().numpy().tobytes()
    kinds = json.loads(said)["tensors"]
    return Message(said, list(_unpacked(data, length + -length % ALIGNMENT, kinds)))


def send(value: Any, to: Sequence[int]) -> None:
    """Send a value to some ranks of the default group.

    Raises:
        TargetError: The value contains something that is not plain data.
        PeerLostError: A receiver is gone.
    """

    def carry(tensor: Tensor) -> Tensor:
        on_wire = tensor.to(current_wire_device())  # copied once, then sent to all together
        peers.wait_for([peers.isend(on_wire, dst=rank) for rank in to])
        return on_wire

    carried(Message.of(value), carry)


def receive(source: int) -> Any:
    """Receive the value that rank ``source`` sends; its tensors are on the host.

    Raises:
        PeerLostError: The sender is gone.
    """

    def carry(tensor: Tensor) -> Tensor:
        on_wire = tensor.to(current_wire_device())
        peers.receive(on_wire, src=source)
        return on_wire.cpu()

    return carried(None, carry).value()


def _padded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor's bytes, and padding: a part must be aligned to be viewed as its own dtype."""
    data = byte_view(tensor)
    return data, data.new_zeros(-len(data) % ALIGNMENT)


def _chunks(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield all bytes in transfers of ``CHUNK_BYTES``; the last one has the rest."""
    pending: list[Tensor] = []
    room = CHUNK_BYTES
    for part in parts:
        while len(part):
            piece, part = part[:room], part[room:]
            pending.append(piece)
            room -= len(piece)
            if not room:
                yield torch.cat(pending)
                pending, room = [], CHUNK_BYTES
    if pending:
        yield torch.cat(pending)


def _unpacked(data: Tensor, at: int, kinds: Sequence[tuple[str, list[int]]]) -> Iterator[Tensor]:
    for name, shape in kinds:
        dtype = DTYPES[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        yield data[at : at + size].view(dtype).reshape(shape)
        at += size + -size % ALIGNMENT
