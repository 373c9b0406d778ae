"""Show plans of three dimensions (pipeline, tensor and data parallel) as tables."""

from dataclasses import asdict

from ..schema.plan import Alternative, Gain, Plan, Prediction, Stage, claim_of
from .grid import grid, layers_text, mebibytes, milliseconds
from .parallel_terms import step_terms


def parallel_table(plan: Plan) -> str:
    """Which layers run where and how, the predicted seconds, and the proof."""
    rows = [
        (
            number,
            layers_text(stage.layers),
            _replicas(stage),
            ", ".join(str(group.samples) for group in stage.replicas),
            stage.recompute,
            milliseconds(stage.compute_seconds),
            milliseconds(stage.transfer_seconds),
            mebibytes(stage.memory_bytes),
        )
        for number, stage in enumerate(plan.stages)
    ]
    headers = (
        "stage", "layers", "replicas", "samples", "recompute", "pass", "transfer", "memory",
    )  # fmt: skip
    proof = plan.proof
    gap = "unknown" if proof.gap is None else f"{100 * proof.gap:.3g} %"
    lines = [
        f"{plan.model}, global batch {plan.global_batch_size}: up to {plan.num_rounds} "
        f"microbatches of {plan.microbatch_size} a replica; {plan.num_devices} devices, "
        f"{plan.schedule}{_chunks(plan)}"
        + ("" if plan.optimizer is None else f"; memory counts {plan.optimizer}")
        + (", shared by the replicas of a stage" if plan.shard_optimizer else ""),
        grid(headers, rows),
        _step(plan.predicted),
        f"{claim_of(plan)}, gap {gap}: {proof.method}",
        f"searched: {proof.space}",
    ]
    if plan.alternatives:
        lines.append(_points(plan))
    lines += [_gain(plan, gain) for gain in plan.with_more_devices]
    return "\n".join([*lines, *map(str, plan.estimates), *map(str, plan.reserves)])


def _chunks(plan: Plan) -> str:
    if plan.num_model_chunks == 1:
        return ""
    first, second = 0, plan.num_positions
    return f" ({plan.num_model_chunks} stages a device: {first}, {second}, ... on the same)"


def _replicas(stage: Stage) -> str:
    """Text such as ``16 x A100, 11 x (4 V100)``."""
    return ", ".join(
        f"{group.num_replicas} x "
        + (
            group.device_type
            if group.tensor_parallel_size == 1
            else f"({group.tensor_parallel_size} {group.device_type})"
        )
        for group in stage.replicas
    )


def _step(predicted: Prediction) -> str:
    parts = [f"step {milliseconds(predicted.step_seconds)}"]
    if predicted.sync_seconds is not None:
        parts.append(f"all-reduce {milliseconds(predicted.sync_seconds)}")
    if predicted.update_seconds is not None:
        parts.append(f"update {milliseconds(predicted.update_seconds)}")
    if predicted.bubble_fraction is not None:
        parts.append(f"bubble {100 * predicted.bubble_fraction:.3g} %")
    samples = f"{predicted.samples_per_second:.1f} samples/s"
    return f"{', '.join(parts)}; {samples}{dollars_text(predicted)}"


def dollars_text(predicted: Prediction | Prediction) -> str:
    """Text such as ``; 12.24 $/hour, 0.0354 $/million samples``; empty without prices."""
    if predicted.dollars_per_hour is None:
        return ""
    text = f"; {predicted.dollars_per_hour:.2f} $/hour"
    if predicted.dollars_per_million_samples is not None:
        text += f", {predicted.dollars_per_million_samples:.4g} $/million samples"
    return text


def _points(plan: Plan) -> str:
    """Time against devices and memory; the plan itself comes first."""
    own = Alternative(
        stages=plan.stages,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        num_model_chunks=plan.num_model_chunks,
        predicted=plan.predicted,
    )
    rows = [
        (
            milliseconds(predicted.step_seconds),
            one.num_devices,
            mebibytes(max(stage.memory_bytes or 0 for stage in one.stages)),
            _price(predicted.dollars_per_hour, ".2f"),
            _price(predicted.dollars_per_million_samples, ".4g"),
            _what_grew(own, one),
            _layout(one),
        )
        for one in (own, *plan.alternatives)
        if (predicted := one.predicted) is not None
    ]
    headers = (
        "step", "devices", "fullest device", "$/hour", "$/million samples", "slower by",
        "layers: replicas",
    )  # fmt: skip
    return grid(headers, rows)


def _layout(one: Alternative) -> str:
    """Text such as ``7: 2 x A100 | 5: 2 x V100``; the layers of a device's chunks are added."""
    positions = len(one.stages) // one.num_model_chunks
    chunks = f" in {one.num_model_chunks} chunks" if one.num_model_chunks > 1 else ""
    return " | ".join(
        f"{sum(len(stage.layers) for stage in one.stages[position::positions])}{chunks}: "
        f"{_replicas(one.stages[position])}"
        for position in range(positions)
    )


def _gain(plan: Plan, gain: Gain) -> str:
    saved = 1.0 - gain.step_seconds / plan.predicted.step_seconds
    effect = f"the step is {saved:.1%} shorter" if saved > 0 else "no faster plan was found"
    return f"with {gain.num_devices} more {gain.device_type}: {effect}"


def _what_grew(best: Alternative, other: Alternative) -> str:
    """The term of the step that grows most from ``best`` to ``other``."""
    before = step_terms(best.num_rounds, best.stages, best.num_model_chunks)
    after = step_terms(other.num_rounds, other.stages, other.num_model_chunks)
    if other is best or before is None or after is None:
        return "-"
    terms = asdict(before)
    grown = {name: seconds - terms[name] for name, seconds in asdict(after).items()}
    most = max(grown, key=lambda name: grown[name])
    if grown[most] <= 0.0:
        return "-"
    return f"{most.replace('_', ' ')} +{milliseconds(grown[most])}"


def _price(dollars: float | None, form: str) -> str:
    return "-" if dollars is None else format(dollars, form)
