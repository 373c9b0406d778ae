"""Split a model's answer into a list of tensors and its form, so that the tensors can be sent.

torch.export returns containers that pytree knows. Models also return dataclasses, mappings of
their own, and objects that no training step reads (transformers' cache of keys and values). Such
objects are left out, and a script that uses one gets an error that says so.

An answer that goes to another worker is sent as plain values; a class goes by its name.
"""

import copy
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ...schema.errors import TargetError

_TRACED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
Rebuild = Callable[[Iterator[Any]], Any]


class LeftOut:
    """Replaces, in an answer, an object that stages cannot send."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        """Refuse any use of the object.

        Raises:
            TargetError: Always.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise TargetError(
            f"the model's answer holds a {self._kind}, which a pipeline leaves out",
            hint="let the model answer with tensors (transformers: use_cache=False)",
        )


def taken_apart(answer: Any) -> tuple[list[Any], Rebuild]:
    """Split an answer into its tensors and a function that rebuilds its form.

    Returns:
        The tensors (while a model is traced, also its symbolic numbers), and a function. It takes
        an iterator of as many tensors and returns an answer of the same form.
    """
    leaves, spec = _pytree.tree_flatten(answer)
    tensors: list[Any] = []
    makers: list[Rebuild] = []
    for leaf in leaves:
        inside, make = _leaf(leaf)
        tensors += inside
        makers.append(make)
    return tensors, lambda given: _pytree.tree_unflatten([make(given) for make in makers], spec)


def _leaf(value: Any) -> tuple[list[Any], Rebuild]:
    if isinstance(value, _TRACED):
        return [value], next
    if value is None or isinstance(value, _PLAIN):
        return [], lambda given: value
    if isinstance(value, Mapping):
        return _entries(dict(value), copy.copy(value), operator.setitem)
    if is_dataclass(value):
        found = {field.name: getattr(value, field.name, None) for field in fields(value)}
        # Bypasses a frozen dataclass, which is safe: nothing else refers to the copy yet.
        return _entries(found, copy.copy(value), object.__setattr__)
    left_out = LeftOut(type(value).__name__)
    return [], lambda given: left_out


def _entries(
    found: dict[Any, Any], empty: Any, put: Callable[[Any, Any, Any], None]
) -> tuple[list[Any], Rebuild]:
    tensors: list[Any] = []
    makers: dict[Any, Rebuild] = {}
    for key, value in found.items():
        inside, makers[key] = taken_apart(value)
        tensors += inside
        put(empty, key, None)  # it must not keep traced values alive

    def make(given: Iterator[Any]) -> Any:
        made = copy.copy(empty)
        for key, maker in makers.items():
            put(made, key, maker(given))
        return made

    return tensors, make


def portable(answer: Any) -> Any:
    """An answer as nested plain values and tensors, each with its kind; see ``made_again``."""
    if answer is None or isinstance(answer, Tensor | bool | int | float | complex | str):
        return ["value", answer]
    kind = type(answer)
    name = [kind.__module__, kind.__qualname__]
    if isinstance(answer, tuple) and hasattr(answer, "_fields"):
        return ["named", name, [portable(entry) for entry in answer]]
    if isinstance(answer, list | tuple):
        plain = "list" if isinstance(answer, list) else "tuple"
        return [plain, [portable(entry) for entry in answer]]
    if isinstance(answer, Mapping):
        pairs = [[key, portable(entry)] for key, entry in answer.items()]
        return ["dict", pairs] if kind is dict else ["mapping", name, pairs]
    if is_dataclass(answer):
        found = [(field.name, getattr(answer, field.name, None)) for field in fields(answer)]
        return ["fields", name, [[key, portable(entry)] for key, entry in found]]
    return ["left out", kind.__name__]


def made_again(form: Any) -> Any:
    """The answer of which ``portable`` made these values; what it left out refuses any use."""
    kind, *rest = form
    if kind == "value":
        return rest[0]
    if kind in ("list", "tuple"):
        entries = [made_again(entry) for entry in rest[0]]
        return entries if kind == "list" else tuple(entries)
    if kind == "dict":
        return {key: made_again(entry) for key, entry in rest[0]}
    if kind == "left out":
        return LeftOut(rest[0])
    module, name = rest[0]  # of a class that this process has loaded too: it runs the same script
    made_by: Any = reduce(getattr, name.split("."), sys.modules[module])
    if kind == "named":
        return made_by(*(made_again(entry) for entry in rest[1]))
    made = made_by.__new__(made_by)
    for key, entry in rest[1]:
        if kind == "mapping":
            made[key] = made_again(entry)
        else:
            object.__setattr__(made, key, made_again(entry))
    return made
