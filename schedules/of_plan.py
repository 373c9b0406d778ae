"""The schedule that a pipeline plan names, and the times it predicts for it."""

from ..schema.errors import ProblemError
from ..schema.pipeline import PipelinePlan
from .operations import Schedule
from .registry import generate
from .timing import StageTimes

# Schedules without a flush are endless; this many updates show their steady state.
_UPDATES_SHOWN = 3


def schedule_of(plan: PipelinePlan) -> Schedule:
    """The operations of one batch; of several where the plan's schedule never flushes.

    Raises:
        ProblemError: The schedule cannot have the plan's shape (replicas, microbatches).
    """
    replicas = [stage.num_replicas for stage in plan.stages]
    microbatches = plan.microbatches
    endless = plan.schedule in ("pipedream", "pipedream-vertical-sync", "2bw")
    return generate(
        plan.schedule,
        pipeline_parallel_size=len(plan.stages),
        num_microbatches=microbatches * _UPDATES_SHOWN if endless else microbatches,
        replicas=replicas,
        microbatches_per_update=microbatches if plan.schedule == "2bw" else None,
    )


def times_of(plan: PipelinePlan) -> StageTimes:
    """Seconds of each stage's passes and transfers, as the plan predicts them.

    A boundary's ``output_seconds`` covers an activation and its gradient: half for each.

    Raises:
        ProblemError: The plan does not tell forward from backward time.
    """
    forward: list[float] = []
    for stage in plan.stages:
        if stage.forward_seconds is None:
            raise ProblemError(
                "the plan does not tell forward from backward time", hint="solve it again"
            )
        forward.append(stage.forward_seconds)
    backward = [
        stage.compute_seconds - seconds for stage, seconds in zip(plan.stages, forward, strict=True)
    ]
    links = tuple(stage.output_seconds / 2 for stage in plan.stages[:-1])
    return StageTimes(
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        activation_seconds=links,
        gradient_seconds=links,
    )
