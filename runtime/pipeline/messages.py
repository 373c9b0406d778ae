"""The values of a message between stages, and their layout in memory."""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...schema.errors import TargetError

Value = Tensor | int | float | bool | None | tuple[Any, ...]
Message = tuple[tuple[Value, ...], tuple[bool, ...]]
"""Values, and for each whether a gradient must be sent back."""

ALIGNMENT = 64  # bytes; of every tensor in a payload, as torch's own allocator gives


class _Part(NamedTuple):
    """One value of a message: where a tensor's bytes are in the payload, or the value itself."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    wants: bool
    start: int
    end: int
    value: Value = None


class Layout:
    """Where the values of a message are in its payload, and which of them want a gradient."""

    def __init__(self, parts: tuple[_Part, ...]) -> None:
        self.parts = parts
        self.num_bytes = max((part.end for part in parts), default=0)
        self.wants = tuple(part.wants for part in parts)

    @classmethod
    def of(cls, key: tuple[Any, ...]) -> "Layout":
        """The layout of values with this key (``key_of``)."""
        parts, start = [], 0
        for entry in key:
            if len(entry) == 1:
                parts.append(_Part(None, (), False, 0, 0, _tuples(json.loads(entry[0]))))
                continue
            dtype, shape, wants = entry
            end = start + torch.Size(shape).numel() * dtype.itemsize
            parts.append(_Part(dtype, tuple(shape), wants, start, end))
            start = -(-end // ALIGNMENT) * ALIGNMENT
        return cls(tuple(parts))

    def places(self, payload: Tensor) -> tuple[Value, ...]:
        """A view of each tensor in a payload; other values as they are."""
        return tuple(
            part.value
            if part.dtype is None
            else payload[part.start : part.end].view(part.dtype).view(part.shape)
            for part in self.parts
        )


def write(values: tuple[Value, ...], places: tuple[Value, ...]) -> None:
    """Copy the tensors of a message into its payload (``places`` from ``Layout.places``)."""
    for value, place in zip(values, places, strict=True):
        if isinstance(place, Tensor):
            assert isinstance(value, Tensor)
            place.copy_(value.detach())


def key_of(values: tuple[Value, ...]) -> tuple[Any, ...]:
    """The key of a message's layout: equal keys have equal layouts.

    Raises:
        TargetError: A value is no tensor, number or tuple of numbers.
    """
    return tuple(
        (value.dtype, value.shape, value.requires_grad)
        if isinstance(value, Tensor)
        else (json.dumps(_plain(value)),)
        for value in values
    )


def describe(key: tuple[Any, ...]) -> bytes:
    """Write a key as text that ``undescribe`` reads; nothing is pickled."""
    entries = [
        entry if len(entry) == 1 else [str(entry[0])[6:], list(entry[1]), entry[2]] for entry in key
    ]
    return json.dumps(entries).encode()


def undescribe(text: bytes) -> tuple[Any, ...]:
    """Read the key that ``describe`` wrote."""
    return tuple(
        (entry[0],) if len(entry) == 1 else (getattr(torch, entry[0]), tuple(entry[1]), entry[2])
        for entry in json.loads(text)
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    raise TargetError(
        f"the model cannot be cut here: a {type(value).__name__} would cross between two stages",
        hint="only tensors and numbers can; move the cut",
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value
