"""Tensors inside what a module takes or gives, nested in containers; digests of named tensors."""

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Which memory tensors lie in.


def storage_key(tensor: Any) -> int:
    """A number of the memory that a tensor lies in, equal for its views while that is alive."""
    key: int = tensor.untyped_storage()._cdata
    return key


def zeros_for(tensors: Collection[Tensor], device: torch.device) -> list[Tensor]:
    """[tensors] a zero [1] of each one's dtype: a block a dtype, as allocators round blocks up."""
    numbers = Counter(tensor.dtype for tensor in tensors)
    zeros = {
        dtype: iter(torch.split(torch.zeros(number, dtype=dtype, device=device), 1))
        for dtype, number in numbers.items()
    }
    return [next(zeros[tensor.dtype]) for tensor in tensors]


def tensors_in(value: Any) -> list[Any]:
    """The tensors of a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, tuple | list):
        inside = list(value)
    else:
        inside = [getattr(value, name, None) for name in _names(value)]
    return [tensor for entry in inside for tensor in tensors_in(entry)]


def plain(values: Iterable[float | Tensor]) -> list[float]:
    """Numbers, of which some may be tensors [] on a device: their host waits for it once."""
    found = list(values)
    there = {at: value for at, value in enumerate(found) if isinstance(value, Tensor)}
    if len({value.device for value in there.values()}) == 1:
        row = torch.stack([value.detach().double().reshape(()) for value in there.values()])
        there = dict(zip(there, row.tolist(), strict=True))
    return [float(there.get(at, value)) for at, value in enumerate(found)]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A value of the same form, with what a function makes of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if not tensors_in(value):
        return value
    if isinstance(value, tuple | list):
        entries = [mapped(function, entry) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    made: Any = copy.copy(value)
    if isinstance(value, Mapping):
        # Those of transformers are dataclasses as well, and keep both in step by themselves.
        for key, entry in value.items():
            made[key] = mapped(function, entry)
        return made
    for name in _names(value):
        # A frozen one, too: this copy is nobody else's yet.
        object.__setattr__(made, name, mapped(function, getattr(value, name, None)))
    return made


def _names(value: Any) -> list[str]:
    is_one = is_dataclass(value) and not isinstance(value, type)
    return [field.name for field in fields(value)] if is_one else []


# A digest is equal for two runs if, and only if, they ended with the same bits.


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
