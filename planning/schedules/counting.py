"""Count the activations and weight versions that a rank holds while it runs its list."""

from collections.abc import Sequence

from ...schema.schedule import DIFFERENTIATING, FREEING, PASSES, Kind, Operation, Schedule


def peak_in_flight(schedule: Schedule, *, until_weight_gradient: bool = True) -> tuple[int, ...]:
    """[ranks] the most (stage, microbatch) pairs whose activations a rank holds at once.

    Args:
        schedule: The schedule.
        until_weight_gradient: Whether activations count until the weight gradient is computed;
            otherwise until the gradient of the input is, as in some papers on split backward
            passes.
    """
    freeing = FREEING if until_weight_gradient else DIFFERENTIATING
    return tuple(_peak(operations, freeing) for operations in schedule.ranks)


def _peak(operations: Sequence[Operation], freeing: frozenset[Kind]) -> int:
    held = peak = 0
    for operation in operations:
        if operation.kind is Kind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif operation.kind in freeing:
            held -= 1
    return peak


def peak_weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """[ranks] the most versions of one stage's weights that a rank must hold at once."""
    # A version is held from the update that writes it until there is a newer one and no later pass
    # of the rank reads it.
    return tuple(
        max((_versions(operations, stage) for stage in stages), default=0)
        for operations, stages in zip(schedule.ranks, schedule.stages_of_rank, strict=True)
    )


def _versions(operations: Sequence[Operation], stage: int) -> int:
    mine = [op for op in operations if op.stage == stage and op.weight_version is not None]
    last_read = {op.weight_version: at for at, op in enumerate(mine) if op.kind in PASSES}
    live, latest, peak = {0}, 0, 1
    for at, operation in enumerate(mine):
        if operation.kind is Kind.UPDATE and operation.weight_version is not None:
            if last_read.get(latest, -1) < at:
                live.discard(latest)
            latest = operation.weight_version
            live.add(latest)
            peak = max(peak, len(live))
        elif last_read[operation.weight_version] == at and operation.weight_version != latest:
            live.discard(operation.weight_version or 0)
    return peak


def held_by_stage(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """[stages] most microbatches in flight, and most weight versions, that a replica holds."""
    found = []
    for stage, ranks in enumerate(schedule.placement):
        mine = [[op for op in schedule.ranks[rank] if op.stage == stage] for rank in ranks]
        in_flight = max(_peak(operations, FREEING) for operations in mine)
        found.append((in_flight, max(_versions(operations, stage) for operations in mine)))
    return tuple(found)
