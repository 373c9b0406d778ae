"""Send plain data and tensors directly from one worker to another, over the process group.

They are encoded like a checkpoint: nothing is unpickled. Lengths are sent first, since gloo may
fail, or silently accept the message, if its length differs from the buffer's.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...devices.collectives import current_wire_device
from .. import checkpoint, peers
from ..manifest import DTYPES

CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


def send(value: Any, to: Sequence[int]) -> None:
    """Send a value to some ranks of the default group.

    Raises:
        TargetError: The value contains something that is not plain data.
        PeerLostError: A receiver is gone.
    """
    tensors: list[Tensor] = []
    encoded = checkpoint.encode(value, tensors)
    parts = list(_padded(tensors))
    chunks = list(_chunks(parts))
    header = json.dumps(
        {
            "value": encoded,
            "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors],
            "chunks": [len(chunk) for chunk in chunks],
        }
    ).encode()
    head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for message in (torch.tensor([len(head)]), head, *chunks):
        on_wire = _on_wire(message)  # copied once, then sent to all at the same time
        for work in [peers.isend(on_wire, dst=rank) for rank in to]:
            if work is not None:
                work.wait()


def receive(source: int) -> Any:
    """Receive the value that rank ``source`` sends; its tensors are on the host.

    Raises:
        PeerLostError: The sender is gone.
    """
    length = int(_take(torch.zeros(1, dtype=torch.int64), source))
    header = json.loads(_take(torch.empty(length, dtype=torch.uint8), source).numpy().tobytes())
    data = torch.empty(sum(header["chunks"]), dtype=torch.uint8)
    at = 0
    for size in header["chunks"]:
        data[at : at + size] = _take(torch.empty(size, dtype=torch.uint8), source)
        at += size
    return checkpoint.decode(header["value"], list(_unpacked(data, header["tensors"])))


def _on_wire(tensor: Tensor) -> Tensor:
    return tensor.to(current_wire_device())


def _take(tensor: Tensor, source: int) -> Tensor:
    on_wire = _on_wire(tensor)
    peers.receive(on_wire, src=source)
    return on_wire.cpu()


def _padded(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor's bytes, then padding to the next aligned address."""
    for tensor in tensors:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        yield data
        yield torch.zeros(-len(data) % _ALIGNMENT, dtype=torch.uint8)


def _chunks(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all bytes in messages of bounded size: small tensors joined, large ones cut."""
    pending: list[Tensor] = []
    size = 0
    for part in parts:
        for piece in torch.split(part, CHUNK_BYTES):
            if size + len(piece) > CHUNK_BYTES:
                yield torch.cat(pending)
                pending, size = [], 0
            pending.append(piece)
            size += len(piece)
    if size:
        yield torch.cat(pending)


def _unpacked(data: Tensor, kinds: Sequence[tuple[str, list[int]]]) -> Iterator[Tensor]:
    at = 0
    for name, shape in kinds:
        dtype = DTYPES[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        yield data[at : at + size].view(dtype).reshape(shape)
        at += size + -size % _ALIGNMENT
