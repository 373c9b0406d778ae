"""Tensors inside what a module takes or gives: tuples, lists, dicts and dataclasses, nested."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

# Which memory tensors lie in.


def storage_key(tensor: Any) -> int:
    """A number of the memory that a tensor lies in, equal for its views while that is alive."""
    key: int = tensor.untyped_storage()._cdata
    return key


def tensors_in(value: Any) -> list[Any]:
    """The tensors of a nested value, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, tuple | list):
        inside = list(value)
    else:
        inside = [getattr(value, name, None) for name in _names(value)]
    return [tensor for entry in inside for tensor in tensors_in(entry)]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A value of the same form, with what a function makes of each tensor."""
    import torch

    if isinstance(value, torch.Tensor):
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
