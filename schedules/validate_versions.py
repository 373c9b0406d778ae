"""Validate the weight versions of a schedule that has no other faults.

For all weight semantics: updates are in order; each covers the gradients of exactly its
microbatches, after their backward passes; a version is read only after it exists; and both passes
of a microbatch on a stage read the same version. Replicas then agree too: their updates cover the
same microbatches in the same order, and unmatched reductions are found as a deadlock.
"""

from collections.abc import Iterator

from ..schema.operations import FREEING, PASSES, Kind, Operation, Schedule

Versions = dict[tuple[int, int], int]
"""(stage, microbatch) -> weight version."""


def faults_of(schedule: Schedule) -> list[str]:
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
