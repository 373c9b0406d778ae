"""Layers of a model that cannot be traced: calls of its modules, seen by hooks in one pass.

A layer is a call of a module without modules inside, in running order; the functions in between
are not seen, and what they keep counts for the layer before. Which layer feeds which is read from
autograd's graph: from a layer's input back to the nearest outputs of earlier layers. A layer
whose inputs cannot be followed (integers, detached tensors) hangs on the layer before it only
where nothing else joins it to the rest.
"""

from dataclasses import dataclass, field
from typing import Any

from ..schema.errors import TargetError
from .bench import Bench
from .layer_memory import Ledger
from .layer_passes import (
    Piece,
    Row,
    detached,
    measure_piece,
    measuring_seconds,
    weight_row,
)
from .nests import tensors_in


@dataclass(slots=True)
class _Call:
    """One call of a module: its flat inputs, where they came from, and what it made."""

    name: str
    module: Any
    values: list[Any]
    spec: Any
    sources: list[int]
    outputs: list[Any] = field(default_factory=list)


def hooked_rows(
    bench: Bench, ledger: Ledger, batch: Any, repeats: int
) -> tuple[list[Row], list[list[str]]]:
    """Measure each module call alone.

    Returns:
        Rows of the layers, and edges.

    Raises:
        TargetError: The pass calls no module.
    """
    from ..runtime.pipeline.layered import numbered

    calls = _watched(bench, batch)
    if not calls:
        raise TargetError("a pass of the model calls none of its modules")
    names = numbered([call.name for call in calls])
    held: dict[int, str] = {}
    empty = measuring_seconds(bench)
    rows = []
    for index, (call, name) in enumerate(zip(calls, names, strict=True)):
        before = names[index - 1] if index else None
        piece = Piece(name, _runner(call), call.values, tensors_in, before)
        row, _ = measure_piece(bench, ledger, piece, repeats, empty)
        parameters = _parameters(bench.model, calls, index)
        weights = weight_row(name, parameters, held)
        rows.append({"id": name, "op": type(call.module).__name__, **row, **weights})
    return rows, [[names[a], names[b]] for a, b in _joined(calls)]


def _runner(call: _Call) -> Any:
    from torch.utils import _pytree

    def run(*values: Any) -> Any:
        arguments, named = _pytree.tree_unflatten(list(values), call.spec)
        return call.module(*arguments, **named)

    return run


def _watched(bench: Bench, batch: Any) -> list[_Call]:
    """One pass with hooks on every module that is a layer."""
    from torch.utils import _pytree

    calls: list[_Call] = []
    made: dict[Any, int] = {}

    def enter(name: str) -> Any:
        def hook(module: Any, arguments: Any, named: Any) -> None:
            values, spec = _pytree.tree_flatten((arguments, named))
            found = {source for value in values for source in _sources(value, made)}
            kept = [detached(value) for value in values]
            calls.append(_Call(name, module, kept, spec, sorted(found)))

        return hook

    def leave(module: Any, arguments: Any, answer: Any) -> None:
        index = max(i for i, call in enumerate(calls) if call.module is module)
        for tensor in tensors_in(answer):
            made[tensor if tensor.grad_fn is None else tensor.grad_fn] = index
            calls[index].outputs.append(tensor)

    handles = []
    for name, module in _layers_of(bench.model, ""):
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        bench.workload.loss(bench.model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _layers_of(module: Any, name: str) -> list[tuple[str, Any]]:
    from ..runtime.pipeline.layered import is_leaf

    if name and is_leaf(module):
        return [(name, module)]
    return [
        found
        for child, inner in module.named_children()
        for found in _layers_of(inner, f"{name}.{child}" if name else child)
    ]


def _sources(value: Any, made: dict[Any, int]) -> set[int]:
    """The layers whose outputs reach a value without passing another layer."""
    import torch

    if not isinstance(value, torch.Tensor):
        return set()
    if value.grad_fn is None:
        return {made[value]} if value in made else set()
    found, waiting, seen = set(), [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in made:
            found.add(made[node])
        else:
            waiting += [after for after, _ in node.next_functions if after is not None]
    return found


def _parameters(model: Any, calls: list[_Call], index: int) -> list[Any]:
    """A layer's own; the first layer holds those that belong to no module that is one."""
    own = list(calls[index].module.parameters())
    if index:
        return own
    layered = {id(p) for call in calls for p in call.module.parameters()}
    return [*own, *(p for p in model.parameters() if id(p) not in layered)]


def _joined(calls: list[_Call]) -> list[tuple[int, int]]:
    """Edges as positions; a part that nothing joins to the layers before it hangs on the last."""
    edges = [(source, target) for target, call in enumerate(calls) for source in call.sources]
    group = list(range(len(calls)))

    def root(index: int) -> int:
        while group[index] != index:
            index = group[index]
        return index

    for source, target in edges:
        group[root(target)] = root(source)
    for index in range(1, len(calls)):
        if root(index) != root(index - 1):
            group[root(index)] = root(index - 1)
            edges.append((index - 1, index))
    return sorted(set(edges), key=lambda edge: (edge[1], edge[0]))
