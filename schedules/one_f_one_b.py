"""1F1B and 1F1B-RR: the order that PipeDream, PipeDream-Flush and PipeDream-2BW share.

Thesis 2.4.2: in the startup phase a stage admits just as many inputs as keep the pipeline full,
then it alternates between one forward and one backward pass. Inputs go to the replicas of a
stage in turn, so a microbatch meets the same replica forward and backward.
"""

from collections.abc import Sequence

from ..schema.errors import ProblemError
from . import closed_forms
from .assemble import Order, Slot, assemble
from .operations import Kind, Schedule, WeightSemantics
from .shape import PipelineShape


def one_rank(microbatches: Sequence[int], stage: int, in_flight: int) -> list[Slot]:
    """The passes of one rank: ``in_flight`` - 1 forward passes, then one of each in turn."""
    ahead = min(in_flight - 1, len(microbatches))
    slots: list[Slot] = [((Kind.FORWARD, stage, k),) for k in microbatches[:ahead]]
    for number, microbatch in enumerate(microbatches):
        if number + ahead < len(microbatches):
            slots.append(((Kind.FORWARD, stage, microbatches[number + ahead]),))
        slots.append(((Kind.BACKWARD, stage, microbatch),))
    return slots


def flush(shape: PipelineShape) -> Schedule:
    """PipeDream-Flush: 1F1B over one batch with one update at its end (3.2.2, figure 4.4 top)."""
    return _build("1f1b", shape, "flush")


def pipedream(shape: PipelineShape) -> Schedule:
    """PipeDream: 1F1B-RR without flushes, with weight stashing (2.4.2, 2.4.3).

    A stage updates after every backward pass; with R replicas after one on each of them, from
    the mean of the R gradients. A forward pass reads the latest version, its backward pass the
    same one.
    """
    return _build("pipedream", shape, "stashing")


def pipedream_vertical_sync(shape: PipelineShape) -> Schedule:
    """PipeDream with vertical sync: every stage reads what the input stage read (2.4.3).

    Versions of stages with unlike numbers of replicas do not correspond, so all stages must
    have as many.
    """
    shape.parallel_pipelines("pipedream-vertical-sync")
    return _build("pipedream-vertical-sync", shape, "vertical-sync")


def pipedream_2bw(shape: PipelineShape) -> Schedule:
    """PipeDream-2BW: 1F1B without flushes, one update each m microbatches, two versions (3.2.1).

    m is ``microbatches_per_update`` (by default the least one allowed). It must cover what a
    stage has in flight (p where no stage is replicated), else two versions do not suffice, and
    divide the number of microbatches.
    """
    least = max(
        closed_forms.in_flight(shape.replicas, position) * count
        for position, count in enumerate(shape.replicas)
    )
    per_update = shape.microbatches_per_update or least
    if per_update < least:
        raise ProblemError(
            f"2bw cannot keep to two weight versions with {per_update} microbatches per update; "
            f"ask for at least {least}"
        )
    if shape.num_microbatches % per_update:
        raise ProblemError(
            f"{shape.num_microbatches} microbatches are not whole updates of {per_update}; "
            f"make them a multiple"
        )
    return _build("2bw", shape, "double-buffered", per_update)


def _build(
    name: str, shape: PipelineShape, semantics: WeightSemantics, per_update: int | None = None
) -> Schedule:
    shape.one_chunk(name)
    depth = [closed_forms.in_flight(shape.replicas, s) for s in range(len(shape.replicas))]
    slots: list[list[Slot]] = []
    for position, count in enumerate(shape.replicas):
        for replica in range(count):
            mine = shape.microbatches_of(position, replica)
            slots.append(one_rank(mine, position, depth[position]))
    order = Order(
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
    if semantics == "stashing":
        return closed_forms.stashing_version(shape.replicas, stage, microbatch)
    if semantics == "vertical-sync":
        size, count = shape.pipeline_parallel_size, shape.replicas[0]
        return closed_forms.vertical_sync_version(size, count, microbatch)
    if per_update is not None:
        return closed_forms.double_buffered_version(per_update, microbatch)
    return 0


def _versions_kept(semantics: WeightSemantics, depth: Sequence[int], position: int) -> int:
    """Table 7.1's weight column, for one rank."""
    return {
        "flush": 1,
        "stashing": depth[position],
        "vertical-sync": depth[0],
        "double-buffered": 2,
    }[semantics]
