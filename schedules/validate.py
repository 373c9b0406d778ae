"""Validate a schedule against the definitions: data, deadlocks, bounds and weight versions.

Nothing is shared with the generators. Weight versions are checked against the papers' definitions
(thesis 2.4.3, 3.2.1), not against a generator's numbering.
"""

from collections import defaultdict
from collections.abc import Iterator

from ..schema.operations import (
    DIFFERENTIATING,
    FREEING,
    PASSES,
    RECEIVES,
    SENDS,
    Kind,
    Message,
    Operation,
    Schedule,
    message_of,
)
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
        faults += _version_faults(schedule)
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


Versions = dict[tuple[int, int], int]
"""(stage, microbatch) -> weight version."""


def _version_faults(schedule: Schedule) -> list[str]:
    """List every fault of the updates and of the versions that passes read."""
    faults: list[str] = []
    for rank, stages in enumerate(schedule.stages_of_rank):
        for stage in stages:
            mine = [op for op in schedule.ranks[rank] if op.stage == stage]
            faults += _updates(schedule, rank, stage, mine)
            faults += _reductions(schedule, rank, stage, mine)
            faults += _same_version(rank, stage, mine)
    if not faults:
        faults += _semantics(schedule)
    return faults


def _updates(
    schedule: Schedule, rank: int, stage: int, operations: list[Operation]
) -> Iterator[str]:
    where = f"rank {rank}, stage {stage}"
    latest = covered = 0
    finished: set[int] = set()
    mine = {op.microbatch for op in operations if op.kind in FREEING}
    for operation in operations:
        version = operation.weight_version
        if operation.kind in FREEING:
            finished.add(operation.microbatch)
            if operation.microbatch < covered:
                yield f"{where}: microbatch {operation.microbatch} misses its update"
        if operation.kind in PASSES and version is not None and not 0 <= version <= latest:
            yield (
                f"{where}: {operation.kind} of microbatch {operation.microbatch} reads version "
                f"{version}, but the latest is {latest}"
            )
        if operation.kind is Kind.UPDATE:
            if version != latest + 1:
                yield f"{where}: an update writes version {version} after version {latest}"
            if operation.microbatch != covered:
                yield f"{where}: an update starts at {operation.microbatch}, not at {covered}"
            missing = (mine & set(operation.microbatches)) - finished
            if missing:
                yield f"{where}: an update lacks the gradients of microbatches {sorted(missing)}"
            latest, covered = latest + 1, operation.microbatches.stop
    if covered != schedule.num_microbatches:
        yield f"{where}: updates cover {covered} of {schedule.num_microbatches} microbatches"


def _reductions(
    schedule: Schedule, rank: int, stage: int, operations: list[Operation]
) -> Iterator[str]:
    """Check that a replicated stage's gradient is reduced after its passes, before each update."""
    replicated = len(schedule.placement[stage]) > 1
    passes_done: set[int] = set()
    mine = {op.microbatch for op in operations if op.kind in FREEING}
    reduced: list[range] = []
    for operation in operations:
        if operation.kind in FREEING:
            passes_done.add(operation.microbatch)
        if operation.kind is Kind.REDUCE:
            reduced.append(operation.microbatches)
            if not replicated or (mine & set(operation.microbatches)) - passes_done:
                yield f"rank {rank}, stage {stage}: a reduction before its gradients are complete"
        if operation.kind is Kind.UPDATE and replicated:
            if not reduced or reduced.pop(0) != operation.microbatches:
                yield f"rank {rank}, stage {stage}: an update without its reduction"
    if reduced:
        yield f"rank {rank}, stage {stage}: a reduction without its update"


def _same_version(rank: int, stage: int, operations: list[Operation]) -> Iterator[str]:
    read: dict[int, int | None] = {}
    for operation in operations:
        if operation.kind not in PASSES:
            continue
        first = read.setdefault(operation.microbatch, operation.weight_version)
        if operation.weight_version != first:
            yield (
                f"rank {rank}, stage {stage}: microbatch {operation.microbatch} reads version "
                f"{first} forward and {operation.weight_version} backward"
            )


def _semantics(schedule: Schedule) -> Iterator[str]:
    read = _read(schedule)
    demanded = {
        "flush": _latest,
        "stashing": _latest,
        "vertical-sync": _latest_at_input_stage,
        "double-buffered": _one_batch_back,
    }[schedule.weight_semantics](schedule)
    for (stage, microbatch), version in sorted(demanded.items()):
        if read[stage, microbatch] != version:
            yield (
                f"stage {stage}, microbatch {microbatch}: reads version "
                f"{read[stage, microbatch]}, {schedule.weight_semantics} demands version {version}"
            )
    if schedule.weight_semantics == "flush":
        yield from _flushed(schedule)
    if schedule.weight_semantics == "double-buffered":
        lengths = {op.num_microbatches for op in _all(schedule) if op.kind is Kind.UPDATE}
        if len(lengths) > 1:
            yield f"updates cover unlike numbers of microbatches: {sorted(lengths)}"


def _all(schedule: Schedule) -> Iterator[Operation]:
    for operations in schedule.ranks:
        yield from operations


def _read(schedule: Schedule) -> Versions:
    return {
        (op.stage, op.microbatch): op.weight_version
        for op in _all(schedule)
        if op.kind is Kind.FORWARD and op.weight_version is not None
    }


def _latest(schedule: Schedule) -> Versions:
    """Stashing: the forward pass reads the latest version its rank has (2.4.3)."""
    demanded: Versions = {}
    for operations in schedule.ranks:
        latest: dict[int, int] = {}
        for operation in operations:
            if operation.kind is Kind.UPDATE:
                latest[operation.stage] = latest.get(operation.stage, 0) + 1
            elif operation.kind is Kind.FORWARD:
                version = latest.get(operation.stage, 0)
                demanded[operation.stage, operation.microbatch] = version
    return demanded


def _latest_at_input_stage(schedule: Schedule) -> Versions:
    """Vertical sync: every stage reads what was the latest at the input stage (2.4.3)."""
    entered = {k: version for (stage, k), version in _latest(schedule).items() if stage == 0}
    return {
        (stage, microbatch): version
        for stage in range(schedule.num_stages)
        for microbatch, version in entered.items()
    }


def _one_batch_back(schedule: Schedule) -> Versions:
    """2BW: max(floor((k - 1) / m) - 1, 0) for microbatch k counted from 1 (3.2.1)."""
    m = next(op.num_microbatches for op in _all(schedule) if op.kind is Kind.UPDATE)
    return {
        (stage, k - 1): max((k - 1) // m - 1, 0)
        for stage in range(schedule.num_stages)
        for k in range(1, schedule.num_microbatches + 1)
    }


def _flushed(schedule: Schedule) -> Iterator[str]:
    """Check that no microbatch is in flight on a stage at its update: one version is enough."""
    for rank, operations in enumerate(schedule.ranks):
        under_way: dict[int, int] = {}
        for operation in operations:
            if operation.kind is Kind.FORWARD:
                under_way[operation.stage] = under_way.get(operation.stage, 0) + 1
            elif operation.kind in FREEING:
                under_way[operation.stage] -= 1
            elif operation.kind is Kind.UPDATE and under_way.get(operation.stage):
                yield f"rank {rank}, stage {operation.stage}: an update amid a batch"
