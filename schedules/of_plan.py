"""The schedule of a pipeline plan, and the times that the plan predicts for it."""

from collections.abc import Sequence

from ..schema.errors import ProblemError
from ..schema.operations import Schedule
from ..schema.pipeline_shape import PipelineShape
from ..schema.plan import Plan
from ..schema.schedule_traits import generator_of
from .timing import StageTimes

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
        num_microbatches=microbatches * _UPDATES_SHOWN if not flushes(plan) else microbatches,
        num_model_chunks=plan.num_model_chunks,
        replicas=tuple(replicas),
        microbatches_per_update=microbatches if plan.traits.is_double_buffered else None,
    )


def times_of(plan: Plan) -> StageTimes:
    """Return the seconds of each stage's passes and transfers that the plan predicts.

    A stage's ``output_seconds`` are for an activation and its gradient; each takes half.

    Raises:
        ProblemError: The plan does not separate forward and backward time.
    """
    forward: list[float] = []
    for stage in plan.stages:
        if stage.forward_seconds is None:
            raise ProblemError(
                "the plan does not tell forward from backward time", hint="solve it again"
            )
        forward.append(stage.forward_seconds)
    backward = [
        (stage.compute_seconds or 0.0) - seconds
        for stage, seconds in zip(plan.stages, forward, strict=True)
    ]
    links = tuple((stage.output_seconds or 0.0) / 2 for stage in plan.stages[:-1])
    reduces = [stage.reduce_seconds for stage in plan.stages]
    updates = [
        None if stage.update_seconds is None else stage.update_seconds + (stage.tied_seconds or 0)
        for stage in plan.stages
    ]
    return StageTimes(
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        activation_seconds=links,
        gradient_seconds=links,
        reduce_seconds=_all_or_none(reduces) if flushes(plan) else None,
        update_seconds=_all_or_none(updates) if flushes(plan) else None,
    )


def flushes(plan: Plan) -> bool:
    """Whether the plan's schedule ends each batch with one update.

    Without a flush, all-reduces and updates overlap with other work, as in the plan's stage costs.
    """
    return plan.traits.flushes


def _all_or_none(seconds: Sequence[float | None]) -> tuple[float, ...] | None:
    stated = tuple(value for value in seconds if value is not None)
    return stated if len(stated) == len(seconds) else None
