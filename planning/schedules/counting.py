"""Count the activations and weight versions that a rank holds while it runs its list."""

from collections import Counter, deque
from collections.abc import Sequence

from ...schema.schedule import (
    DIFFERENTIATING,
    FREEING,
    PASSES,
    HeldMoment,
    Kind,
    Operation,
    Schedule,
    traits,
)


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


def most_under_way(schedule: Schedule, rank: int) -> tuple[int, int]:
    """Most messages of a rank whose buffers are kept: outputs, and gradients of inputs."""
    # At most peak_in_flight microbatches are outstanding. Once that many later messages were sent,
    # the oldest send was received and its buffer can be reused. Where passes alternate, a stage of
    # k microbatches in flight knows of all but k outputs, as their gradients came. Of gradients it
    # knows of all but k + 1 while outputs come, where the stage before has k + 1 in flight. If that
    # one has more replicas, it waits for their transfers, which were begun k passes before.
    peaks = peak_in_flight(schedule)
    has_one_stage = all(len(stages) == 1 for stages in schedule.stages_of_rank)
    if has_one_stage and traits(schedule.name).order == "alternating":
        return peaks[rank], peaks[rank] + 1
    return max(peaks), max(peaks)


def moments_by_stage(schedule: Schedule) -> tuple[tuple[HeldMoment, ...], ...]:
    """[stages] the moments at which a replica may hold most: none with less of everything."""
    found: list[set[HeldMoment]] = [set() for _ in schedule.placement]
    for rank in range(len(schedule.ranks)):
        for stage, moment in _moments(schedule, rank):
            found[stage].add(moment)
    return tuple(
        tuple(
            sorted(
                one
                for one in moments
                if not any(
                    other != one and all(a >= b for a, b in zip(other, one, strict=True))
                    for other in moments
                )
            )
        )
        for moments in found
    )


def _moments(schedule: Schedule, rank: int) -> list[tuple[int, HeldMoment]]:
    operations, found = schedule.ranks[rank], list[tuple[int, HeldMoment]]()
    limits = most_under_way(schedule, rank)
    answered = {op.stage for op in operations if op.kind is Kind.RECEIVE_GRADIENT}
    flying, halved = Counter[int](), Counter[int]()
    ways: tuple[deque[int], deque[int]] = (deque(), deque())
    for op in operations:
        if op.kind is Kind.FORWARD:
            flying[op.stage] += 1
        elif op.kind is Kind.BACKWARD_INPUT:
            halved[op.stage] += 1
        elif op.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            way = op.kind is Kind.SEND_GRADIENT
            ways[way].append(op.stage)
            if len(ways[way]) > limits[way]:
                ways[way].popleft()
        if op.kind in PASSES:
            for stage in schedule.stages_of_rank[rank]:
                k = flying[stage]
                sent = ways[0].count(stage) + (stage in answered)
                moment = HeldMoment(k, halved[stage], k, sent, ways[1].count(stage))
                found.append((stage, moment))
        if op.kind in FREEING:
            flying[op.stage] -= 1
        if op.kind is Kind.BACKWARD_WEIGHT:
            halved[op.stage] -= 1
    return found
