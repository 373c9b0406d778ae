"""Split a pipeline plan's predicted step into terms that add up to it.

A pipeline's parts run at the same time, so a term is the time by which the step becomes shorter
when the term is removed. The terms are removed one after another: updates, all-reduces, fixed
costs of messages, their bytes, fixed costs of passes. The rest is the layers' passes: those of
the busiest device, and the waiting caused by startup and uneven stages. With another order of
removal, single terms would differ, but their sum would not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, isclose

from ...schema.errors import ProblemError
from ...schema.plan import Plan, Stage
from .of_plan import schedule_of, times_of
from .timing import time_schedule

StepOf = Callable[[Plan], float]
"""Plan -> seconds of its step, from the times of its stages, without the step's fixed cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """The terms of a step, in seconds; they add up to the step.

    Attributes:
        layer_seconds: Passes of the layers on the busiest device.
        waiting_seconds: Waiting of that device, caused by startup and uneven stages.
        pass_seconds: Fixed costs of passes.
        message_seconds: Fixed costs of messages between stages.
        byte_seconds: Time of the messages' bytes on the links.
        reduce_seconds: Exposed all-reduces of gradients, those of tied weights included.
        update_seconds: Exposed optimizer updates.
        fixed_seconds: Fixed cost of the step.
    """

    layer_seconds: float
    waiting_seconds: float
    pass_seconds: float
    message_seconds: float
    byte_seconds: float
    reduce_seconds: float
    update_seconds: float
    fixed_seconds: float


def step_terms(plan: Plan, step_of: StepOf | None = None) -> StepTerms | None:
    """Split a plan's predicted step into terms.

    The plan has all times of its stages. ``step_of`` is a faster function for the same step; None
    times the plan's schedule.

    Returns:
        The terms. None if the stages' times do not determine the step: for nested plans, the
        papers' stage costs, boundaries that were not counted, and older plans without all times.
    """
    if any(stage.reduce_seconds is None or stage.update_seconds is None for stage in plan.stages):
        return None
    fixed = plan.predicted.fixed_seconds or 0.0
    try:
        seconds = step_of or timer_of(plan)
        left = seconds(plan)
    except ProblemError:  # a plan of a steady state only, or without forward times
        return None
    if not isclose(left + fixed, plan.predicted.step_seconds, rel_tol=1e-9, abs_tol=1e-15):
        return None
    halves = 2 if plan.traits.splits_backward else 1
    gone = []
    for without in (_no_update, _no_reduction, _no_message_cost, _no_bytes, _bare(halves)):
        plan = replace(plan, stages=tuple(map(without, plan.stages)))
        shorter = min(seconds(plan), left)
        gone.append(left - shorter)
        left = shorter
    update, reduction, message, sent, passes = gone
    busiest = min(_busiest(plan), left)
    return StepTerms(
        layer_seconds=busiest,
        waiting_seconds=left - busiest,
        pass_seconds=passes,
        message_seconds=message,
        byte_seconds=sent,
        reduce_seconds=reduction,
        update_seconds=update,
        fixed_seconds=fixed,
    )


def timer_of(plan: Plan) -> StepOf:
    """Make a function that times plans of one shape.

    A schedule that flushes is timed event by event; others by their steady state.

    Raises:
        ProblemError: The schedule does not support the plan's shape.
    """
    if not plan.traits.flushes:
        return _steady_step
    schedule = schedule_of(plan)
    return lambda other: (
        time_schedule(schedule, times_of(other.stages, flushes=True)).makespan_seconds
    )


def _steady_step(plan: Plan) -> float:
    """Seconds of all microbatches of a step on the slowest stage or boundary (``ring`` cost)."""
    count, slowest = plan.num_microbatches, 0.0
    for stage in plan.stages:
        share = count / stage.num_replicas
        often = share if plan.traits.updates_each_round else 1.0
        rounds = share if plan.traits.updates_each_round else ceil(share)
        busy = rounds * (stage.compute_seconds or 0.0) + often * (stage.update_seconds or 0.0)
        rings = often * (stage.reduce_seconds or 0.0)
        slowest = max(slowest, busy, rings, count * (stage.output_seconds or 0.0))
    return slowest


def _busiest(plan: Plan) -> float:
    """Seconds of all passes on the busiest device, over all stages that it holds."""
    found: dict[tuple[str, int], float] = {}
    for stage in plan.stages:
        share = plan.num_microbatches / stage.num_replicas
        rounds = share if plan.traits.updates_each_round else ceil(share)
        device = (stage.device_type, stage.first_device)
        found[device] = found.get(device, 0.0) + rounds * (stage.compute_seconds or 0.0)
    return max(found.values())


def _no_update(stage: Stage) -> Stage:
    return replace(stage, update_seconds=0.0)


def _no_reduction(stage: Stage) -> Stage:
    return replace(stage, reduce_seconds=0.0, tied_seconds=None)


def _no_message_cost(stage: Stage) -> Stage:
    seconds = (stage.output_seconds or 0.0) - 2 * (stage.message_seconds or 0.0)
    return replace(stage, output_seconds=max(seconds, 0.0))


def _no_bytes(stage: Stage) -> Stage:
    return replace(stage, output_seconds=0.0)


def _bare(halves: int) -> Callable[[Stage], Stage]:
    """Make a function that removes a stage's fixed costs of passes."""

    # ``halves`` is the number of parts of a backward pass.
    def without(stage: Stage) -> Stage:
        own = stage.pass_seconds or 0.0
        forward = max((stage.forward_seconds or 0.0) - own, 0.0)
        compute = max((stage.compute_seconds or 0.0) - (1 + halves) * own, forward)
        weight = stage.weight_gradient_seconds
        return replace(
            stage,
            compute_seconds=compute,
            forward_seconds=forward,
            weight_gradient_seconds=None if weight is None else max(weight - own, 0.0),
        )

    return without
