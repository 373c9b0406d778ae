"""Cut a layered model into the modules of its stages, at the layers that a plan names.

``holdings`` says what each worker of a tensor-parallel group holds of a value. A column-parallel
layer makes shares, a row-parallel layer takes them (thesis 4.2.3). What is computed from a share in
between is a share too. With sequence parallelism a row-parallel layer makes tokens, and a norm
gathers them (tensor/sequence.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ...schema.errors import TargetError
from ...schema.options import option
from ..tensor.roles import Sharing
from ..tensor.sequence import spreads_tokens
from .crossing import Holding, Holdings
from .layered import LayeredModel, as_it_is

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
                _check_forward(source, stage_of[source], stage)
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
    """Refuse values that cannot be sent from a stage to the next.

    Raises:
        TargetError: A value is no tensor, number or tuple of numbers; says which.
    """
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


def _check_forward(source: fx.Node, made: int, used: int) -> None:
    if made > used:
        raise TargetError(
            f"the model cannot be cut like this: tensor {source.name!r} of stage {made} is needed "
            f"by stage {used} before it",
            hint="give the plan stages in the order of the model",
        )


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


def holdings_of(
    parts: Sequence[StageModule], sharing: Sharing, *, sequence_parallel: bool = False
) -> list[Holdings]:
    """[stages] what each worker holds of a stage's outputs.

    Args:
        parts: The stages, in order.
        sharing: The shared modules.
        sequence_parallel: Whether tokens are spread between tensor-parallel layers.

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
    node: fx.Node, sharing: Sharing, here: dict[str, Holding], sequence_parallel: bool
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
