"""GPipe; and 1F1B-RR, the order that PipeDream, PipeDream-Flush and PipeDream-2BW share.

Thesis 2.4.2: in the startup phase a stage admits exactly as many inputs as keep the pipeline full;
then it alternates between one forward and one backward pass. The replicas of a stage take inputs
in turn, so both passes of a microbatch run on the same replica.
"""

from collections.abc import Sequence

from ...schema.schedule import Kind, PipelineShape, Schedule, WeightSemantics
from . import closed_forms
from .assemble import PassOrder, Slot, alternating, assemble
from .registry import schedule


def one_rank(microbatches: Sequence[int], stage: int, in_flight: int) -> list[Slot]:
    """Order one rank's passes: ``in_flight`` - 1 forward passes, then one of each in turn."""
    ahead = min(in_flight - 1, len(microbatches))
    return [
        ((Kind.BACKWARD if is_backward else Kind.FORWARD, stage, microbatch),)
        for is_backward, microbatch in alternating(microbatches, ahead)
    ]


@schedule("gpipe", replicas="any", order="forward-first")
def gpipe(shape: PipelineShape) -> Schedule:
    """Generate GPipe: all forward passes, then all backward passes, then one update (4.2.2)."""
    # Backward passes run in the order of the forward passes, as in figure 4.3. A rank holds the
    # activations of all its microbatches.
    return build("gpipe", shape, "flush", admits_all=True)


@schedule("1f1b", replicas="any", order="alternating", chunked_as="interleaved")
def flush(shape: PipelineShape) -> Schedule:
    """Generate PipeDream-Flush: 1F1B over one batch, then one update (3.2.2, figure 4.4 top)."""
    return build("1f1b", shape, "flush")


def build(
    name: str,
    shape: PipelineShape,
    semantics: WeightSemantics,
    per_update: int | None = None,
    *,
    admits_all: bool = False,
) -> Schedule:
    """Generate a schedule in 1F1B order.

    ``per_update`` are microbatches per update, if weights are double-buffered; ``admits_all`` lets
    stages admit all inputs first, not only as many as fill the pipeline.
    """
    shape.one_chunk(name)
    depth = [closed_forms.in_flight(shape.replicas, s) for s in range(len(shape.replicas))]
    if admits_all:
        depth = [shape.num_microbatches + 1] * len(depth)
    slots: list[list[Slot]] = []
    for position, count in enumerate(shape.replicas):
        for replica in range(count):
            mine = shape.microbatches_of(position, replica)
            slots.append(one_rank(mine, position, depth[position]))
    order = PassOrder(
        placement=shape.ranks_of_position,
        slots=slots,
        num_microbatches=shape.num_microbatches,
        microbatches_per_update=_round_lengths(shape, semantics, per_update),
        version=lambda stage, k: _version(shape, semantics, per_update, stage, k),
    )
    positions = [s for s, count in enumerate(shape.replicas) for _ in range(count)]
    return assemble(
        name,
        order,
        weight_semantics=semantics,
        max_in_flight=[
            min(depth[s], len(rank_slots) // 2)
            for s, rank_slots in zip(positions, slots, strict=True)
        ],
        max_weight_versions=[_versions_kept(semantics, depth, s) for s in positions],
    )


def _round_lengths(
    shape: PipelineShape, semantics: WeightSemantics, per_update: int | None
) -> Sequence[int] | None:
    if semantics == "flush":
        return None
    return shape.replicas if per_update is None else (per_update,) * len(shape.replicas)


def _version(
    shape: PipelineShape,
    semantics: WeightSemantics,
    per_update: int | None,
    stage: int,
    microbatch: int,
) -> int:
    """The weight version that microbatch k reads (2.4.3, 3.2.1); versions count from 0."""
    # Stashing: max(0, k - (p - stage) + 1) without replicas. A replicated stage makes one version
    # from one input on each replica, so its versions count rounds of inputs.
    if semantics == "stashing":
        ahead = closed_forms.in_flight(shape.replicas, stage)
        return max(0, microbatch // shape.replicas[stage] - ahead + 1)
    # The latest version of the input stage when k entered it.
    if semantics == "vertical-sync":
        return max(0, microbatch // shape.replicas[0] - shape.pipeline_parallel_size + 1)
    return 0 if per_update is None else max(0, microbatch // per_update - 1)


def _versions_kept(semantics: WeightSemantics, depth: Sequence[int], position: int) -> int:
    """Number of weight versions that one rank keeps (thesis table 7.1)."""
    return {
        "flush": 1,
        "stashing": depth[position],
        "vertical-sync": depth[0],
        "double-buffered": 2,
    }[semantics]
