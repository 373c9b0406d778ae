"""Time each layer of a model alone, at one microbatch size, in the measuring process.

The layers are those that the runtime cuts by (runtime/pipeline/trace.py), so a plan made from a
profile can be launched. Each is run on its own, from the tensors that really reach it, forward
and backward (hooks on the whole model time the first layer's backward as nothing). Alone, caches
are warm and the optimizer's accumulation is missing, so the sums differ from the whole pass, the
backward's most; layer times are scaled to the whole, and the raw ratios are reported.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from ..schema.errors import TargetError
from ..schema.profile import LayerGraph, LayerNode
from .bench import Bench

Row = dict[str, Any]


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
    from ..runtime.pipeline.cut import cut
    from ..runtime.pipeline.trace import layers_of

    layered = layers_of(bench.model)
    parts = cut(layered, [[layer.id] for layer in layered.layers])
    batch = bench.make_batch(microbatch_size)
    whole = _whole(bench, batch, repeats)
    values: dict[str, Any] = _arguments(bench, batch)
    rows = []
    for layer, part in zip(layered.layers, parts, strict=True):
        row, made = _time_layer(bench, part, values, repeats)
        values.update(made)
        rows.append({"id": layer.id, "op": _operation(bench.model, layer), **row})
    ratios = _calibrate(rows, whole)
    return {
        "nodes": rows,
        "edges": [list(edge) for edge in layered.edges],
        "provenance": {"microbatch_size": microbatch_size, "repeats": repeats, **ratios},
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


def _median(bench: Bench, work: Callable[[], Any], repeats: int) -> float:
    work()
    return median(bench._timed(work)[0] for _ in range(repeats))


def _time_layer(
    bench: Bench, part: Any, values: dict[str, Any], repeats: int
) -> tuple[Row, dict[str, Any]]:
    import torch

    own = [values[name] for name in part.arguments]
    received = [_leaf(values[name]) for name in part.inputs]
    forwards: list[float] = []
    backwards: list[float] = []
    for _ in range(repeats + 1):
        inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in received]
        answer, seconds = _timed_call(bench, part.module, [*own, *inputs])
        forwards.append(seconds)
        results = _tensors(answer)
        made = tuple(t for t in results if not any(t is value for value in inputs))
        backwards.append(_backward_seconds(bench, [t for t in made if t.requires_grad]))
        bench.optimizer.zero_grad(set_to_none=False)
    named = dict(zip(part.outputs, answer if isinstance(answer, tuple) else (), strict=False))
    weights = {id(p): p for p in part.module.parameters() if p.requires_grad}
    row = {
        "forward_seconds": median(forwards[1:]),
        "backward_seconds": median(backwards[1:]),
        "activation_bytes": sum(t.numel() * t.element_size() for t in made),
        "weight_bytes": sum(p.numel() * p.element_size() for p in weights.values()),
    }
    return row, {name: _detached(value) for name, value in named.items()}


def _timed_call(bench: Bench, module: Any, inputs: list[Any]) -> tuple[Any, float]:
    outputs: list[Any] = []
    seconds, _ = bench._timed(lambda: outputs.append(module(*inputs)))
    return outputs[0], seconds


def _backward_seconds(bench: Bench, results: list[Any]) -> float:
    import torch

    if not results:
        return 0.0
    gradients = [torch.ones_like(result) for result in results]
    return bench._timed(lambda: torch.autograd.backward(results, gradients))[0]


def _leaf(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [t for entry in value for t in _tensors(entry)] if isinstance(value, tuple | list) else []
    )


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
