"""A model as named layers over a graph, however it was traced."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its name, its kind (a class or function), and its nodes, in order."""

    id: str
    op: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class LayeredModel:
    """A traced model. ``arguments`` are its inputs; attribute nodes belong to no layer.

    ``whole`` are modules with layers inside that had to be taken as one.
    """

    model: nn.Module
    arguments: tuple[fx.Node, ...]
    layers: tuple[Layer, ...]
    result: Any
    whole: tuple[str, ...] = ()

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Which layer feeds which, in order, each pair once."""
        owner = {node: layer.id for layer in self.layers for node in layer.nodes}
        found = {
            (owner[source], layer.id): None
            for layer in self.layers
            for node in layer.nodes
            for source in node.all_input_nodes
            if source in owner and owner[source] != layer.id
        }
        return tuple(found)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one layer: without modules inside, or torch's own, as torch.fx has it."""
    if next(module.children(), None) is None:
        return True
    return type(module).__module__.startswith("torch.nn") and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )


def numbered(names: Sequence[str]) -> list[str]:
    """Names made unique: the second call of a module is ``name#2``."""
    calls: dict[str, int] = {}
    found = []
    for name in names:
        calls[name] = calls.get(name, 0) + 1
        found.append(name if calls[name] == 1 else f"{name}#{calls[name]}")
    return found
