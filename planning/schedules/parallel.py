"""Several equal pipelines side by side, each running a share of the microbatches.

This replicates schedules that are defined for one pipeline only. Replica j of every position
belongs to pipeline j, which runs microbatches j, j + d, j + 2d, ... (the parallel pipelines of
thesis 3.2.3).
"""

from collections.abc import Callable, Sequence

from ...schema.schedule import PipelineShape, Schedule
from .assemble import PassOrder, Slot, assemble

Pipeline = Sequence[Sequence[Slot]]


def parallel_pipelines(
    name: str,
    shape: PipelineShape,
    *,
    positions: Sequence[int],
    one_pipeline: Callable[[int], Pipeline],
    max_in_flight: Sequence[int],
) -> Schedule:
    """Build the flushing schedule of d copies of one pipeline.

    Args:
        name: The schedule's name.
        shape: The requested degrees and counts.
        positions: [stages] the position in the pipeline that holds each stage.
        one_pipeline: Number of microbatches -> [positions] slots of one pipeline, which numbers
            its microbatches from 0.
        max_in_flight: [positions] the promised bound on activations held.
    """
    count = shape.parallel_pipelines(name)
    shares = [len(shape.microbatches_of(0, replica)) for replica in range(count)]
    pipelines = {share: one_pipeline(share) for share in set(shares)}
    slots = [
        [
            tuple((kind, stage, k * count + replica) for kind, stage, k in slot)
            for slot in pipelines[shares[replica]][position]
        ]
        for position in range(shape.pipeline_parallel_size)
        for replica in range(count)
    ]
    order = PassOrder(
        placement=tuple(shape.ranks_of_position[position] for position in positions),
        slots=slots,
        num_microbatches=shape.num_microbatches,
    )
    return assemble(
        name,
        order,
        max_in_flight=[bound for bound in max_in_flight for _ in range(count)],
        max_weight_versions=[1] * len(slots),
    )
