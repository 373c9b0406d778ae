"""Profile the layers of a model alone, at one microbatch size, in the measuring process.

The layers are those that the runtime cuts by (runtime/pipeline/trace.py), so a plan made from a
profile can be launched. Only models that cannot be traced are seen through hooks. Alone, caches
are warm, so the sums differ from the whole pass, the backward's most. So layer times are scaled to
the whole, forward and backward apart, and then both to a pass in the loop that trains. All ratios
are reported.
"""

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ..devices.backend import is_out_of_memory
from ..runtime.nested_tensors import tensors_in
from ..schema.errors import TargetError
from ..schema.files import to_plain
from ..schema.layers import LayerTrace, TracedInput, trace_of
from ..schema.profile import LayerCore, LayerGraph, LayerNode
from .bench import Bench
from .layer_memory import StorageLedger, footprint
from .layer_passes import (
    LayerPiece,
    Row,
    block_bytes_of,
    buffer_row,
    core_rows,
    detached,
    measure_piece,
    measuring_seconds,
    traced_rows,
    weight_row,
)
from .targets import one_line

if TYPE_CHECKING:
    from ..runtime.pipeline.cut import LayeredModel


# Find a model's layers: by torch.fx, else torch.export, else by hooks on its modules.
#
# torch.fx comes first: it needs no example and holds for every call. It takes a module whose own
# forward it cannot trace whole, and goes wrong in silence where a forward asks which arguments were
# given; so what it made must give the model's own answer on a real batch. torch.export follows real
# arguments. Hooks see any model, but only calls of modules, and such layers can be planned with but
# not run as stages.


_PLAIN = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model: as it was made, and by input name."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FoundLayers:
    """The layers to run apart, or None for hooks; and how they were found."""

    layered: "LayeredModel | None"
    trace: LayerTrace


def find_layers(bench: Bench, microbatch_size: int) -> FoundLayers:
    """Try the ways in turn.

    Raises:
        TargetError: The workload's loss does not call the model, or hetflow cannot train it.
    """
    # One sample would fix the batch dimension to one in torch.export.
    call = call_of(bench, bench.make_batch(max(2, microbatch_size)))
    reasons: list[str] = []
    coarse: FoundLayers | None = None
    try:
        from ..runtime.pipeline.trace import layers_of

        layered = layers_of(bench.model)
        _check_answer(bench, layered, call)
        coarse = FoundLayers(layered, LayerTrace(way="fx"))
        if not coarse.layered or not coarse.layered.whole:
            return coarse
        reasons.append(f"torch.fx: cannot go into {coarse.layered.whole[0]}")
    except Exception as error:
        reasons.append(_reason("torch.fx", error))
    try:
        finer = _by_export(bench, call, "; ".join(reasons))
        if coarse is None or _size(finer) > _size(coarse):
            return finer
    except Exception as error:
        reasons.append(_reason("torch.export", error))
    return coarse or FoundLayers(None, LayerTrace(way="hooks", reason="; ".join(reasons)))


def _reason(way: str, error: Exception) -> str:
    """Why a way does not do. A tracer's own failure is a reason too: the next way is tried."""
    if is_out_of_memory(error):
        raise error
    said = error.message if isinstance(error, TargetError) else one_line(error)
    return f"{way}: {said.removeprefix(f'{way}: ')}"


def _size(found: FoundLayers) -> int:
    return len(found.layered.layers) if found.layered else 0


def call_of(bench: Bench, batch: Any) -> Call:
    """What the workload's loss calls the model with.

    Raises:
        TargetError: It does not call it.
    """
    import inspect

    from ..runtime.pipeline.cut import by_placeholder

    original = bench.model.forward
    signature = inspect.signature(original)
    seen: list[Call] = []

    def forward(*positional: Any, **named: Any) -> Any:
        seen.append(Call(positional, named, by_placeholder(signature, positional, named)))
        return original(*positional, **named)

    bench.model.forward = forward
    try:
        bench.workload.loss(bench.model, batch)
    finally:
        bench.model.forward = original
    if not seen:
        raise TargetError("the workload's loss does not call the model")
    return seen[0]


def _by_export(bench: Bench, call: Call, reason: str) -> FoundLayers:
    import torch

    from ..runtime.pipeline.trace import layers_of

    given = {name: value for name, value in call.arguments.items() if not name.startswith("*")}
    if any(v for n, v in call.arguments.items() if n.startswith("*") and not n.startswith("**")):
        raise TargetError("the model takes any number of positional arguments")
    tensors = {n: value for n, value in given.items() if isinstance(value, torch.Tensor)}
    constants = {n: value for n, value in given.items() if n not in tensors}
    for name, value in constants.items():
        if value is not None and not isinstance(value, _PLAIN):
            raise TargetError(f"argument {name} is a {type(value).__name__}")
    trace = LayerTrace(
        way="export",
        inputs=tuple(
            TracedInput(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
            for n, t in tensors.items()
        ),
        constants=constants or None,
        reason=reason,
    )
    layered = layers_of(bench.model, trace)
    _check_answer(bench, layered, call)
    return FoundLayers(layered, trace)


def _check_answer(bench: Bench, layered: "LayeredModel", call: Call) -> None:
    """Refuse a trace that does not compute what the model does, or differentiate alike."""
    from ..runtime.pipeline.cut import cut

    part = cut(layered, [[layer.id for layer in layered.layers]])[0]
    _compare(bench, layered, part, call, "")
    # Sizes that the trace has not seen: it may have taken the batch's size for a constant. One
    # sample apart, as code often branches on it.
    seen = max((len(t) for t in tensors_in(call.arguments) if t.dim()), default=1)
    for size in (seen + 1, 1):
        try:
            other = call_of(bench, bench.make_batch(size))
        except Exception as error:
            # The workload's own: it has no batch of this size (batch-norm takes no single sample).
            if is_out_of_memory(error):
                raise
            continue
        _compare(bench, layered, part, other, f" for a batch of {size}")


def _compare(bench: Bench, layered: "LayeredModel", part: Any, call: Call, where: str) -> None:
    try:
        layered.check_call(call.arguments)
    except TargetError as error:
        raise TargetError(f"the trace does not hold{where}: {error.message}") from error
    given = [call.arguments[name] for name in part.arguments]
    own_answers, own_norms = _outcome(bench, bench.model, call.positional, call.named)
    answers, norms = _outcome(bench, part, given, {})
    if not _alike(own_answers, answers):
        raise TargetError(f"the traced model gives another answer than the model{where}")
    if not _alike(own_norms, norms):
        # torch.fx does not see `with torch.no_grad()`.
        raise TargetError(f"the traced model gives other gradients than the model{where}")


def _alike(own: list[Any], traced: list[Any]) -> bool:
    import torch
    from torch._subclasses.fake_tensor import is_fake

    def same(a: Any, b: Any) -> bool:
        if is_fake(a) or is_fake(b):  # shapes without values: counted, not run
            return bool(a.dtype == b.dtype)
        return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)

    return len(own) == len(traced) and all(
        a.shape == b.shape and same(a, b) for a, b in zip(own, traced, strict=True)
    )


def _outcome(
    bench: Bench, module: Any, positional: Any, named: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """What a pass answers, and the norm of each parameter's gradient; -1 for none."""
    import torch

    parameters = [p for p in bench.model.parameters() if p.requires_grad]
    torch.manual_seed(0)  # so that the model and its trace drop the same
    try:
        answers = tensors_in(module(*positional, **named))
        ends = [tensor for tensor in answers if tensor.requires_grad]
        found: Any = [None] * len(parameters)
        if ends:
            ones = [torch.ones_like(end) for end in ends]
            found = torch.autograd.grad(ends, parameters, ones, allow_unused=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Whatever traced code raises where the model's own would not.
        raise TargetError(one_line(error)) from error
    norms = [torch.tensor(-1.0) if g is None else g.detach().norm().cpu() for g in found]
    return [answer.detach() for answer in answers], norms


# Layers of a model that cannot be traced: calls of its modules, seen by hooks in one pass.
#
# A layer is a call of a module without modules inside, in running order; the functions in between
# are not seen, and what they keep counts for the layer before. Which layer feeds which is read from
# autograd's graph: from a layer's input back to the nearest outputs of earlier layers. A layer
# whose inputs cannot be followed (integers, detached tensors) hangs on the layer before it only
# where nothing else joins it to the rest.


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
    bench: Bench, ledger: StorageLedger, batch: Any, repeats: int
) -> tuple[list[Row], list[list[str]]]:
    """Measure each module call alone.

    Returns:
        Rows of the layers, and edges.

    Raises:
        TargetError: The pass calls no module.
    """
    from ..runtime.pipeline.cut import numbered

    calls = _watched(bench, batch)
    if not calls:
        raise TargetError("a pass of the model calls none of its modules")
    names = numbered([call.name for call in calls])
    held: dict[int, str] = {}
    empty = measuring_seconds(bench)
    rows = []
    for index, (call, name) in enumerate(zip(calls, names, strict=True)):
        before = names[index - 1] if index else None
        piece = LayerPiece(name, _runner(call), call.values, tensors_in, before)
        row, _ = measure_piece(bench, ledger, piece, repeats, empty)
        parameters = _parameters(bench.model, calls, index)
        block = block_bytes_of(bench)
        row |= weight_row(name, parameters, held, block) | buffer_row(call.module, block)
        rows.append({"id": name, "op": type(call.module).__name__, **row})
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
        # Its latest call: a module may be called several times.
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
    from ..runtime.pipeline.cut import is_leaf

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
    group = list(range(len(calls)))  # union-find: another layer of the same part, or itself

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


def measure_layers(bench: Bench, microbatch_size: int, repeats: int) -> dict[str, Any]:
    """Profile the layers of a bench's model.

    Returns:
        ``nodes`` and ``edges`` of a LayerGraph as plain data, and ``provenance``.

    Raises:
        TargetError: The workload's loss does not call the model, or that calls no module.
    """
    found = find_layers(bench, microbatch_size)
    batch = bench.make_batch(microbatch_size)
    whole = _whole(bench, batch, repeats)
    arguments = call_of(bench, batch).arguments
    standing = [*bench.model.parameters(), *bench.model.buffers()]
    ledger = StorageLedger(standing, tensors_in(arguments), block_bytes_of(bench))
    cores: dict[str, tuple[int, Row]] = {}
    if found.layered is not None:
        cores = core_rows(bench, found.layered, arguments, repeats)
        rows, edges = traced_rows(bench, ledger, found.layered, arguments, repeats)
    else:
        rows, edges = hooked_rows(bench, ledger, batch, repeats)
    # Before and after: what else runs on the machine changes meanwhile.
    whole += _whole(bench, batch, repeats)
    stashed = ledger.stashed_bytes
    for row in rows:
        row["stashed_bytes"] = stashed.get(row["id"], 0)
        row["saved_later"] = ledger.saved_later(row["id"]) or None
        if row["id"] in cores:
            freed, core = cores[row["id"]]
            row["core"] = {**core, "stashed_bytes": max(0, row["stashed_bytes"] - freed)}
    ratios = _calibrate(rows, _parts(whole))
    kept = _kept_bytes(bench, batch)
    of_loss = 0 if kept is None else max(0, kept - sum(row["stashed_bytes"] for row in rows))
    # The loss is computed where the model ends, and what it keeps is in no layer's pass.
    rows[-1]["stashed_bytes"] += of_loss
    return {
        "nodes": rows,
        "edges": edges,
        "trace": to_plain(found.trace),
        "sample_bytes": sum(each.nbytes for each in tensors_in(batch)),
        "provenance": {
            "microbatch_size": microbatch_size,
            "repeats": repeats,
            **ratios,
            "stashed_bytes": sum(stashed.values()),
            "whole_kept_bytes": kept,
            "loss_stashed_bytes": of_loss,
        },
    }


def as_in_the_loop(measured: dict[str, Any], pass_seconds: float) -> dict[str, Any]:
    """Layers that sum to a pass in the loop that trains, which is colder than passes in a row.

    Args:
        measured: From ``measure_layers``.
        pass_seconds: Forward + backward of a virtual node of that size, as the curve has it.
    """
    how = measured["provenance"]
    whole = how["whole_forward_seconds"] + how["whole_backward_seconds"]
    factor = pass_seconds / whole if whole else 1.0
    rows = [
        {
            **row,
            "forward_seconds": row["forward_seconds"] * factor,
            "backward_seconds": row["backward_seconds"] * factor,
            **_core_in_time(row, factor),
        }
        for row in measured["nodes"]
    ]
    provenance = {**how, "loop_pass_seconds": pass_seconds, "loop_over_whole": factor}
    return {**measured, "nodes": rows, "provenance": provenance}


def _core_in_time(row: Row, factor: float) -> dict[str, Row]:
    """The ``core`` of a row, if it has one, with a scaled forward pass."""
    if row.get("core") is None:
        return {}
    core = row["core"]
    return {"core": {**core, "forward_seconds": core["forward_seconds"] * factor}}


def graph_of(measured: dict[str, Any], speed: float = 1.0) -> LayerGraph:
    """The record of what was measured; ``speed`` stretches times for an emulated device."""
    return LayerGraph(
        microbatch_size=measured["provenance"]["microbatch_size"],
        nodes=tuple(
            LayerNode(
                **{
                    **row,
                    "forward_seconds": row["forward_seconds"] / speed,
                    "backward_seconds": row["backward_seconds"] / speed,
                    "shared_with": tuple(row.get("shared_with", ())),
                    **{
                        key: LayerCore(**core)
                        for key, core in _core_in_time(row, 1 / speed).items()
                    },
                }
            )
            for row in measured["nodes"]
        ),
        edges=tuple((source, target) for source, target in measured["edges"]),
        trace=trace_of(measured["trace"]),
        sample_bytes=measured["sample_bytes"],
    )


def _whole(bench: Bench, batch: Any, repeats: int) -> list[tuple[float, float]]:
    """Seconds of the whole model with its loss: forward, and forward with backward."""
    bench.run_step(batch)
    bench.workload.loss(bench.model, batch)
    return [
        (bench.timed(lambda: bench.workload.loss(bench.model, batch))[0], bench.time_pass(batch)[0])
        for _ in range(repeats)
    ]


def _parts(passes: list[tuple[float, float]]) -> tuple[float, float]:
    """Forward and backward seconds: medians, and their difference."""
    forward = median(seconds for seconds, _ in passes)
    return forward, max(median(total for _, total in passes) - forward, 0.0)


def _kept_bytes(bench: Bench, batch: Any) -> int | None:
    """What the allocator says is left after the whole forward pass, for the stashes to be near."""
    kept: list[Any] = []
    found = footprint(lambda: kept.append(bench.workload.loss(bench.model, batch)), bench.device)
    return None if found is None else found.end_bytes


def _calibrate(rows: list[Row], whole: tuple[float, float]) -> dict[str, float]:
    """Scale layer times so that they sum to the whole pass; say how far off they were."""
    ratios: dict[str, float] = {}
    for name, seconds in zip(("forward", "backward"), whole, strict=True):
        key = f"{name}_seconds"
        total = sum(row[key] for row in rows)
        ratios[f"whole_{key}"] = seconds
        ratios[f"isolated_over_whole_{name}"] = total / seconds if seconds else 0.0
        factor = seconds / total if total else 1.0
        for row in rows:
            row[key] *= factor
            if name == "forward" and "core" in row:
                row["core"][key] *= factor
    return ratios
