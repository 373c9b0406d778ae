"""Validate a schedule against the definitions: data, deadlocks, bounds and weight versions.

Nothing is shared with the generators. Weight versions are checked against the papers' definitions
(thesis 2.4.3, 3.2.1), not against a generator's numbering.
"""

from collections import defaultdict
from collections.abc import Iterator

from ..schema.operations import (
    DIFFERENTIATING,
    PASSES,
    RECEIVES,
    SENDS,
    Kind,
    Message,
    Operation,
    Schedule,
    message_of,
)
from . import validate_versions
from .counting import peak_in_flight, peak_weight_versions
from .walk import walk

Key = tuple[Kind, int, int]


def validate(schedule: Schedule) -> list[str]:
    """List every fault of a schedule.

    These rules are checked:

    * ranks, stages and microbatches exist;
    * each microbatch runs once forward and once backward on each stage, both on one rank;
    * every pass has its input, and every result is sent to where it is needed;
    * the messages of each channel are received in the order in which they are sent;
    * no rank waits forever;
    * the promised bounds on activations and weight versions hold;
    * every pass reads the version that the schedule's weight semantics require.

    Returns:
        One sentence per fault; empty if the schedule is valid. Later checks are skipped if earlier
        faults make them impossible.
    """
    faults = list(_structure(schedule))
    if faults:
        return faults
    holder = _holders(schedule)
    faults += _completeness(schedule)
    for rank in range(schedule.num_ranks):
        faults += _inputs_and_outputs(schedule, rank, holder)
    faults += _channels(schedule)
    faults += _deadlock(schedule)
    if not faults:
        faults += validate_versions.faults_of(schedule)
    return faults + list(_bounds(schedule))


def describe(operation: Operation) -> str:
    """Describe an operation in words: ``forward of stage 2, microbatch 5``."""
    return (
        f"{operation.kind.replace('_', ' ')} of stage {operation.stage}, "
        f"microbatch {operation.microbatch}"
    )


def _structure(schedule: Schedule) -> Iterator[str]:
    ranks = range(schedule.num_ranks)
    if not schedule.placement or not schedule.num_microbatches:
        yield "a schedule needs at least one stage and one microbatch"
    for stage, holders in enumerate(schedule.placement):
        if not holders or len(set(holders)) < len(holders) or not set(holders) <= set(ranks):
            yield f"stage {stage} stands on ranks {holders}, of {len(ranks)} ranks"
    for rank, operations in enumerate(schedule.ranks):
        held = {stage for stage, ranks_ in enumerate(schedule.placement) if rank in ranks_}
        for operation in operations:
            where = f"rank {rank}: {describe(operation)}"
            if operation.stage not in held:
                yield f"{where}: the rank does not hold the stage"
            last = operation.microbatch + operation.num_microbatches
            if not 0 <= operation.microbatch < last <= schedule.num_microbatches:
                yield f"{where}: there are {schedule.num_microbatches} microbatches"
            transfer = operation.kind in SENDS or operation.kind in RECEIVES
            if transfer != (operation.peer is not None):
                yield f"{where}: peer {operation.peer}"
            elif transfer and (operation.peer not in ranks or operation.peer == rank):
                yield f"{where}: no other rank {operation.peer}"
            versioned = operation.kind in PASSES or operation.kind is Kind.UPDATE
            if versioned != (operation.weight_version is not None):
                yield f"{where}: weight version {operation.weight_version}"


def _holders(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(stage, microbatch) -> the rank that runs its forward pass."""
    return {
        (operation.stage, operation.microbatch): rank
        for rank, operations in enumerate(schedule.ranks)
        for operation in operations
        if operation.kind is Kind.FORWARD
    }


def _completeness(schedule: Schedule) -> Iterator[str]:
    runs: dict[tuple[int, int], list[tuple[Kind, int]]] = defaultdict(list)
    for rank, operations in enumerate(schedule.ranks):
        for operation in operations:
            if operation.kind in PASSES:
                runs[operation.stage, operation.microbatch].append((operation.kind, rank))
    whole = [Kind.BACKWARD, Kind.FORWARD]
    split = [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FORWARD]
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            found = runs[stage, microbatch]
            kinds = sorted(kind for kind, _ in found)
            if kinds not in (whole, split):
                yield (
                    f"stage {stage}, microbatch {microbatch}: needs one forward and one backward "
                    f"pass, has {', '.join(kinds) or 'none'}"
                )
            elif len({rank for _, rank in found}) > 1:
                yield f"stage {stage}, microbatch {microbatch}: passes on several ranks"


def _inputs_and_outputs(
    schedule: Schedule, rank: int, holder: dict[tuple[int, int], int]
) -> Iterator[str]:
    """Check that one rank's data is there before it is used, and made before it is sent."""
    done: set[Key] = set()
    for operation in schedule.ranks[rank]:
        stage, microbatch = operation.stage, operation.microbatch
        for need in _needs(operation, rank, schedule.num_stages, holder):
            if need not in done:
                yield (
                    f"rank {rank}: {describe(operation)} before {need[0].replace('_', ' ')} of "
                    f"stage {need[1]}, microbatch {need[2]}"
                )
        done.add((_phase(operation.kind), stage, microbatch))
    for operation in schedule.ranks[rank]:
        kind = {Kind.FORWARD: Kind.SEND_ACTIVATION}.get(operation.kind)
        kind = Kind.SEND_GRADIENT if operation.kind in DIFFERENTIATING else kind
        step = 1 if operation.kind is Kind.FORWARD else -1
        peer = holder.get((operation.stage + step, operation.microbatch), rank)
        key = (kind, operation.stage, operation.microbatch)
        if kind is not None and peer != rank and key not in done:
            yield f"rank {rank}: the result of {describe(operation)} is never sent to rank {peer}"


def _needs(
    operation: Operation, rank: int, num_stages: int, holder: dict[tuple[int, int], int]
) -> Iterator[Key]:
    kind, stage, microbatch = operation.kind, operation.stage, operation.microbatch
    if kind is Kind.FORWARD and stage > 0:
        here = holder.get((stage - 1, microbatch)) == rank
        before = (Kind.FORWARD, stage - 1) if here else (Kind.RECEIVE_ACTIVATION, stage)
        yield (*before, microbatch)
    if kind in DIFFERENTIATING:
        yield Kind.FORWARD, stage, microbatch
        if stage + 1 < num_stages:
            here = holder.get((stage + 1, microbatch)) == rank
            before = (Kind.BACKWARD_INPUT, stage + 1) if here else (Kind.RECEIVE_GRADIENT, stage)
            yield (*before, microbatch)
    if kind in (Kind.BACKWARD_WEIGHT, Kind.SEND_GRADIENT):
        yield Kind.BACKWARD_INPUT, stage, microbatch
    if kind is Kind.SEND_ACTIVATION:
        yield Kind.FORWARD, stage, microbatch


def _phase(kind: Kind) -> Kind:
    """Treat a whole backward pass as its first part, since both make the input's gradient."""
    return Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else kind


def _channels(schedule: Schedule) -> Iterator[str]:
    sent: dict[tuple[int, int, bool], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int, bool], list[Message]] = defaultdict(list)
    for rank, operations in enumerate(schedule.ranks):
        for operation in operations:
            if operation.kind in SENDS or operation.kind in RECEIVES:
                message = message_of(operation, rank)
                side = sent if operation.kind in SENDS else received
                side[message[3], message[4], message[0]].append(message)
    for channel in sorted(set(sent) | set(received)):
        if sent[channel] == received[channel]:
            continue
        what = "activations" if channel[2] else "gradients"
        same = sorted(sent[channel]) == sorted(received[channel])
        yield (
            f"rank {channel[0]} sends {what} to rank {channel[1]} "
            + ("in another order than they are received" if same else "that are not all received")
            + f" ({len(sent[channel])} sent, {len(received[channel])} received)"
        )


def _deadlock(schedule: Schedule) -> Iterator[str]:
    done = [0] * schedule.num_ranks
    for rank, _ in walk(schedule):
        done[rank] += 1
    for rank, operations in enumerate(schedule.ranks):
        if done[rank] < len(operations):
            yield f"deadlock: rank {rank} waits for ever in {describe(operations[done[rank]])}"


def _bounds(schedule: Schedule) -> Iterator[str]:
    for what, promised, found in (
        ("activations", schedule.max_in_flight, peak_in_flight(schedule)),
        ("weight versions", schedule.max_weight_versions, peak_weight_versions(schedule)),
    ):
        for rank, (bound, count) in enumerate(zip(promised or (), found, strict=False)):
            if count > bound:
                yield f"rank {rank} holds {count} {what}, more than the promised {bound}"
        if promised is not None and len(promised) != schedule.num_ranks:
            yield f"{len(promised)} promised numbers of {what} for {schedule.num_ranks} ranks"
