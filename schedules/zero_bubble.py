"""ZB-H1 and ZB-H2: backward passes split so that weight gradients fill the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024). The backward pass is split into the
gradient of the input (B), which other ranks wait for, and that of the weights (W), which no rank
waits for. H1 holds no more activations than 1F1B does on its first rank. H2 holds twice as many,
where an activation counts half after its B. If F, B and W take equally long, H2 leaves no bubble in
a rank's own span.
"""

from collections.abc import Callable

from ..schema.errors import ProblemError
from ..schema.operations import Kind, Schedule
from ..schema.pipeline_shape import PipelineShape
from .assemble import Slot
from .parallel import Pipeline, parallel_pipelines
from .registry import schedule
from .zero_bubble_search import search


@schedule("zb-h1", splits_backward=True)
def h1(shape: PipelineShape) -> Schedule:
    """Generate ZB-H1: 1F1B with weight gradients delayed by the rank's position in the pipeline."""
    p = shape.pipeline_parallel_size
    return _build("zb-h1", shape, lambda m: _handcrafted(p, m), p)


@schedule("zb-h2", splits_backward=True)
def h2(shape: PipelineShape) -> Schedule:
    """Generate ZB-H2: more forward passes in the startup, 2p - 1 microbatches, no bubble.

    The order is found by the paper's heuristic, for F = B = W.
    """
    p = shape.pipeline_parallel_size
    most = 2 * p - 1
    return _build("zb-h2", shape, lambda m: search(p, m, max_in_flight=most), most)


def _build(
    name: str, shape: PipelineShape, one_pipeline: Callable[[int], Pipeline], most_in_flight: int
) -> Schedule:
    shape.one_chunk(name)
    count, p = shape.parallel_pipelines(name), shape.pipeline_parallel_size
    if shape.num_microbatches < count * p:
        raise ProblemError(
            f"{name} needs at least {p} microbatches in each pipeline, got "
            f"{shape.num_microbatches // count}",
            hint="use 1f1b for few microbatches",
        )
    most = -(-shape.num_microbatches // count)
    return parallel_pipelines(
        name,
        shape,
        positions=range(p),
        one_pipeline=one_pipeline,
        max_in_flight=[min(most_in_flight, most)] * p,
    )


def _handcrafted(p: int, m: int) -> list[list[Slot]]:
    pipeline = []
    for position in range(p):
        ahead = p - position
        slots: list[Slot] = [((Kind.FORWARD, position, k),) for k in range(ahead)]
        for k in range(m):
            slots.append(((Kind.BACKWARD_INPUT, position, k),))
            if k >= position:
                slots.append(((Kind.BACKWARD_WEIGHT, position, k - position),))
            if k + ahead < m:
                slots.append(((Kind.FORWARD, position, k + ahead),))
        slots += [((Kind.BACKWARD_WEIGHT, position, k),) for k in range(m - position, m)]
        pipeline.append(slots)
    return pipeline
