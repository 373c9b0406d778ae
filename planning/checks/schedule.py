"""Validate a pipeline's lists of operations, and judge those that a plan would run.

The lists are those that would run, from the schedule itself. Its passes must be in the order that
the name promises (``schedule_lists``); every rank's list must keep to the definitions: data,
deadlocks, bounds and weight versions (thesis 2.4.3, 3.2.1). What the lists keep in memory is
counted here. Nothing is shared with ``planning/schedules/``, so an error in its generators or
counters is found.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ...schema.plan import Plan
from ...schema.schedule import (
    DIFFERENTIATING,
    FREEING,
    PASSES,
    RECEIVES,
    SENDS,
    Generator,
    HeldMoment,
    Kind,
    Message,
    Operation,
    PipelineShape,
    Schedule,
    generator_of,
    message_of,
    traits,
)
from .schedule_lists import definition_of, own_passes, own_placement

_UPDATES_SHOWN = 3  # of schedules that never end
Seconds = Callable[[Operation], float]
"""Seconds of an operation: a pass, an update, a reduction, or a message on its link."""


class Together(NamedTuple):
    """What a worker's stages hold at a pass of one of them.

    ``in_flight`` are the microbatches that any of them has in flight.
    """

    running: int
    in_flight: int
    held: tuple[tuple[int, HeldMoment], ...]


@dataclass(frozen=True)
class Lists:
    """A schedule's lists, judged.

    Attributes:
        schedule: The lists.
        order: (rank, operation) of every operation that can run, causes before effects.
        held: [stages] microbatches in flight, and weight versions, of a replica at its fullest.
        moments: [stages] what a replica holds at each pass of its worker.
        together: [ranks] what all stages of a worker hold at each of its passes.
        faults: What is wrong with the lists, as sentences.
    """

    schedule: Schedule
    order: tuple[tuple[int, Operation], ...]
    held: tuple[tuple[int, int], ...]
    moments: tuple[frozenset[HeldMoment], ...]
    together: tuple[frozenset["Together"], ...]
    faults: tuple[str, ...]


def lists_of(plan: Plan) -> Lists:
    """Judge the lists that a plan would run: of one batch, or of three updates without a flush.

    Raises:
        ProblemError: The schedule does not support the plan's shape.
    """
    replicas, count = tuple(plan.position_replicas), plan.num_microbatches
    shape = PipelineShape(
        pipeline_parallel_size=len(replicas),
        num_microbatches=count if plan.traits.flushes else count * _UPDATES_SHOWN,
        num_model_chunks=plan.num_model_chunks,
        replicas=replicas,
        microbatches_per_update=count if plan.traits.is_double_buffered else None,
    )
    return judged(plan.schedule, generator_of(plan.schedule), shape)


@lru_cache(maxsize=64)
def judged(name: str, generate: Generator, shape: PipelineShape) -> Lists:
    """Judge a schedule's lists for a shape.

    Raises:
        ProblemError: The schedule does not support the shape.
    """
    promised = own_passes(name, shape)
    schedule = generate(shape)
    # Further checks would only repeat, or fail on, lists that break the first ones.
    faults = [*_promise_faults(name, shape, schedule, promised)] or [*_structure(schedule)]
    order = () if faults else tuple(_runnable(schedule))
    if not faults:
        faults = [*_list_faults(schedule, order), *_round_faults(schedule, shape)]
    held = _held(schedule)
    if not faults and promised is None:
        faults = [*_bubble_faults(name, shape, schedule, order, held)]
    together = () if faults else tuple(_together(schedule))
    return Lists(schedule, order, held, _moments(together), together, tuple(faults))


def _promise_faults(
    name: str,
    shape: PipelineShape,
    schedule: Schedule,
    promised: tuple[tuple[tuple[str, int, int], ...], ...] | None,
) -> Iterator[str]:
    """Compare a schedule with what its name promises."""
    known = definition_of(name).traits
    if replace(traits(name), generate=None) != known:
        yield f"the traits of {name} are not those of its definition"
    if schedule.weight_semantics != known.weight_semantics:
        yield f"weights are kept by {schedule.weight_semantics}, not {known.weight_semantics}"
    if schedule.num_microbatches != shape.num_microbatches:
        yield f"{schedule.num_microbatches} microbatches instead of {shape.num_microbatches}"
    placement = own_placement(name, shape)
    if schedule.placement != (placement or schedule.placement):
        yield f"stages stand on ranks {schedule.placement}, not {placement}"
    if len(schedule.ranks) != sum(shape.replicas):
        yield f"{len(schedule.ranks)} ranks instead of {sum(shape.replicas)}"
    for rank, (operations, order) in enumerate(zip(schedule.ranks, promised or (), strict=False)):
        made = [(op.kind.value, op.stage, op.microbatch) for op in operations if op.kind in PASSES]
        if made != list(order):
            yield f"rank {rank}: its passes are not in the order of {name}"


def _bubble_faults(
    name: str,
    shape: PipelineShape,
    schedule: Schedule,
    order: tuple[tuple[int, Operation], ...],
    held: tuple[tuple[int, int], ...],
) -> Iterator[str]:
    """Hold a zero-bubble schedule without an order to its definition."""
    bound = definition_of(name).most_in_flight
    if bound is None:
        return
    # With F = B = W = 1 and no transfers, the first microbatch reaches the last rank at p - 1.
    # From then on all ranks work without a pause: no schedule is shorter.
    p, each = shape.pipeline_parallel_size, -(-shape.num_microbatches // shape.replicas[0])
    passes = 3 * each * len(schedule.placement) // p
    taken = run_seconds(schedule, order, lambda op: float(op.kind in PASSES))
    if taken != passes + p - 1:
        yield f"{name} takes {taken:g} unit passes, without bubbles {passes + p - 1}"
    for rank, operations in enumerate(schedule.ranks):
        most = _in_flight([op for op in operations if op.kind in PASSES])
        if most > bound(p):
            yield f"rank {rank} holds {most} microbatches, {name} at most {bound(p)}"


def _runnable(schedule: Schedule) -> Iterator[tuple[int, Operation]]:
    """Yield operations in an order in which they can run; those that wait for ever are left out."""
    # [channel] messages that were sent and not received: a receive takes the oldest.
    place, channels = [0] * len(schedule.ranks), dict[tuple[int, int, str], int]()
    arrived: dict[tuple[int, int], set[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, operations in enumerate(schedule.ranks):
            while place[rank] < len(operations):
                operation = operations[place[rank]]
                way, _, what = operation.kind.partition("_")
                if way == "receive":
                    channel = (operation.peer or 0, rank, what)
                    if not channels.get(channel):
                        break
                    channels[channel] -= 1
                elif way == "send":
                    channel = (rank, operation.peer or 0, what)
                    channels[channel] = channels.get(channel, 0) + 1
                # The ranks of a reduction wait for each other; the last one to arrive takes all
                # with it.
                elif way == "reduce":
                    group = arrived.setdefault((operation.stage, operation.microbatch), set())
                    group.add(rank)
                    everybody = set(schedule.placement[operation.stage])
                    if group != everybody:
                        break
                    del arrived[operation.stage, operation.microbatch]
                    for other in sorted(everybody - {rank}):
                        yield other, schedule.ranks[other][place[other]]
                        place[other] += 1
                yield rank, operation
                place[rank] += 1
                moved = True


def _held(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """[stages] most microbatches in flight, and most weight versions, of a replica at once."""
    found = []
    for stage, ranks in enumerate(schedule.placement):
        in_flight = versions = 0
        for rank in ranks:
            mine = [op for op in schedule.ranks[rank] if op.stage == stage]
            in_flight = max(in_flight, _in_flight(mine))
            versions = max(versions, _versions(mine))
        found.append((in_flight, versions))
    return tuple(found)


def _moments(together: Sequence[frozenset[Together]]) -> tuple[frozenset[HeldMoment], ...]:
    """[stages] what its replicas hold at each pass of their workers."""
    found: dict[int, set[HeldMoment]] = {}
    for one in frozenset[Together]().union(*together):
        for stage, moment in one.held:
            found.setdefault(stage, set()).add(moment)
    return tuple(frozenset(found[stage]) for stage in sorted(found))


def _together(schedule: Schedule) -> Iterator[frozenset[Together]]:
    """What each worker's stages hold at each of its passes."""
    # A worker keeps what it has sent of a kind until as many more were sent as microbatches may be
    # in flight anywhere: of stages alone on their workers that alternate, as many as its own.
    most = [_in_flight(own) for own in schedule.ranks]
    is_alone = all(len({op.stage for op in own}) == 1 for own in schedule.ranks)
    alternates = is_alone and traits(schedule.name).order == "alternating"
    for own, k in zip(schedule.ranks, most, strict=True):
        room = (k, k + 1) if alternates else (max(most), max(most))
        outputs: list[int] = []
        gradients: list[int] = []
        answered = {op.stage for op in own if op.kind == "receive_gradient"}
        flying: list[tuple[int, int]] = []
        halved: list[int] = []
        stages, found = sorted({each.stage for each in own}), set[Together]()
        begun: set[int] = set()  # by a pass that made gradients of weights
        for op in own:
            if op.kind == "send_activation":
                outputs = [*outputs, op.stage][-room[0] :]
            if op.kind == "send_gradient":
                gradients = [*gradients, op.stage][-room[1] :]
            if op.kind == "forward":
                flying.append((op.stage, op.microbatch))
            if op.kind == "backward_input":
                halved.append(op.stage)
            held: list[tuple[int, HeldMoment]] = []
            for stage in stages if op.kind in PASSES else ():
                number = sum(each == stage for each, _ in flying)
                sent, half = outputs.count(stage) + (stage in answered), halved.count(stage)
                back = gradients.count(stage)
                # A stage before it on the same worker hands over: that waits on both sides.
                came = len({m for each, m in flying if each in (stage, stage - 1)})
                held.append((stage, HeldMoment(number, half, came, sent, back, stage in begun)))
            if held:
                number = len({microbatch for _, microbatch in flying})
                found.add(Together(op.stage, number, tuple(held)))
            if op.kind in FREEING:
                flying.remove((op.stage, op.microbatch))
                begun.add(op.stage)
            if op.kind == "backward_weight":
                halved.remove(op.stage)
        yield frozenset(found)


def _in_flight(mine: Sequence[Operation]) -> int:
    most, held = 0, set()
    for operation in mine:
        if operation.kind == "forward":
            held.add((operation.stage, operation.microbatch))
        # From the forward pass until the backward pass has ended.
        if operation.kind in FREEING:
            held.discard((operation.stage, operation.microbatch))
        most = max(most, len(held))
    return most


def _versions(mine: Sequence[Operation]) -> int:
    # A version is kept while it is the newest, or is still to be read.
    last_read = {op.weight_version: at for at, op in enumerate(mine) if op.kind in PASSES}
    most, newest, kept = 1, 0, {0}
    for place, operation in enumerate(mine):
        if operation.kind == "update" and operation.weight_version is not None:
            newest = operation.weight_version
            kept.add(newest)
        kept = {one for one in kept if one == newest or last_read.get(one, -1) >= place}
        most = max(most, len(kept))
    return most


def run_seconds(
    schedule: Schedule, order: tuple[tuple[int, Operation], ...], seconds: Seconds
) -> float:
    """Time lists: each operation begins when what it waits for has ended."""
    # [ranks] seconds at which the operation before has ended.
    clock = [0.0] * len(schedule.ranks)
    # A message waits for its sender, and for the one before it on the same directed link.
    sent: dict[tuple[int, int, str, int, int], float] = {}
    link: dict[tuple[int, int], float] = {}
    reduced: dict[tuple[int, int], float] = {}
    for rank, operation in order:
        stage, peer = operation.stage, operation.peer or 0
        way, _, what = operation.kind.partition("_")
        if way == "receive":
            boundary = stage - (what == "activation")
            arrives = sent[peer, rank, what, boundary, operation.microbatch]
            clock[rank] = max(clock[rank], arrives)
        elif way == "send":
            end = max(clock[rank], link.get((rank, peer), 0.0)) + seconds(operation)
            boundary = stage - (what == "gradient")
            link[rank, peer] = sent[rank, peer, what, boundary, operation.microbatch] = end
        elif way == "reduce":
            group = (stage, operation.microbatch)
            if group not in reduced:
                begin = max(clock[each] for each in schedule.placement[stage])
                reduced[group] = begin + seconds(operation)
            clock[rank] = reduced[group]
        else:
            clock[rank] += seconds(operation)
    return max(clock)


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
    return faults or _list_faults(schedule, tuple(_runnable(schedule)))


def _list_faults(schedule: Schedule, order: tuple[tuple[int, Operation], ...]) -> list[str]:
    """List what breaks a definition in lists of ranks, stages and microbatches that exist."""
    holder = _holders(schedule)
    faults = [*_completeness(schedule)]
    for rank in range(schedule.num_ranks):
        faults += _inputs_and_outputs(schedule, rank, holder)
    faults += _channels(schedule)
    faults += _deadlock(schedule, order)
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
    # In list order: what stands later does not exist yet.
    for operation in schedule.ranks[rank]:
        stage, microbatch = operation.stage, operation.microbatch
        for need in _needs(operation, rank, schedule.num_stages, holder):
            if need not in done:
                yield (
                    f"rank {rank}: {describe(operation)} before {need[0].replace('_', ' ')} of "
                    f"stage {need[1]}, microbatch {need[2]}"
                )
        made = (_phase(operation.kind), stage, microbatch)
        if operation.peer is not None and made in done:
            yield f"rank {rank}: {describe(operation)} for the second time"
        done.add(made)
    # What is made here and needed elsewhere has to be sent.
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


def _deadlock(schedule: Schedule, order: tuple[tuple[int, Operation], ...]) -> Iterator[str]:
    done = Counter(rank for rank, _ in order)
    for rank, operations in enumerate(schedule.ranks):
        if done[rank] < len(operations):
            yield f"deadlock: rank {rank} waits for ever in {describe(operations[done[rank]])}"


def _bounds(schedule: Schedule) -> Iterator[str]:
    in_flight = [_in_flight(operations) for operations in schedule.ranks]
    versions = [
        max(
            (_versions([op for op in operations if op.stage == stage]) for stage in stages),
            default=0,
        )
        for operations, stages in zip(schedule.ranks, schedule.stages_of_rank, strict=True)
    ]
    for what, promised, found in (
        ("activations", schedule.max_in_flight, in_flight),
        ("weight versions", schedule.max_weight_versions, versions),
    ):
        for rank, (bound, count) in enumerate(zip(promised or (), found, strict=False)):
            if count > bound:
                yield f"rank {rank} holds {count} {what}, more than the promised {bound}"
        if promised is not None and len(promised) != schedule.num_ranks:
            yield f"{len(promised)} promised numbers of {what} for {schedule.num_ranks} ranks"


def _round_faults(schedule: Schedule, shape: PipelineShape) -> Iterator[str]:
    """List reductions and updates of other microbatches than whole rounds (2.4.3, 3.2.1)."""
    for rank, operations in enumerate(schedule.ranks):
        for operation in operations:
            if operation.kind not in (Kind.REDUCE, Kind.UPDATE):
                continue
            every = len(schedule.placement[operation.stage])  # one input on each replica
            if schedule.weight_semantics == "flush":
                every = schedule.num_microbatches
            elif schedule.weight_semantics == "double-buffered":
                every = shape.microbatches_per_update or operation.num_microbatches
            left = schedule.num_microbatches - operation.microbatch
            if operation.num_microbatches != min(every, left):
                yield f"rank {rank}: {describe(operation)} covers {operation.num_microbatches}"


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
    # Microbatches of which this replica has the gradient.
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
