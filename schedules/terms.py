"""What a pipeline plan's predicted step is made of: terms that add up to it.

A pipeline's parts run side by side, so a term is what the step gets shorter by when the term is
taken away, one after another: updates, all-reduces, what messages cost beside their bytes, the
bytes, what passes cost beside their layers. What is left then is the layers' passes alone: those
of the busiest device, and the waiting that filling and uneven stages make. The order is from the
end of the step to its core; another would give terms that overlap differently and add up alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isclose

from ..schema.errors import ProblemError
from ..schema.pipeline import PipelinePlan, StagePlan
from .of_plan import flushes, schedule_of, times_of
from .timing import time_schedule

StepOf = Callable[[PipelinePlan], float]
"""Seconds of a plan's step by the times of its stages, without the step's fixed cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Seconds of a step, adding up to it.

    Attributes:
        layer_seconds: Passes of the layers on the device that has most of them.
        waiting_seconds: What more the layers' passes of all stages take in their order.
        pass_seconds: What passes cost beside their layers.
        message_seconds: What messages between stages cost beside their bytes.
        byte_seconds: Their bytes on the links.
        reduce_seconds: All-reduces that nothing hides, of tied weights too.
        update_seconds: Updates.
        fixed_seconds: Beside all that, once a step.
    """

    layer_seconds: float
    waiting_seconds: float
    pass_seconds: float
    message_seconds: float
    byte_seconds: float
    reduce_seconds: float
    update_seconds: float
    fixed_seconds: float


def step_terms(plan: PipelinePlan, step_of: StepOf | None = None) -> StepTerms | None:
    """Take a plan's predicted step apart.

    Args:
        plan: With all times of its stages.
        step_of: A faster way to the same step; None times the plan's schedule.

    Returns:
        None where the times of the stages do not tell the step: nested levels, the papers' prices,
        boundaries that were not counted, times that an older plan lacks.
    """
    if any(stage.reduce_seconds is None or stage.update_seconds is None for stage in plan.stages):
        return None
    fixed = plan.predicted.fixed_seconds or 0.0
    try:
        seconds = step_of or timer_of(plan)
        left = seconds(plan)
    except ProblemError:  # of a steady state alone, or without forward times
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


def timer_of(plan: PipelinePlan) -> StepOf:
    """How to time plans of one shape: a schedule that flushes event by event, others' pace.

    Raises:
        ProblemError: The schedule cannot have the plan's shape.
    """
    if not flushes(plan):
        return _steady_step
    schedule = schedule_of(plan)
    return lambda other: time_schedule(schedule, times_of(other)).makespan_seconds


def _steady_step(plan: PipelinePlan) -> float:
    """The slowest stage or boundary for all microbatches of a step (ring prices)."""
    count, slowest = plan.microbatches, 0.0
    for stage in plan.stages:
        share = count / stage.num_replicas
        often = share if plan.traits.updates_each_round else 1.0
        rounds = share if plan.traits.updates_each_round else ceil(share)
        busy = rounds * stage.compute_seconds + often * (stage.update_seconds or 0.0)
        rings = often * (stage.reduce_seconds or 0.0)
        slowest = max(slowest, busy, rings, count * stage.output_seconds)
    return slowest


def _busiest(plan: PipelinePlan) -> float:
    """All passes of the device that has most of them; of several stages where it holds them."""
    found: dict[tuple[str, int], float] = {}
    for stage in plan.stages:
        share = plan.microbatches / stage.num_replicas
        rounds = share if plan.traits.updates_each_round else ceil(share)
        device = (stage.device_type, stage.first_device)
        found[device] = found.get(device, 0.0) + rounds * stage.compute_seconds
    return max(found.values())


def _no_update(stage: StagePlan) -> StagePlan:
    return replace(stage, update_seconds=0.0)


def _no_reduction(stage: StagePlan) -> StagePlan:
    return replace(stage, reduce_seconds=0.0, tied_seconds=None)


def _no_message_cost(stage: StagePlan) -> StagePlan:
    seconds = stage.output_seconds - 2 * (stage.message_seconds or 0.0)
    return replace(stage, output_seconds=max(seconds, 0.0))


def _no_bytes(stage: StagePlan) -> StagePlan:
    return replace(stage, output_seconds=0.0)


def _bare(halves: int) -> Callable[[StagePlan], StagePlan]:
    """Passes of layers alone; a backward pass is in so many parts."""

    def without(stage: StagePlan) -> StagePlan:
        own = stage.pass_seconds or 0.0
        forward = max((stage.forward_seconds or 0.0) - own, 0.0)
        compute = max(stage.compute_seconds - (1 + halves) * own, forward)
        return replace(stage, compute_seconds=compute, forward_seconds=forward)

    return without


def total_seconds(terms: StepTerms) -> float:
    """The step."""
    parts: Sequence[float] = [getattr(terms, name) for name in StepTerms.__slots__]
    return sum(parts)
