"""Profile the layers of a model alone, at one microbatch size, in the measuring process.

The layers are those that the runtime cuts by (runtime/pipeline/trace.py), so a plan made from a
profile can be launched. Alone, caches are warm, so the sums differ from the whole pass, the
backward's most; layer times are scaled to the whole, and the raw ratios are reported.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from ..schema.errors import TargetError
from ..schema.profile import LayerGraph, LayerNode
from .bench import Bench
from .layer_memory import Ledger, footprint
from .layer_passes import Piece, Row, detached, measure_piece, tensors_in


def measure_layers(bench: Bench, microbatch_size: int, repeats: int) -> dict[str, Any]:
    """Profile the layers of a bench's model.

    Args:
        bench: The workload on its device.
        microbatch_size: Samples of a microbatch.
        repeats: Passes of each layer, after one warm-up.

    Returns:
        ``nodes`` and ``edges`` of a LayerGraph as plain data, and ``provenance``.

    Raises:
        TargetError: The model cannot be traced, or the workload's loss does not call it.
    """
    batch = bench.make_batch(microbatch_size)
    whole = _whole(bench, batch, repeats)
    arguments = _arguments(bench, batch)
    standing = [*bench.model.parameters(), *bench.model.buffers()]
    ledger = Ledger(standing, tensors_in(arguments))
    rows, edges = _traced_rows(bench, ledger, arguments, repeats)
    stashed = ledger.stashed_bytes
    for row in rows:
        row["stashed_bytes"] = stashed.get(row["id"], 0)
    ratios = _calibrate(rows, whole)
    kept = _kept_bytes(bench, batch)
    return {
        "nodes": rows,
        "edges": edges,
        "provenance": {
            "microbatch_size": microbatch_size,
            "repeats": repeats,
            **ratios,
            "stashed_bytes": sum(stashed.values()),
            "whole_kept_bytes": kept,
        },
    }


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
                }
            )
            for row in measured["nodes"]
        ),
        edges=tuple((source, target) for source, target in measured["edges"]),
    )


def _arguments(bench: Bench, batch: Any) -> dict[str, Any]:
    """What the workload's loss calls the model with, by name."""
    import inspect

    original = bench.model.forward
    signature = inspect.signature(original)
    seen: dict[str, Any] = {}

    def forward(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                seen["**" + name] = value
            elif signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                seen["*" + name] = value
            else:
                seen[name] = value
        return original(*arguments, **named)

    bench.model.forward = forward
    try:
        bench.workload.loss(bench.model, batch)
    finally:
        bench.model.forward = original
    if not seen:
        raise TargetError("the workload's loss does not call the model")
    return seen


def _whole(bench: Bench, batch: Any, repeats: int) -> tuple[float, float]:
    """Forward and backward seconds of the whole model with its loss."""
    bench.run_step(batch)
    forward = _median(bench, lambda: bench.workload.loss(bench.model, batch), repeats)
    total = median(bench.time_pass(batch)[0] for _ in range(repeats))
    return forward, max(total - forward, 0.0)


def _kept_bytes(bench: Bench, batch: Any) -> int | None:
    """What the allocator says is left after the whole forward pass, for the stashes to be near."""
    kept: list[Any] = []
    found = footprint(lambda: kept.append(bench.workload.loss(bench.model, batch)), bench.device)
    return None if found is None else found.end_bytes


def _median(bench: Bench, work: Callable[[], Any], repeats: int) -> float:
    work()
    return median(bench._timed(work)[0] for _ in range(repeats))


def _traced_rows(
    bench: Bench, ledger: Ledger, values: dict[str, Any], repeats: int
) -> tuple[list[Row], list[list[str]]]:
    """Measure the layers of a traced model in order, each from what those before it made."""
    from ..runtime.pipeline.cut import cut
    from ..runtime.pipeline.trace import layers_of

    layered = layers_of(bench.model)
    parts = cut(layered, [[layer.id] for layer in layered.layers])
    held: dict[int, str] = {}
    rows = []
    for layer, part in zip(layered.layers, parts, strict=True):
        own = [name not in part.inputs for name in part.outputs]
        made = partial(_chosen, own) if own else tensors_in
        names = [*part.arguments, *part.inputs]
        piece = Piece(layer.id, part.module, [values[name] for name in names], made)
        row, answer = measure_piece(bench, ledger, piece, repeats)
        values.update(
            (name, detached(value))
            for name, value, is_own in zip(part.outputs, answer if own else (), own, strict=True)
            if is_own
        )
        weights = weight_rows(layer.id, part.module.parameters(), held)
        rows.append({"id": layer.id, "op": _operation(bench.model, layer), **row, **weights})
    return rows, [list(edge) for edge in layered.edges]


def _chosen(own: list[bool], answer: Any) -> list[Any]:
    return tensors_in([value for value, is_own in zip(answer, own, strict=True) if is_own])


def weight_rows(layer: str, parameters: Any, held: dict[int, str]) -> Row:
    """A layer's weight bytes; what an earlier layer holds (``held``, by identity) is shared."""
    used = {id(p): p for p in parameters if p.requires_grad}
    shared = {key: held[key] for key in used if key in held}
    held.update((key, layer) for key in used if key not in held)

    def size(keys: Any) -> int:
        return sum(used[key].numel() * used[key].element_size() for key in keys)

    row: Row = {"weight_bytes": size(used.keys() - shared.keys())}
    if shared:
        row |= {
            "shared_with": list(dict.fromkeys(shared.values())),
            "shared_weight_bytes": size(shared),
        }
    return row


def _operation(model: Any, layer: Any) -> str:
    """The class of the layer's module, or the name of its first function."""
    node = layer.nodes[0]
    if node.op == "call_module":
        return type(model.get_submodule(node.target)).__name__
    return str(getattr(node.target, "__name__", node.target))


def _calibrate(rows: list[Row], whole: tuple[float, float]) -> dict[str, float]:
    """Scale layer times so that they sum to the whole pass; say how far off they were."""
    ratios: dict[str, float] = {}
    for name, seconds in zip(("forward", "backward"), whole, strict=True):
        key = f"{name}_seconds"
        total = sum(row[key] for row in rows)
        ratios[f"whole_{key}"] = seconds
        ratios[f"isolated_over_whole_{name}"] = total / seconds if seconds else 0.0
        for row in rows:
            row[key] *= seconds / total if total else 1.0
    return ratios
