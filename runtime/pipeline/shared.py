"""The values that every stage computes itself: those that depend on the model's inputs alone.

Masks, positions and sizes are computed from the inputs, which every worker has, and are read by
many layers. As outputs of the first layer they would be sent across every cut. They must not depend
on parameters, random numbers, or tensors that are written to.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

Attribute = Callable[[str], Any]

_ASK_SIZES = ("size", "dim", "numel", "ndimension")
_SIZES = ("shape", "ndim", "dtype", "device")
# Methods of numbers and tuples; in-place ones are left out.
_ARITHMETIC = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.neg, operator.pow, operator.getitem, operator.eq, operator.ne, operator.lt,
    operator.le, operator.gt, operator.ge,
)  # fmt: skip


def of_inputs(graph: fx.Graph, attribute: Attribute) -> frozenset[fx.Node]:
    """The nodes of a graph that each stage may compute from the model's inputs.

    Args:
        graph: A graph of torch.export; or of torch.fx, where only sizes are found, because other
            effects of its functions are unknown.
        attribute: Looks up the object that a node names.
    """
    given: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            given.add(node)
        elif node.op == "get_attr":
            if not isinstance(attribute(str(node.target)), nn.Parameter):
                given.add(node)
        elif node.op in ("call_function", "call_method") and _is_pure(node, attribute):
            enough = found if node.target in _ARITHMETIC else found | given
            if all(source in enough for source in node.all_input_nodes):
                found.add(node)
    return frozenset(found - _behind_writes(graph, attribute))


def _is_pure(node: fx.Node, attribute: Attribute) -> bool:
    """Whether a node gives the same value each time and has no other effect."""
    target = node.target
    if isinstance(target, str):
        return node.op == "call_method" and target in _ASK_SIZES
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags and not _writes(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _is_pure_region(node, attribute)
    if target is getattr:
        return node.args[1] in _SIZES
    return target in _ARITHMETIC or _is_symbolic(target)


def _is_symbolic(target: Any) -> bool:
    is_torch = getattr(target, "__module__", "") == torch.__name__
    return is_torch and target.__name__.startswith("sym_")


def _is_pure_region(node: fx.Node, attribute: Attribute) -> bool:
    """Whether a region such as ``with torch.no_grad()`` is pure: its own graph decides."""
    named = [attribute(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    graphs = [module.graph for module in named if isinstance(module, fx.GraphModule)]
    return bool(graphs) and all(
        inside.op in ("placeholder", "output") or _is_pure(inside, attribute)
        for graph in graphs
        for inside in graph.nodes
    )


def _writes(target: torch._ops.OpOverload) -> bool:
    return bool(target._schema.is_mutable)


def _behind_writes(graph: fx.Graph, attribute: Attribute) -> set[fx.Node]:
    """All nodes from which a written tensor was made: the tensor may be a view of any of them."""
    waiting = [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and (
            _writes(node.target)
            if isinstance(node.target, torch._ops.OpOverload)
            else isinstance(node.target, torch._ops.HigherOrderOperator)
            and not _is_pure_region(node, attribute)
        )
    ]
    found: set[fx.Node] = set(waiting)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found
