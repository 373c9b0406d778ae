"""Eager 1F1B: a pipeline schedule with a longer warm-up, so that transfers overlap with passes.

Under 1F1B a stage waits a whole round trip for the gradient of its oldest microbatch. With nearly
twice as many forward passes before the first backward pass, it has other work in the meantime; it
holds up to twice the activations. A batch still ends with one update, so the trained bits are
those of 1F1B.
"""

from hetflow.plugins import PipelineShape, Schedule, one_rank, parallel_pipelines, schedule


@schedule("eager-1f1b", weight_semantics="flush", replicas="uniform", order="own")
def generate(shape: PipelineShape) -> Schedule:
    """Order the passes of one batch, on one pipeline for each replica of a stage."""
    shape.one_chunk("eager-1f1b")
    p, replicas = shape.pipeline_parallel_size, shape.parallel_pipelines("eager-1f1b")
    in_flight = [2 * (p - position) - 1 for position in range(p)]
    most = -(-shape.num_microbatches // replicas)
    return parallel_pipelines(
        "eager-1f1b",
        shape,
        positions=range(p),
        one_pipeline=lambda m: [
            one_rank(range(m), position, in_flight[position]) for position in range(p)
        ],
        max_in_flight=[min(held, most) for held in in_flight],
    )
