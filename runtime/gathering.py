"""Bring what each virtual node's pass gave to other workers, in order of the samples."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..devices.collectives import wire_device
from ..schema.errors import TargetError
from . import checkpoint, peers
from .group import Place
from .manifest import DTYPES

Encoded = tuple[bytes, list[Tensor]]
"""A pass's plain values as JSON, and its tensors on the host."""


def encoded(value: Any) -> Encoded:
    """Encode the tensors and plain values that a pass gave.

    Raises:
        TargetError: A value is no plain data, or a tensor has a dtype that cannot be sent.
    """
    tensors: list[Tensor] = []
    plain = checkpoint.encode(value, tensors, "output")
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    for kind, _ in kinds:
        if kind not in DTYPES:
            raise TargetError(f"a virtual node's output cannot be a tensor of dtype {kind}")
    return json.dumps({"outputs": plain, "tensors": kinds}).encode(), tensors


def in_order(
    own: Mapping[int, Encoded],
    nodes: Sequence[int],
    holders: Sequence[int],
    place: Place,
    *,
    waiting: Callable[[], AbstractContextManager[None]],
    on_all: bool = True,
) -> list[Any]:
    """Bring what virtual nodes gave to all workers, or to the main one. Call it on all workers.

    Args:
        own: What this worker's virtual nodes gave.
        nodes: The virtual nodes that gave something on any worker, in order of their samples.
        holders: [virtual nodes] the rank that ran each.
        place: This worker among the others.
        waiting: A context in which this worker waits for the others.
        on_all: Whether every worker gets the values.

    Returns:
        What each node gave, in order, with tensors on the host; empty where not wanted.
    """
    found = []
    for node in nodes:
        header, tensors = own.get(node, (b"", []))
        if place.distributed:
            with waiting():
                header, tensors = deliver(header, tensors, holders[node], place, on_all=on_all)
        if header:
            found.append(checkpoint.decode(json.loads(header)["outputs"], tensors))
    return found


def deliver(
    header: bytes, tensors: list[Tensor], holder: int, place: Place, *, on_all: bool
) -> Encoded:
    """Send a pass's outputs from the worker that ran it to the main worker, or to all.

    Returns:
        The outputs; an empty header and list on workers that do not want them.
    """
    if not on_all and holder == 0:
        return header, tensors
    if not on_all and place.rank not in (0, holder):
        return b"", []
    on_wire = wire_device(place.device)

    def carry(tensor: Tensor) -> Tensor:
        tensor = tensor.to(on_wire)
        if on_all:
            peers.broadcast(tensor, src=holder)
        elif place.rank == holder:
            peers.send(tensor, dst=0)
        else:
            peers.receive(tensor, src=holder)
        return tensor.cpu()

    if place.rank == holder:
        parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        parts += [_as_bytes(tensor) for tensor in tensors]
        # Sent first: gloo fails, or does not notice, if a message's length is not its buffer's.
        carry(torch.tensor([len(header), sum(len(part) for part in parts)]))
        carry(torch.cat(parts))
        return (header, tensors) if on_all else (b"", [])
    lengths = carry(torch.zeros(2, dtype=torch.int64)).tolist()
    message = carry(torch.empty(lengths[1], dtype=torch.uint8))
    header = message[: lengths[0]].numpy().tobytes()
    return header, _split(message[lengths[0] :], json.loads(header)["tensors"])


def _split(data: Tensor, kinds: list[tuple[str, list[int]]]) -> list[Tensor]:
    tensors, at = [], 0
    for name, shape in kinds:
        tensor = torch.empty(shape, dtype=DTYPES[name])
        size = tensor.numel() * tensor.element_size()
        _as_bytes(tensor).copy_(data[at : at + size])
        tensors.append(tensor)
        at += size
    return tensors


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
