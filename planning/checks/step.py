"""Time a pipeline's lists of operations, and split a step into parts: the judge's own way.

Nothing is shared with the timers of ``planning/schedules/``, so an error in them is found.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, isclose

from ...schema.errors import ProblemError
from ...schema.plan import Plan, Stage
from ...schema.schedule import Operation
from .schedule import Lists, lists_of, run_seconds

PARTS = (
    "update_seconds",
    "sync_seconds",
    "transfer_seconds",
    "virtual_node_seconds",
    "compute_seconds",
    "fixed_seconds",
)


def step_seconds(plan: Plan, lists: Lists | None = None) -> float:
    """Seconds of a step with a flush, from the seconds of the plan's stages.

    Args:
        plan: A plan with the seconds of its stages.
        lists: Its lists, if they were judged before.

    Raises:
        ProblemError: The schedule does not support the plan's shape, or its lists have faults.
    """
    lists = lists or lists_of(plan)
    if lists.faults:
        raise ProblemError(f"schedule {plan.schedule}: {lists.faults[0]}")

    def seconds(operation: Operation) -> float:
        kind, stage = operation.kind, plan.stages[operation.stage]
        if kind == "send_gradient":
            return (plan.stages[operation.stage - 1].output_seconds or 0.0) / 2
        if kind == "send_activation":
            return (stage.output_seconds or 0.0) / 2
        return (stage.reduce_seconds or 0.0) if kind == "reduce" else _pass_seconds(stage, kind)

    return run_seconds(lists.schedule, lists.order, seconds)


def _pass_seconds(stage: Stage, kind: str) -> float:
    forward = stage.forward_seconds or 0.0
    if kind == "forward":
        return forward
    if kind == "update":
        return (stage.update_seconds or 0.0) + (stage.tied_seconds or 0.0)
    backward = (stage.compute_seconds or 0.0) - forward
    weight = stage.weight_gradient_seconds
    weight = backward / 2 if weight is None else weight  # not known: taken as equal
    return {"backward": backward, "backward_weight": weight}.get(kind, backward - weight)


def steady_seconds(plan: Plan) -> float:
    """Seconds of a step without a flush: all its inputs on the slowest stage or boundary."""
    count, slowest = plan.num_microbatches, 0.0
    for stage in plan.stages:
        updates, rounds = 1.0, float(ceil(count / stage.num_replicas))
        if plan.traits.updates_each_round:
            updates = rounds = count / stage.num_replicas
        busy = rounds * (stage.compute_seconds or 0.0) + updates * (stage.update_seconds or 0.0)
        rings = updates * (stage.reduce_seconds or 0.0)
        slowest = max(slowest, busy, rings, count * (stage.output_seconds or 0.0))
    return slowest


def parts_of(plan: Plan) -> dict[str, float] | None:
    """Split a step into parts: each is what the step gets shorter by without it, one by one.

    Updates are taken away first, then all-reduces, what messages cost beside bytes, their bytes,
    and what passes cost beside layers. Compute is the rest.

    Returns:
        ``PARTS`` -> seconds, which add up to the step. None if the stages do not determine it.
    """
    if any(stage.reduce_seconds is None or stage.update_seconds is None for stage in plan.stages):
        return None
    if any(stage.forward_seconds is None for stage in plan.stages) and plan.traits.flushes:
        return None
    fixed = plan.predicted.fixed_seconds or 0.0
    seconds: Callable[[Plan], float] = steady_seconds
    try:
        if plan.traits.flushes:
            seconds = partial(step_seconds, lists=lists_of(plan))
        left = seconds(plan)
    except ProblemError:
        return None  # a plan of the steady state only
    if not isclose(left + fixed, plan.predicted.step_seconds, rel_tol=1e-9, abs_tol=1e-15):
        return None
    bare, lost = plan, []
    for without in (_no_update, _no_reduction, _no_message_cost, _no_bytes, _bare(plan)):
        bare = replace(bare, stages=tuple(without(stage) for stage in bare.stages))
        shorter = min(left, seconds(bare))
        lost.append(left - shorter)
        left = shorter
    update, reduction, message, sent, passes = lost
    parts = (update, reduction, message + sent, passes, left, fixed)
    return dict(zip(PARTS, parts, strict=True))


def _no_update(stage: Stage) -> Stage:
    return replace(stage, update_seconds=0.0)


def _no_reduction(stage: Stage) -> Stage:
    return replace(stage, reduce_seconds=0.0, tied_seconds=None)


def _no_message_cost(stage: Stage) -> Stage:
    bytes_only = (stage.output_seconds or 0.0) - 2 * (stage.message_seconds or 0.0)
    return replace(stage, output_seconds=max(0.0, bytes_only))


def _no_bytes(stage: Stage) -> Stage:
    return replace(stage, output_seconds=0.0)


def _bare(plan: Plan) -> Callable[[Stage], Stage]:
    """Return what takes the cost of passes beside layers off a stage."""
    backwards = 2 if plan.traits.splits_backward else 1

    def without(stage: Stage) -> Stage:
        own = stage.pass_seconds or 0.0
        forward = max(0.0, (stage.forward_seconds or 0.0) - own)
        whole = max((stage.compute_seconds or 0.0) - own - backwards * own, forward)
        weight = stage.weight_gradient_seconds
        return replace(
            stage,
            forward_seconds=forward,
            compute_seconds=whole,
            weight_gradient_seconds=None if weight is None else max(0.0, weight - own),
        )

    return without
