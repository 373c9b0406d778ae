"""What a schedule is to the package, and where it is registered: its traits and its generator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..schema.errors import ProblemError
from ..schema.schedule_traits import SCHEDULES, ScheduleTraits
from .operations import Schedule
from .shape import PipelineShape

Generator = Callable[[PipelineShape], Schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec(ScheduleTraits):
    """A schedule: all that others must know of it, and how its list is made.

    Attributes:
        generate: The list of operations for a shape; refuses shapes that the schedule cannot have.
    """

    generate: Generator


def schedule(name: str, **stated: Any) -> Callable[[Generator], Generator]:
    """Register a generator as a schedule.

    Args:
        name: What plans and commands call it.
        stated: Fields of ``ScheduleTraits``.

    Returns:
        A decorator that leaves the generator as it is.
    """

    def register(generate: Generator) -> Generator:
        spec = ScheduleSpec(name=name, generate=generate, **stated)
        SCHEDULES.add(name, spec, generate.__module__)
        return generate

    return register


def spec_named(name: str) -> ScheduleSpec:
    """The schedule of a name.

    Raises:
        ProblemError: There is none, or what is registered has no generator.
    """
    found = SCHEDULES.get(name)
    if not isinstance(found, ScheduleSpec):
        raise ProblemError(
            f"schedule {name!r} is registered without a generator",
            hint="register it with @hetflow.schedules.registry.schedule",
        )
    return found


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
        name: Of a registered schedule (``SCHEDULES.names()``).
        pipeline_parallel_size: p, the positions of the pipeline.
        num_microbatches: Microbatches over all replicas: of one batch where the schedule
            flushes, of the whole run where it does not.
        num_model_chunks: v, stages on a rank, for schedules that have several (those placed in a
            V have 2 in any case).
        replicas: [positions] ranks that share a position; one each where None.
        microbatches_per_update: m of a double-buffered schedule; by default the least that two
            versions allow.

    Raises:
        ProblemError: Unknown name, or a shape the schedule cannot have; says which rule.
    """
    spec = spec_named(name)
    shape = PipelineShape(
        pipeline_parallel_size=pipeline_parallel_size,
        num_microbatches=num_microbatches,
        num_model_chunks=num_model_chunks,
        replicas=tuple(replicas or ()),
        microbatches_per_update=microbatches_per_update,
    )
    if microbatches_per_update is not None and not spec.is_double_buffered:
        raise ProblemError(
            f"{name} fixes when it updates; leave microbatches_per_update out", hint="or use 2bw"
        )
    return spec.generate(shape)
