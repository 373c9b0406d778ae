"""Cut a layered model into the modules of its stages, at the layers that a plan names.

``holdings`` says what each worker of a tensor-parallel group holds of a value. A column-parallel
layer makes shares, a row-parallel layer takes them (thesis 4.2.3). What is computed from a share in
between is a share too. With sequence parallelism a row-parallel layer makes tokens, and a norm
gathers them (tensor/regions.py).
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ...schema.errors import TargetError
from ...schema.options import option
from ..tensor.regions import spreads_tokens
from ..tensor.roles import SharedParts
from .channels import Holding, Holdings

# A model as named layers over a graph; which tracer made the graph does not matter.
#
# Every stage computes the values itself that depend on the model's inputs alone. Masks, positions
# and sizes are computed from the inputs, which every worker has, and are read by many layers. As
# outputs of the first layer they would be sent across every cut. They must not depend on
# parameters, random numbers, or tensors that are written to.
#
# The arguments of a call go by the names that tracers give their inputs.

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
            # Python's operators may be of tensors too, in graphs of torch.fx. Of what was found
            # there they are of sizes.
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
    is_torch = getattr(target, "__module__", "") == torch.__name__
    return target in _ARITHMETIC or is_torch and target.__name__.startswith("sym_")


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


def any_call(arguments: Mapping[str, Any]) -> None:
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
    check_call: Callable[[Mapping[str, Any]], None] = any_call

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
        return operator.attrgetter(name)(self.model)


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


_NEW_FROM_MODULES = (nn.Linear, _ConvNd, _NormBase, nn.LayerNorm, nn.Embedding)
_NEW_FROM_FUNCTIONS = frozenset(
    "add addmm batch_norm convolution conv2d embedding layer_norm linear matmul mm mul".split()
)


def may_be_written(node: fx.Node) -> bool:
    """Whether some function or layer may write to a value of a graph, or to a view of it."""
    modules = node.graph.owning_module
    assert modules is not None
    found, known = [node], {node}
    while found:
        for user in found.pop().users:
            module = modules.get_submodule(str(user.target)) if user.op == "call_module" else None
            inside = () if module is None else module.modules()
            if writes(user) or any(getattr(each, "inplace", False) for each in inside):
                return True
            name = getattr(user.target, "__name__", str(user.target)).split(".")[0]
            is_new = user.op == "output" or isinstance(module, _NEW_FROM_MODULES)
            is_new |= module is None and name in _NEW_FROM_FUNCTIONS
            # What is not known to be new may be the value itself, as from an Identity.
            if not is_new and user not in known:
                found.append(user)
                known.add(user)
    return False


BufferPlace = tuple[nn.Module, str]
"""A module, and the name of one of its buffers."""


@dataclass(frozen=True, slots=True)
class StageModule:
    """One stage's part of the model.

    Call it with the model's own arguments that are in ``arguments``, then with the values of
    earlier stages that are in ``inputs``. It returns the values in ``outputs``: all that later
    stages need, including those that only pass through.

    Attributes:
        module: The module that computes the stage.
        arguments: Names of the model's arguments that it takes.
        inputs: Names of the values of earlier stages that it takes.
        outputs: Names of the values that it returns.
        answer: Makes the model's answer from the last stage's values.
        buffers: Buffers of the model that the graph reads by name: (place in ``module``, place in
            the model) of each; see ``refresh_buffers``.
    """

    module: "fx.GraphModule | WholeModel"
    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    answer: Callable[[Any], Any]
    buffers: tuple[tuple[BufferPlace, BufferPlace], ...] = ()

    def __call__(self, *values: Any) -> Any:
        """Run the stage: returns its outputs, or for the last stage the model's answer."""
        self.refresh_buffers()
        return self.answer(self.module(*values))

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """The nodes of its graph; empty for a whole model, which is not traced."""
        return () if isinstance(self.module, WholeModel) else tuple(self.module.graph.nodes)

    def refresh_buffers(self) -> None:
        """Take the buffers that are in the model now: each virtual node has its own."""
        for (holder, name), (owner, own_name) in self.buffers:
            holder._buffers[name] = owner._buffers[own_name]


CALL = "the call"
"""The argument that gives a whole model its call, as (arguments, named arguments)."""


class WholeModel(nn.Module):
    """The only stage of a model, which runs without a graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward = model.forward  # while the model trains, its ``forward`` is replaced

    def forward(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Call the model as the script did."""
        arguments, named = call
        return self._forward(*arguments, **named)


def whole(model: nn.Module) -> StageModule:
    """The stage of a model that is one stage, without tracing it."""
    return StageModule(
        module=WholeModel(model), arguments=(CALL,), inputs=(), outputs=(), answer=as_it_is
    )


def cut(layered: LayeredModel, stages: Sequence[Sequence[str]]) -> list[StageModule]:
    """Cut a model into one module per stage; they share the model's submodules and parameters.

    Raises:
        TargetError: The plan names other layers than the model has, or a tensor would flow to an
            earlier stage; says which.
    """
    stage_of = _assign(layered, stages)
    last = len(stages) - 1
    needed_until: dict[fx.Node, int] = {}
    for node, stage in stage_of.items():
        for source in node.all_input_nodes:
            if source in stage_of:
                if stage_of[source] > stage:
                    raise TargetError(
                        f"the model cannot be cut like this: tensor {source.name!r} of stage "
                        f"{stage_of[source]} is needed by stage {stage} before it",
                        hint="give the plan stages in the order of the model",
                    )
                needed_until[source] = max(needed_until.get(source, 0), stage)
    for source in _nodes_in(layered.result):
        needed_until[source] = last
    crossing = [
        [n for n in stage_of if stage_of[n] <= stage < needed_until.get(n, -1)]
        for stage in range(last)
    ]
    inputs = [[], *crossing]
    outputs = [*crossing, []]
    return [
        _build(
            layered,
            [node for node in stage_of if stage_of[node] == stage],
            inputs[stage],
            layered.result if stage == last else tuple(outputs[stage]),
            tuple(node.name for node in outputs[stage]),
        )
        for stage in range(last + 1)
    ]


def like(layered: LayeredModel, stages: Sequence[Sequence[str]]) -> list[list[str]]:
    """The stages of a model that was traced again, in another mode, cut at the same layers.

    A layer that the mode does not have is left out; one that the plan does not have joins the
    layer before it.
    """
    planned = {name: number for number, names in enumerate(stages) for name in names}
    found: list[list[str]] = [[] for _ in stages]
    number = 0
    for layer in layered.layers:
        number = planned.get(layer.id, number)
        found[number].append(layer.id)
    return found


def check_crossing(part: StageModule, values: Sequence[Any], stage: int) -> None:
    """Refuse values that cannot be sent from a stage to the next."""
    for name, value in zip(part.outputs, values, strict=True):
        if not _can_cross(value):
            raise TargetError(
                f"the model cannot be cut like this: {name!r}, which crosses from stage {stage} to "
                f"stage {stage + 1}, is a {type(value).__name__}",
                hint="only tensors and numbers can cross; solve for another cut",
            )


def _can_cross(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_can_cross(entry) and not isinstance(entry, Tensor) for entry in value)
    return value is None or isinstance(value, Tensor | bool | int | float)


def _assign(layered: LayeredModel, stages: Sequence[Sequence[str]]) -> dict[fx.Node, int]:
    planned = {name: number for number, names in enumerate(stages) for name in names}
    known = {layer.id for layer in layered.layers}
    missing, strange = sorted(known - set(planned)), sorted(set(planned) - known)
    if missing or strange:
        said = f"has no layer {strange[0]!r}" if strange else f"has a layer {missing[0]!r} more"
        raise TargetError(
            f"the plan is for another model: this one {said}",
            hint=f"profile this model with {option('layers', True)} and solve again",
        )
    return {node: planned[layer.id] for layer in layered.layers for node in layer.nodes}


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def _build(
    layered: LayeredModel,
    nodes: list[fx.Node],
    inputs: list[fx.Node],
    result: Any,
    output_names: tuple[str, ...],
) -> StageModule:
    is_last = result is layered.result
    used = {source for node in nodes for source in node.all_input_nodes}
    used.update(_nodes_in(result) if is_last else ())
    # From the last to the first: what a shared node reads is needed too.
    for node in reversed(layered.shared):
        if node in used:
            used.update(node.all_input_nodes)
    arguments = [node for node in layered.arguments if node in used]
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in (*arguments, *inputs):
        made[node] = graph.placeholder(node.name)

    def of(node: fx.Node) -> fx.Node:
        if node not in made and node.op == "get_attr":
            made[node] = graph.node_copy(node)
        return made[node]

    for node in (*(node for node in layered.shared if node in used), *nodes):
        made[node] = graph.node_copy(node, of)
    graph.output(fx.node.map_arg(result, of))
    named = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    module = fx.GraphModule({name: layered.attribute(name) for name in named}, graph)
    return StageModule(
        module=module,
        arguments=tuple(str(node.target) for node in arguments),
        inputs=tuple(node.name for node in inputs),
        outputs=output_names,
        answer=layered.answer if is_last else as_it_is,
        buffers=_buffers(layered.model, module, named),
    )


def _buffers(
    model: nn.Module, module: fx.GraphModule, named: list[str]
) -> tuple[tuple[BufferPlace, BufferPlace], ...]:
    """The places of buffers that the graph reads by name, outside of modules that it calls."""
    places = []
    owners = dict(model.named_modules(remove_duplicate=False))
    for name in named:
        parent, _, own = name.rpartition(".")
        owner = owners.get(parent)
        if owner is None or own not in owner._buffers:
            continue
        holder = module.get_submodule(parent)
        if holder is not owner:
            places.append(((holder, own), (owner, own)))
    return tuple(places)


# The nodes of a stage that read the weights of a repeated layer, between whose ends they are whole.

Span = tuple[int, int]
"""Places of the first and the last node in the graph."""


def spans_of(module: fx.GraphModule, homes: Mapping[int, str]) -> dict[str, Span]:
    """Layer -> its span in a graph, in order.

    Layers whose spans meet are left out: a leaf of the graph may hold several.

    ``homes`` is by the id of a parameter, and empty for those in no layer.
    """
    found: dict[str, Span] = {}
    for place, node in enumerate(module.graph.nodes):
        named = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        read = [operator.attrgetter(name)(module) for name in named]
        if node.op == "call_module":
            read += module.get_submodule(str(node.target)).parameters()
        for name in {homes.get(id(value), "") for value in read} - {""}:
            found[name] = (found.get(name, (place, place))[0], place)
    spans = sorted(found.items(), key=lambda pair: pair[1])
    return {
        name: (first, last)
        for name, (first, last) in spans
        if all(other == name or end < first or last < begin for other, (begin, end) in spans)
    }


class _Call(nn.Module):
    """A function as a module, which a graph can call."""

    def __init__(self, function: Callable[[tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *values: Any) -> Any:
        """Call it with values."""
        return self._function(values)


def bracket(
    module: fx.GraphModule,
    spans: Mapping[str, Span],
    before: Callable[[str, tuple[Any, ...]], tuple[Any, ...]],
    after: Callable[[str, Any], Any],
) -> None:
    """Call functions before and after spans of a graph.

    Args:
        module: A stage's; changed in place.
        spans: By name; none meets another.
        before: Called with a name and the values that the span reads; gives what it reads instead.
        after: Called with a name and the values of the span that others read.
    """
    graph, nodes = module.graph, list(module.graph.nodes)
    for number, (name, (first, last)) in enumerate(spans.items()):
        inside = dict.fromkeys(nodes[first : last + 1])
        given = dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in inside)
        enters = [node for node in given if node.op != "get_attr"]
        leaves = [
            node for node in inside if node.op != "get_attr" and {*node.users} - inside.keys()
        ]
        module.add_submodule(f"_before_{number}", _Call(partial(before, name)))
        module.add_submodule(f"_after_{number}", _Call(partial(after, name)))
        with graph.inserting_before(nodes[first]):
            made = graph.call_module(f"_before_{number}", tuple(enters))
            for place, node in enumerate(enters):
                value = graph.call_function(operator.getitem, (made, place))
                for user in inside:
                    user.replace_input_with(node, value)
        with graph.inserting_after(nodes[last]):
            graph.call_module(f"_after_{number}", tuple(leaves))
    module.recompile()


def holdings_of(
    parts: Sequence[StageModule], sharing: SharedParts, *, sequence_parallel: bool = False
) -> list[Holdings]:
    """[stages] what each worker holds of a stage's outputs.

    Raises:
        TargetError: A stage begins between a column- and a row-parallel layer and has dropout
            before the second.
    """
    found: list[Holdings] = []
    held: dict[str, Holding] = {}
    for number, stage in enumerate(parts):
        is_before_layers = any(held[name] is Holding.OWN for name in stage.inputs)
        here = {name: held[name] for name in stage.inputs}
        for node in stage.nodes:
            if node.op == "placeholder":
                continue
            role = sharing.roles.get(str(node.target)) if node.op == "call_module" else None
            if role is not None and role.style != "inner":
                is_before_layers = False
            here[node.name] = _holding(node, sharing, here, sequence_parallel)
            if is_before_layers and here[node.name] is Holding.OWN and _drops(stage, node):
                raise TargetError(
                    f"stage {number} begins between a column and a row layer, and "
                    f"{node.name} drops activations there, of which each worker has a share",
                    hint="move the cut, set this dropout to 0, or plan with degree 1",
                )
        held |= here
        flags = tuple(here.get(name, Holding.WHOLE) for name in stage.outputs)
        found.append(flags if any(flags) else ())
    return found


def _holding(
    node: fx.Node, sharing: SharedParts, here: dict[str, Holding], sequence_parallel: bool
) -> Holding:
    """What each worker holds of a node's value; ``here`` is the same of the nodes before it."""
    name = str(node.target) if node.op == "call_module" else ""
    role = sharing.roles.get(name)
    if role is not None and role.style != "inner":
        if role.style == "column":
            return Holding.OWN
        spreads = role.style == "row" and sequence_parallel
        return Holding.TOKENS if spreads else Holding.WHOLE
    if sequence_parallel and sharing.sequence.get(name) == "norm":
        return Holding.WHOLE
    if spreads_tokens(node.target):
        return Holding.TOKENS
    read = {here.get(source.name, Holding.WHOLE) for source in node.all_input_nodes}
    return next((h for h in (Holding.OWN, Holding.TOKENS) if h in read), Holding.WHOLE)


def _drops(stage: StageModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = stage.module.get_submodule(str(node.target))
        return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    if node.target is functional.scaled_dot_product_attention:
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0))
    return node.target in (functional.dropout, torch.dropout)
