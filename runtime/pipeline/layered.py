"""A model as named layers over a graph; which tracer made the graph does not matter."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from torch import fx, nn


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its name, its kind (a class or a function), and its nodes in order."""

    id: str
    op: str
    nodes: tuple[fx.Node, ...]


def _any_call(arguments: Mapping[str, Any]) -> None:
    """Accept every call: a graph of torch.fx is valid for all calls that torch.fx can trace."""


def as_it_is(result: Any) -> Any:
    """Return the result: for graphs that end with the answer itself."""
    return result


@dataclass(frozen=True, slots=True)
class LayeredModel:
    """A traced model.

    Nodes of no layer are computed by every stage that needs them: attributes, and values that
    depend on the model's inputs alone (shared.py).

    Args:
        model: The model itself; its modules, parameters and buffers are found in it by name.
        arguments: The graph's input nodes.
        layers: The layers, in an order in which any cut is valid.
        result: The value with which the graph ends.
        shared: Nodes that depend on the inputs alone, in order.
        whole: Names of modules with layers inside that had to be taken as one layer.
        constants: Values that the graph reads and the model does not have, by name.
        answer: Makes the model's answer from ``result``.
        check_call: Refuses a call, given by argument names, for which the graph is not valid.
    """

    model: nn.Module
    arguments: tuple[fx.Node, ...]
    layers: tuple[Layer, ...]
    result: Any
    shared: tuple[fx.Node, ...] = ()
    whole: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    answer: Callable[[Any], Any] = as_it_is
    check_call: Callable[[Mapping[str, Any]], None] = _any_call

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs of layers of which the first feeds the second, in order, each pair once."""
        owner = {node: layer.id for layer in self.layers for node in layer.nodes}
        found = {
            (owner[source], layer.id): None
            for layer in self.layers
            for node in layer.nodes
            for source in node.all_input_nodes
            if source in owner and owner[source] != layer.id
        }
        return tuple(found)

    def attribute(self, name: str) -> Any:
        """The module, parameter, buffer or constant that a node of the graph names."""
        if name in self.constants:
            return self.constants[name]
        return reduce(getattr, name.split("."), self.model)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one layer, as torch.fx defines it: no modules inside, or torch's own."""
    if next(module.children(), None) is None:
        return True
    return type(module).__module__.startswith("torch.nn") and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )


def numbered(names: Sequence[str]) -> list[str]:
    """Make names unique: the second call of a module is ``name#2``."""
    calls: dict[str, int] = {}
    found = []
    for name in names:
        calls[name] = calls.get(name, 0) + 1
        found.append(name if calls[name] == 1 else f"{name}#{calls[name]}")
    return found


def writes(node: fx.Node) -> bool:
    """Whether a node's function or method writes to its input."""
    if node.op not in ("call_method", "call_function"):
        return False
    if node.target is operator.setitem:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.split(".")[0]
    trailing = name.endswith("_") and not name.endswith("__")
    return trailing or node.kwargs.get("inplace") is True
