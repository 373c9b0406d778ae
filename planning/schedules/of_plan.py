"""The schedule of a pipeline plan, and the times that the plan predicts for it."""

from collections.abc import Sequence

from ...schema.errors import ProblemError
from ...schema.plan import Plan, Stage
from ...schema.schedule import PipelineShape, Schedule, generator_of
from .timing import StageTimes, Timing, time_schedule

# Schedules without a flush never end; this number of updates shows their steady state.
_UPDATES_SHOWN = 3


def schedule_of(plan: Plan) -> Schedule:
    """Generate the plan's schedule for one batch, or for several if it never flushes.

    Raises:
        ProblemError: The schedule does not support the plan's replicas or microbatches.
    """
    return generator_of(plan.schedule)(shape_of(plan))


def shape_of(plan: Plan) -> PipelineShape:
    """Return the shape of the plan's schedule: of one batch, or of several without a flush."""
    replicas = plan.position_replicas
    microbatches = plan.num_microbatches
    return PipelineShape(
        pipeline_parallel_size=len(replicas),
        num_microbatches=microbatches * (1 if plan.traits.flushes else _UPDATES_SHOWN),
        num_model_chunks=plan.num_model_chunks,
        replicas=tuple(replicas),
        microbatches_per_update=microbatches if plan.traits.is_double_buffered else None,
    )


def times_of(stages: Sequence[Stage], *, flushes: bool) -> StageTimes:
    """Return the seconds of passes and transfers that the stages of a plan predict.

    A stage's ``output_seconds`` are for an activation and its gradient; each takes half. Without a
    flush, all-reduces and updates overlap with other work, as in the stages' costs.

    Raises:
        ProblemError: The stages do not separate forward and backward time.
    """
    forward = _all_or_none([stage.forward_seconds for stage in stages])
    if forward is None:
        raise ProblemError(
            "the plan does not tell forward from backward time", hint="solve it again"
        )
    backward = [
        max((stage.compute_seconds or 0.0) - seconds, 0.0)  # below by rounding alone
        for stage, seconds in zip(stages, forward, strict=True)
    ]
    halves = [
        whole / 2 if stage.weight_gradient_seconds is None else stage.weight_gradient_seconds
        for stage, whole in zip(stages, backward, strict=True)
    ]
    links = tuple((stage.output_seconds or 0.0) / 2 for stage in stages[:-1])
    updates = [
        None if stage.update_seconds is None else stage.update_seconds + (stage.tied_seconds or 0)
        for stage in stages
    ]
    return StageTimes(
        forward_seconds=forward,
        backward_seconds=tuple(backward),
        backward_weight_seconds=tuple(map(min, halves, backward)),
        activation_seconds=links,
        gradient_seconds=links,
        reduce_seconds=_all_or_none([s.reduce_seconds for s in stages]) if flushes else None,
        update_seconds=_all_or_none(updates) if flushes else None,
    )


def timed(plan: Plan) -> Timing:
    """Time the schedule of a plan with its own seconds.

    Raises:
        ProblemError: The schedule does not support the plan's shape, or the plan does not separate
            forward and backward time.
    """
    return time_schedule(schedule_of(plan), times_of(plan.stages, flushes=plan.traits.flushes))


def _all_or_none(seconds: Sequence[float | None]) -> tuple[float, ...] | None:
    stated = tuple(value for value in seconds if value is not None)
    return stated if len(stated) == len(seconds) else None
