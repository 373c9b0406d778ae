"""A model as a graph of named layers, which profiles list, plans assign and stages are cut from.

torch.fx traces the model. A module whose own forward cannot be traced is taken as one layer. Each
call of a module starts a layer, named like the module; functions in between (add, flatten) belong
to the layer before them. Layers are intervals of one topological order, so any cut is valid.
Where a profile found its layers by torch.export, so does this module (exported.py).
"""

from functools import partial, reduce
from typing import Any

import torch
from torch import fx, nn

from ...schema.errors import TargetError
from ...schema.layer_trace import LayerTrace
from ..setup import check_model
from .exported import exported_layers
from .layered import Layer, LayeredModel, numbered, writes
from .shared import of_inputs


class _Tracer(fx.Tracer):
    """Traces into a module, unless an earlier attempt failed inside it."""

    # Else code of a forward that uses buffers only (counting its calls) would run during the trace.
    proxy_buffer_attributes = True

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


def layers_of(model: nn.Module, trace: LayerTrace | None = None) -> LayeredModel:
    """Trace a model into layers, in the way that a profile did.

    Raises:
        TargetError: The forward of the model itself cannot be traced; says why.
    """
    check_model(model)
    if trace is not None and trace.way == "export":
        first = next(model.parameters(), None)
        device = None if first is None else first.device
        inputs = {
            entry.name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
            for entry in trace.inputs
        }
        return exported_layers(model, inputs, trace.constants or {})
    graph, whole = _trace(model)
    shared = of_inputs(graph, partial(_attribute, model))
    outside = ("placeholder", "get_attr", "output")
    nodes = [node for node in graph.nodes if node.op not in outside and node not in shared]
    output = next(node for node in graph.nodes if node.op == "output")
    if not nodes:
        raise TargetError(f"{type(model).__name__} computes nothing that could be cut into layers")
    layers = _group(model, nodes)
    _check_written(model, layers)
    return LayeredModel(
        model=model,
        arguments=tuple(node for node in graph.nodes if node.op == "placeholder"),
        layers=layers,
        result=output.args[0],
        shared=tuple(node for node in graph.nodes if node in shared),
        whole=tuple(sorted(whole)),
    )


def _attribute(model: nn.Module, name: str) -> Any:
    return reduce(getattr, name.split("."), model)


def _trace(model: nn.Module) -> tuple[fx.Graph, set[str]]:
    whole: set[str] = set()
    while True:
        tracer = _Tracer(whole)
        try:
            graph = tracer.trace(model)
        except Exception as error:
            # Any error of a model's code on symbolic values: keep the innermost module whole.
            if not tracer.inside or tracer.inside[-1] in whole:
                raise TargetError(
                    f"the forward of {type(model).__name__} cannot be traced, so it cannot be cut: "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                    hint="keep control flow on tensor values inside submodules; they stay whole",
                ) from error
            whole.add(tracer.inside[-1])
            continue
        return graph, whole


def _group(model: nn.Module, nodes: list[fx.Node]) -> tuple[Layer, ...]:
    groups: list[list[fx.Node]] = []
    for node in nodes:
        if node.op == "call_module" or not groups:
            groups.append([])
        groups[-1].append(node)
    if len(groups) > 1 and _feeds_nothing(groups[0]):
        groups[:2] = [groups[0] + groups[1]]
    heads = [next((n for n in group if n.op == "call_module"), group[0]) for group in groups]
    names = numbered([str(h.target) if h.op == "call_module" else h.name for h in heads])
    return tuple(
        Layer(name, _operation(model, head), tuple(members))
        for name, head, members in zip(names, heads, groups, strict=True)
    )


def _feeds_nothing(group: list[fx.Node]) -> bool:
    """Whether functions before the first module feed none after it (they count calls, say)."""
    return all(user in group for node in group for user in node.users)


def _check_written(model: nn.Module, layers: tuple[Layer, ...]) -> None:
    """Refuse a written buffer that several layers use: other stages would not see it change.

    Raises:
        TargetError: Names the buffer.
    """
    layer_of = {node: layer.id for layer in layers for node in layer.nodes}
    for node in layer_of:
        root = node.args[0] if writes(node) and node.args else None
        while isinstance(root, fx.Node) and root.op in ("call_method", "call_function"):
            root = root.args[0] if root.args else None  # the written tensor may be a view of it
        if not isinstance(root, fx.Node) or root.op != "get_attr":
            continue
        if len({layer_of[user] for user in root.users if user in layer_of}) > 1:
            raise TargetError(
                f"the forward of {type(model).__name__} writes buffer {str(root.target)!r} in one "
                "layer and reads it in another, which may be on another device"
            )


def _operation(model: nn.Module, node: fx.Node) -> str:
    """The class name of a layer's module, or the name of its first function."""
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))
