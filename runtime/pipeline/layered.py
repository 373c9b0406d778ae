"""A model as named layers over a graph; which tracer made the graph does not matter.

Every stage computes the values itself that depend on the model's inputs alone. Masks, positions and
sizes are computed from the inputs, which every worker has, and are read by many layers. As outputs
of the first layer they would be sent across every cut. They must not depend on parameters, random
numbers, or tensors that are written to.

The arguments of a call go by the names that tracers give their inputs.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

_PREFIX: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_PLAIN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def by_placeholder(
    signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """The value that a call gives each input of a traced model, defaults included.

    torch.fx has one input for ``**extra``, and torch.export one for each of its entries: the result
    has both.
    """
    parameters = signature.parameters
    if not named and len(arguments) == len(parameters):
        if all(parameter.kind in _PLAIN for parameter in parameters.values()):
            return dict(zip(parameters, arguments, strict=True))
    bound = signature.bind(*arguments, **named)
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        found[_PREFIX.get(kind, "") + name] = value
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
    return found


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
    depend on the model's inputs alone (above).

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
