"""The schedules by name."""

from collections.abc import Callable, Sequence

from ..schema.errors import ProblemError
from ..schema.records import nearest
from . import dualpipe, gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from .operations import Schedule
from .shape import PipelineShape

GENERATORS: dict[str, Callable[[PipelineShape], Schedule]] = {
    "gpipe": gpipe.generate,
    "1f1b": one_f_one_b.flush,
    "pipedream": one_f_one_b.pipedream,
    "pipedream-vertical-sync": one_f_one_b.pipedream_vertical_sync,
    "2bw": one_f_one_b.pipedream_2bw,
    "interleaved": interleaved.generate,
    "zb-h1": zero_bubble.h1,
    "zb-h2": zero_bubble.h2,
    "zb-v": zero_bubble_v.generate,
    "dualpipe": dualpipe.bidirectional,
    "dualpipe-v": dualpipe.v_shaped,
}
NAMES = tuple(GENERATORS)


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
        name: One of ``NAMES``.
        pipeline_parallel_size: p, the positions of the pipeline.
        num_microbatches: Microbatches over all replicas: of one batch where the schedule
            flushes, of the whole run for ``pipedream``, ``pipedream-vertical-sync`` and ``2bw``.
        num_model_chunks: v, stages on a rank; for ``interleaved``, ``zb-v`` and ``dualpipe-v``
            (which have 2 in any case).
        replicas: [positions] ranks that share a position; one each where None.
        microbatches_per_update: m of ``2bw``; by default the least that two versions allow.

    Raises:
        ProblemError: Unknown name, or a shape the schedule cannot have; says which rule.
    """
    if name not in GENERATORS:
        guess = nearest(name, NAMES)
        raise ProblemError(
            f"unknown schedule {name!r}; known are {', '.join(NAMES)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    shape = PipelineShape(
        pipeline_parallel_size=pipeline_parallel_size,
        num_microbatches=num_microbatches,
        num_model_chunks=num_model_chunks,
        replicas=tuple(replicas or ()),
        microbatches_per_update=microbatches_per_update,
    )
    if name != "2bw" and microbatches_per_update is not None:
        raise ProblemError(
            f"{name} fixes when it updates; leave microbatches_per_update out", hint="or use 2bw"
        )
    return GENERATORS[name](shape)
