"""Send tensors piece by piece, so that no device needs memory for a whole one."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from .. import peers

PIECE_BYTES = 25 << 20
"""Bytes of the largest piece, which a device needs for tensors that it does not hold."""


def broadcast(tensor: Tensor, wire: torch.device, *, src: int, sends: bool, keeps: bool) -> None:
    """Send one worker's values to all workers. Call it on all of them.

    Args:
        tensor: On any device; written to on workers that keep the values.
        wire: Device that the collectives' backend sends from.
        src: The rank that has the values.
        sends: Whether this worker is that rank.
        keeps: Whether this worker wants the values.
    """
    dense = tensor.contiguous() if sends or keeps else None
    length = max(1, PIECE_BYTES // tensor.element_size())
    for start in range(0, tensor.numel(), length):
        number = min(length, tensor.numel() - start)
        if dense is None:
            passing = torch.empty(number, dtype=tensor.dtype, device=wire)
            peers.broadcast(passing, src=src)
            continue
        piece = dense.view(-1)[start : start + number]
        passing = piece.to(wire)
        peers.broadcast(passing, src=src)
        if not sends and passing is not piece:
            piece.copy_(passing)
    if not sends and dense is not None and dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def stream(
    tensor: Tensor | None, dtype: torch.dtype, shape: Sequence[int], wire: torch.device, *, src: int
) -> Iterator[Tensor]:
    """Send one worker's values to all workers, piece by piece. Iterate to the end on all of them.

    Args:
        tensor: The values, on any device; None on the other workers.
        dtype: The values' dtype.
        shape: The tensor's shape.
        wire: Device that the collectives' backend sends from.
        src: The rank that has the values.

    Yields:
        Flat pieces, in order.
    """
    flat = None if tensor is None else tensor.detach().contiguous().view(-1)
    length = max(1, PIECE_BYTES // dtype.itemsize)
    for start in range(0, prod(shape), length):
        number = min(length, prod(shape) - start)
        if flat is None:
            passing = torch.empty(number, dtype=dtype, device=wire)
        else:
            passing = flat[start : start + number].to(wire)
        peers.broadcast(passing, src=src)
        yield passing


def in_buckets(
    names: Sequence[str], bytes_of: Callable[[str], int], most_bytes: int
) -> Iterator[list[str]]:
    """Yield runs of tensors that one collective takes together.

    Args:
        names: The tensors, in order.
        bytes_of: Gives a tensor's bytes by its name.
        most_bytes: Limit of a run; a tensor that is larger is a run of its own.
    """
    bucket: list[str] = []
    filled = 0
    for name in names:
        size = bytes_of(name)
        if bucket and filled + size > most_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket
