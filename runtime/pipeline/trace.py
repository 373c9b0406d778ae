"""A model as a graph of named layers: what profiles list, plans assign, and stages are cut from.

The model is traced by torch.fx. A module whose own forward cannot be traced is taken whole. Each
call of a module starts a layer, named like the module; functions in between (add, flatten) belong
to the layer before them. Layers are intervals of one topological order, so any cut is valid.
"""

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ...schema.errors import TargetError
from ..setup import check_model


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its name and its nodes, in order."""

    id: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class LayeredModel:
    """A traced model. ``arguments`` are its inputs; attribute nodes belong to no layer."""

    model: nn.Module
    arguments: tuple[fx.Node, ...]
    layers: tuple[Layer, ...]
    result: Any

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


class _Tracer(fx.Tracer):
    """Goes into a module unless an earlier attempt failed inside it."""

    def __init__(self, whole: set[str]) -> None:
        super().__init__()
        self.whole = whole
        self.inside: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.whole or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.inside.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        return result


def layers_of(model: nn.Module) -> LayeredModel:
    """Trace a model into layers.

    Raises:
        TargetError: The forward of the model itself cannot be traced; says why.
    """
    check_model(model)
    graph = _trace(model)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    output = next(node for node in graph.nodes if node.op == "output")
    if not nodes:
        raise TargetError(f"{type(model).__name__} computes nothing that could be cut into layers")
    return LayeredModel(
        model=model,
        arguments=tuple(node for node in graph.nodes if node.op == "placeholder"),
        layers=_group(nodes),
        result=output.args[0],
    )


def _trace(model: nn.Module) -> fx.Graph:
    whole: set[str] = set()
    while True:
        tracer = _Tracer(whole)
        try:
            graph = tracer.trace(model)
        except Exception as error:
            # Whatever a model's code raises on symbolic values: the innermost module stays whole.
            if not tracer.inside or tracer.inside[-1] in whole:
                raise TargetError(
                    f"the forward of {type(model).__name__} cannot be traced, so it cannot be cut: "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                    hint="keep control flow on tensor values inside submodules; they stay whole",
                ) from error
            whole.add(tracer.inside[-1])
            continue
        return graph


def _group(nodes: list[fx.Node]) -> tuple[Layer, ...]:
    groups: list[tuple[str, list[fx.Node]]] = []
    calls: dict[str, int] = {}
    for node in nodes:
        if node.op == "call_module" or not groups:
            name = str(node.target) if node.op == "call_module" else node.name
            calls[name] = calls.get(name, 0) + 1
            groups.append((name if calls[name] == 1 else f"{name}#{calls[name]}", []))
        groups[-1][1].append(node)
    return tuple(Layer(name, tuple(members)) for name, members in groups)
