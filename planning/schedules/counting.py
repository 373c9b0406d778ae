"""Count the activations and weight versions that a rank holds while it runs its list."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

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

    Activations count until the weight gradient is computed, or else until the gradient of the input
    is, as in some papers on split backward passes.
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


class DeviceMoment(NamedTuple):
    """What one rank holds at a pass of its schedule."""

    running: int
    """The stage of the pass."""
    in_flight: int
    """Microbatches that some stage of the rank has in flight."""
    held: tuple[HeldMoment, ...]
    """Of each of the rank's stages, in their order."""


def moments_by_rank(schedule: Schedule) -> tuple[tuple[DeviceMoment, ...], ...]:
    """[ranks] the moments at which a rank may hold most: none with less of everything."""
    return tuple(_fullest(_moments(schedule, rank)) for rank in range(schedule.num_ranks))


def moments_by_stage(
    schedule: Schedule, moments: Sequence[Sequence[DeviceMoment]]
) -> tuple[tuple[HeldMoment, ...], ...]:
    """[stages] of these moments [ranks], those at which a replica of a stage may hold most."""
    found: list[set[DeviceMoment]] = [set() for _ in schedule.placement]
    for stages, of_rank in zip(schedule.stages_of_rank, moments, strict=True):
        for together in of_rank:
            for stage, moment in zip(stages, together.held, strict=True):
                found[stage].add(DeviceMoment(stage, moment.in_flight, (moment,)))
    return tuple(tuple(sorted(one.held[0] for one in _fullest(each))) for each in found)


def _fullest(moments: Collection[DeviceMoment]) -> tuple[DeviceMoment, ...]:
    """The moments that no other one of the same stage's passes exceeds in everything."""
    kept: list[DeviceMoment] = []
    table = np.empty((len(moments), 0), np.int64)
    # Descending: what exceeds a moment comes before it.
    for one in sorted(moments, reverse=True):
        numbers = np.array([one.running, one.in_flight, *chain(*one.held)])
        if not kept:
            table = np.empty((len(moments), len(numbers)), np.int64)
        known = table[: len(kept)]
        if not ((known[:, 0] == numbers[0]) & (known >= numbers).all(axis=1)).any():
            table[len(kept)] = numbers
            kept.append(one)
    return tuple(kept)


def _moments(schedule: Schedule, rank: int) -> set[DeviceMoment]:
    operations, stages = schedule.ranks[rank], schedule.stages_of_rank[rank]
    limits, found = most_under_way(schedule, rank), set[DeviceMoment]()
    answered = {op.stage for op in operations if op.kind is Kind.RECEIVE_GRADIENT}
    halved, alive = Counter[int](), Counter[int]()
    flying = {stage: set[int]() for stage in stages}
    summed = set[int]()  # stages that have gradients
    ways: tuple[deque[int], deque[int]] = (deque(), deque())
    for op in operations:
        if op.kind is Kind.FORWARD:
            flying[op.stage].add(op.microbatch)
            alive[op.microbatch] += 1
        elif op.kind is Kind.BACKWARD_INPUT:
            halved[op.stage] += 1
        elif op.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            way = op.kind is Kind.SEND_GRADIENT
            ways[way].append(op.stage)
            if len(ways[way]) > limits[way]:
                ways[way].popleft()
        if op.kind in PASSES:
            held = tuple(
                HeldMoment(
                    len(flying[stage]),
                    halved[stage],
                    # What the stage before hands over here waits; then its gradient does.
                    len(flying[stage].union(flying.get(stage - 1, ()))),
                    ways[0].count(stage) + (stage in answered),
                    ways[1].count(stage),
                    stage in summed,
                )
                for stage in stages
            )
            found.add(DeviceMoment(op.stage, len(alive), held))
        if op.kind in FREEING:
            flying[op.stage].remove(op.microbatch)
            summed.add(op.stage)
            alive -= Counter({op.microbatch: 1})
        if op.kind is Kind.BACKWARD_WEIGHT:
            halved[op.stage] -= 1
    return found
