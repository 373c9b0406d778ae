"""Profile the layers of a model alone, at one microbatch size, in the measuring process.

The layers are those that the runtime cuts by (runtime/pipeline/trace.py), so a plan made from a
profile can be launched; only models that cannot be traced are seen through hooks. Alone, caches
are warm, so the sums differ from the whole pass, the backward's most; layer times are scaled to
the whole, forward and backward apart, and then both to a pass in the loop that trains. All ratios
are reported.
"""

from statistics import median
from typing import Any

from ..runtime.nested_tensors import tensors_in
from ..schema.files import to_plain
from ..schema.layers import trace_of
from ..schema.profile import LayerCore, LayerGraph, LayerNode
from .bench import Bench
from .layer_memory import StorageLedger, footprint
from .layer_passes import Row, core_rows, traced_rows
from .layer_traces import call_of, find_layers, hooked_rows


def measure_layers(bench: Bench, microbatch_size: int, repeats: int) -> dict[str, Any]:
    """Profile the layers of a bench's model.

    Args:
        bench: The workload on its device.
        microbatch_size: Samples of a microbatch.
        repeats: Passes of each layer, after one warm-up.

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
    ledger = StorageLedger(standing, tensors_in(arguments))
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
        for row in rows:
            row[key] *= seconds / total if total else 1.0
        if name == "forward":
            _scale_cores(rows, seconds / total if total else 1.0)
    return ratios


def _scale_cores(rows: list[Row], factor: float) -> None:
    """Scale the forward passes of attention cores, in place."""
    for row in rows:
        if "core" in row:
            row["core"]["forward_seconds"] *= factor
