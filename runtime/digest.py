"""A digest that is equal for two runs if, and only if, they ended with the same bits."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Tensors as raw bytes.


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a flat uint8 tensor; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class InPieces(NamedTuple):
    """A tensor whose values come in pieces, in order, each on any device."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hexadecimal) over names, dtypes, shapes and bytes, in order of names."""
    return digest_of_pieces(
        InPieces(name, tensors[name].dtype, tuple(tensors[name].shape), [tensors[name]])
        for name in sorted(tensors)
    )


def digest_of_pieces(tensors: Iterable[InPieces]) -> str:
    """``digest_of`` for tensors given in order of names; one piece is in memory at a time."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        for piece in tensor.pieces:
            digest.update(byte_view(piece.cpu()).numpy().data)  # copies no host memory
    return digest.hexdigest()
