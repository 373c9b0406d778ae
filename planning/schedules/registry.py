"""Registering a schedule, and generating its lists by name."""

from collections.abc import Callable, Sequence
from typing import Any

from ...schema.errors import ProblemError
from ...schema.schedule import (
    SCHEDULES,
    Generator,
    PipelineShape,
    Schedule,
    ScheduleTraits,
    generator_of,
    traits,
)


def schedule(name: str, **stated: Any) -> Callable[[Generator], Generator]:
    """Register a generator as a schedule.

    Args:
        name: The schedule's name in plans and commands.
        stated: Fields of ``ScheduleTraits``.

    Returns:
        A decorator that returns the generator unchanged.
    """

    def register(generate: Generator) -> Generator:
        spec = ScheduleTraits(name=name, generate=generate, **stated)
        SCHEDULES.add(name, spec, generate.__module__)
        return generate

    return register


def generate(
    name: str,
    *,
    pipeline_parallel_size: int,
    num_microbatches: int,
    num_model_chunks: int = 1,
    replicas: Sequence[int] | None = None,
    microbatches_per_update: int | None = None,
) -> Schedule:
    """Generate a schedule.

    Args:
        name: Name of a registered schedule (``SCHEDULES.names()``).
        pipeline_parallel_size: p, the number of positions of the pipeline.
        num_microbatches: Microbatches over all replicas: of one batch if the schedule flushes,
            else of the whole run.
        num_model_chunks: v, stages per rank, for schedules that allow several (schedules placed
            in a V always have 2).
        replicas: [positions] number of ranks that share a position; None for one each.
        microbatches_per_update: m of a double-buffered schedule; None takes the least that two
            versions allow.

    Raises:
        ProblemError: The name is unknown, or the schedule does not support the shape (the message
            states the rule), or a plug-in generates something else.
    """
    shape = PipelineShape(
        pipeline_parallel_size=pipeline_parallel_size,
        num_microbatches=num_microbatches,
        num_model_chunks=num_model_chunks,
        replicas=tuple(replicas or ()),
        microbatches_per_update=microbatches_per_update,
    )
    if microbatches_per_update is not None and not traits(name).is_double_buffered:
        raise ProblemError(
            f"{name} fixes when it updates; leave microbatches_per_update out", hint="or use 2bw"
        )
    made = generator_of(name)(shape)
    if not isinstance(made, Schedule):
        raise ProblemError(f"schedule {name!r} generated {type(made).__name__}, not a Schedule")
    return made
