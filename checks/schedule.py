"""Judge, count and time a pipeline's lists of operations: the judge's own code, slow and simple.

The lists are those that would run, from the schedule itself. Its passes must be in the order that
the name promises (``schedule_lists``); every rank's list must keep to the definitions; and what it
keeps in memory, how long it takes, and which parts a step has are counted here. So an error in the
generators, counters or timers of ``schedules/`` is found.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil, isclose

from ..schema.errors import ProblemError
from ..schema.operations import Operation, Schedule
from ..schema.pipeline_shape import PipelineShape
from ..schema.plan import Plan, Stage
from ..schema.schedule_traits import Generator, generator_of, traits
from .schedule_lists import definition_of, own_passes, own_placement

_PASSES = ("forward", "backward", "backward_input", "backward_weight")
_ENDS = ("backward", "backward_weight")  # what frees a microbatch's activations
_UPDATES_SHOWN = 3  # of schedules that never end
PARTS = (
    "update_seconds",
    "sync_seconds",
    "transfer_seconds",
    "virtual_node_seconds",
    "compute_seconds",
    "fixed_seconds",
)
Seconds = Callable[[Operation], float]
"""Seconds of an operation: a pass, an update, a reduction, or a message on its link."""


@dataclass(frozen=True)
class Lists:
    """A schedule's lists, judged.

    Attributes:
        schedule: The lists.
        order: (rank, operation) of every operation that can run, causes before effects.
        held: [stages] microbatches in flight, and weight versions, of a replica at its fullest.
        faults: What is wrong with the lists, as sentences.
    """

    schedule: Schedule
    order: tuple[tuple[int, Operation], ...]
    held: tuple[tuple[int, int], ...]
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
    order = tuple(_runnable(schedule))
    faults = [*_promise_faults(name, shape, schedule, promised)]
    faults = faults or [*_run_faults(schedule, order, shape)]
    held = _held(schedule)
    if not faults and promised is None:
        faults = [*_bubble_faults(name, shape, schedule, order, held)]
    return Lists(schedule, order, held, tuple(faults))


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
        made = [(op.kind.value, op.stage, op.microbatch) for op in operations if op.kind in _PASSES]
        if made != list(order):
            yield f"rank {rank}: its passes are not in the order of {name}"


def _bubble_faults(
    name: str,
    shape: PipelineShape,
    schedule: Schedule,
    order: tuple[tuple[int, Operation], ...],
    held: tuple[tuple[int, int], ...],
) -> Iterator[str]:
    """Hold a zero-bubble schedule without an order to its definition.

    With F = B = W = 1 and no transfers, the ranks work without a pause from the time when the first
    microbatch reaches the last rank, at p - 1. No schedule is shorter.
    """
    bound = definition_of(name).most_in_flight
    if bound is None:
        return
    p, each = shape.pipeline_parallel_size, -(-shape.num_microbatches // shape.replicas[0])
    passes = 3 * each * len(schedule.placement) // p
    taken = run_seconds(schedule, order, lambda op: float(op.kind in _PASSES))
    if taken != passes + p - 1:
        yield f"{name} takes {taken:g} unit passes, without bubbles {passes + p - 1}"
    for rank, operations in enumerate(schedule.ranks):
        most = _in_flight([op for op in operations if op.kind in _PASSES])
        if most > bound(p):
            yield f"rank {rank} holds {most} microbatches, {name} at most {bound(p)}"


def _runnable(schedule: Schedule) -> Iterator[tuple[int, Operation]]:
    """Yield operations in an order in which they can run; those that wait for ever are left out.

    A receive waits for the oldest message of its channel. The ranks of a reduction wait for each
    other, and come one directly after another.
    """
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


class _Rank:
    """What one rank has done: passes, messages received, updates of its stages."""

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self.done: set[tuple[str, int, int]] = set()
        self.read: dict[tuple[int, int], int | None] = {}
        self.latest: Counter[int] = Counter()  # stage -> its newest version
        self.covered: Counter[int] = Counter()  # stage -> microbatches in its updates
        self.reduced: dict[int, range] = {}
        self.mine: dict[int, set[int]] = {}
        for operation in operations:
            if operation.kind in _PASSES:
                self.mine.setdefault(operation.stage, set()).add(operation.microbatch)

    def lacks(self, operation: Operation) -> bool:
        """Whether gradients that a reduction or update covers are missing."""
        mine = self.mine.get(operation.stage, set()) & set(operation.microbatches)
        return not all(
            ("backward", operation.stage, k) in self.done
            or ("backward_weight", operation.stage, k) in self.done
            for k in mine
        )


def _run_faults(
    schedule: Schedule, order: tuple[tuple[int, Operation], ...], shape: PipelineShape
) -> Iterator[str]:
    """Run the lists and list what breaks a definition.

    Every pass has its input; every message is received, in the order of its channel; each
    microbatch is run once on each stage, on one rank; updates cover the gradients of their
    microbatches, in order, reduced over replicas; passes read the version that they must.
    """
    if len(order) < sum(map(len, schedule.ranks)):
        yield "a deadlock: some ranks wait for ever"
        return
    ranks = [_Rank(operations) for operations in schedule.ranks]
    channels: dict[tuple[int, int, str], deque[tuple[int, int]]] = {}
    entered: dict[int, int] = {}  # vertical sync: microbatch -> version on the input stage
    for rank, operation in order:
        fault = _fault_of(operation, rank, ranks[rank], schedule, shape, channels, entered)
        if fault:
            kind = operation.kind.replace("_", " ")
            yield (
                f"rank {rank}, {kind} of stage {operation.stage}, microbatch "
                f"{operation.microbatch}: {fault}"
            )
            return  # what comes later may follow from it
    if any(channels.values()):
        yield "some messages are never received"
    yield from _completeness(schedule, ranks)


def _completeness(schedule: Schedule, ranks: list[_Rank]) -> Iterator[str]:
    """Every stage runs every microbatch once, and ends with updates that cover all of them."""
    everything = list(range(schedule.num_microbatches))
    for stage, holders in enumerate(schedule.placement):
        ran = [k for rank in holders for k in ranks[rank].mine.get(stage, ())]
        if sorted(ran) != everything:
            yield f"stage {stage} does not run every microbatch once"
        for rank in holders:
            mine, done = ranks[rank].mine.get(stage, ()), ranks[rank].done
            forward = all(("forward", stage, k) in done for k in mine)
            if not forward or ranks[rank].covered[stage] != len(everything):
                yield f"rank {rank}: stage {stage} does not end with all passes in updates"


def _fault_of(
    operation: Operation,
    rank: int,
    state: _Rank,
    schedule: Schedule,
    shape: PipelineShape,
    channels: dict[tuple[int, int, str], deque[tuple[int, int]]],
    entered: dict[int, int],
) -> str | None:
    """Run one operation; return what breaks a definition, None if nothing does."""
    kind, stage, k, done = operation.kind.value, operation.stage, operation.microbatch, state.done
    way, _, what = kind.partition("_")
    key, last = (kind, stage, k), len(schedule.placement) - 1
    if not 0 <= stage <= last or rank not in schedule.placement[stage]:
        return "the rank does not hold the stage"
    if key in done and kind not in ("reduce", "update"):
        return "for the second time"
    found = None
    differentiated = {("backward", stage, k), ("backward_input", stage, k)} & done
    if kind == "forward":
        sources = {("forward", stage - 1, k), ("receive_activation", stage, k)}
        if stage and not sources & done:
            found = "without its input"
    elif kind in ("backward", "backward_input"):
        sources = {(each, stage + 1, k) for each in ("backward", "backward_input")}
        if stage < last and not (sources | {("receive_gradient", stage, k)}) & done:
            found = "without its gradient"
        if ("forward", stage, k) not in done or differentiated:
            found = "without its forward pass, or again"
    elif kind == "backward_weight":
        if ("backward_input", stage, k) not in done:
            found = "before the gradient of the input"
    elif way == "send":
        made = ("forward", stage, k) in done if what == "activation" else bool(differentiated)
        if not made:
            found = "before its pass"
        boundary = stage if what == "activation" else stage - 1
        channels.setdefault((rank, operation.peer or 0, what), deque()).append((boundary, k))
    elif way == "receive":
        boundary = stage - 1 if what == "activation" else stage
        if channels[operation.peer or 0, rank, what].popleft() != (boundary, k):
            found = "another message comes first"
    else:
        found = _closing_fault(operation, state, schedule, shape)
    if kind in _PASSES:
        found = found or _version_fault(operation, state, schedule, shape, entered)
    done.add(key)
    return found


def _closing_fault(
    operation: Operation, state: _Rank, schedule: Schedule, shape: PipelineShape
) -> str | None:
    """Judge a reduction or update: whole rounds, in order, of gradients that are there."""
    stage, covers = operation.stage, operation.microbatches
    replicated = len(schedule.placement[stage]) > 1
    if state.lacks(operation):
        return "before its gradients are complete"
    first, every = state.covered[stage], schedule.num_microbatches
    if schedule.weight_semantics == "double-buffered":
        every = shape.microbatches_per_update or len(covers)
    elif schedule.weight_semantics != "flush":
        every = len(schedule.placement[stage])  # one input on each replica (2.4.3)
    if covers != range(first, min(first + every, schedule.num_microbatches)):
        return f"covers microbatches {covers}"
    if operation.kind == "reduce":
        state.reduced[stage] = covers
        return None if replicated else "there are no replicas"
    if operation.weight_version != state.latest[stage] + 1:
        return f"writes version {operation.weight_version} after {state.latest[stage]}"
    if replicated and state.reduced.pop(stage, None) != covers:
        return "without its reduction"
    state.latest[stage] += 1
    state.covered[stage] = covers.stop
    return None


def _version_fault(
    operation: Operation,
    state: _Rank,
    schedule: Schedule,
    shape: PipelineShape,
    entered: dict[int, int],
) -> str | None:
    """Judge the version that a pass reads (2.4.3, 3.2.1); both passes read the same."""
    stage, k, read = operation.stage, operation.microbatch, operation.weight_version
    if operation.kind != "forward":
        return None if read == state.read.get((stage, k), read) else "reads another version"
    wanted = state.latest[stage]  # flush, stashing: the newest
    if schedule.weight_semantics == "vertical-sync":
        wanted = entered.setdefault(k, wanted)
    if schedule.weight_semantics == "double-buffered":
        wanted = max(0, k // (shape.microbatches_per_update or _least_update(schedule)) - 1)
    state.read[stage, k] = read
    if wanted > state.latest[stage]:
        return f"version {wanted} is not made yet"
    return None if read == wanted else f"reads version {read}, not {wanted}"


def _least_update(schedule: Schedule) -> int:
    return next(op.num_microbatches for op in schedule.ranks[0] if op.kind == "update")


def _held(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """[stages] most microbatches in flight, and most weight versions, of a replica at once.

    A microbatch is in flight from its forward pass until its backward pass has ended. A version is
    kept while it is the newest or is still to be read.
    """
    found = []
    for stage, ranks in enumerate(schedule.placement):
        in_flight = versions = 0
        for rank in ranks:
            mine = [op for op in schedule.ranks[rank] if op.stage == stage]
            in_flight = max(in_flight, _in_flight(mine))
            versions = max(versions, _versions(mine))
        found.append((in_flight, versions))
    return tuple(found)


def _in_flight(mine: list[Operation]) -> int:
    most, held = 0, set()
    for operation in mine:
        if operation.kind == "forward":
            held.add((operation.stage, operation.microbatch))
        if operation.kind in _ENDS:
            held.discard((operation.stage, operation.microbatch))
        most = max(most, len(held))
    return most


def _versions(mine: list[Operation]) -> int:
    last_read = {op.weight_version: at for at, op in enumerate(mine) if op.kind in _PASSES}
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
    """Time lists: each operation begins when what it waits for has ended.

    That is the operation before it on its device, and its message. A message waits for its sender
    and for the one before it on the same directed link. The replicas of a stage reduce together.
    """
    clock = [0.0] * len(schedule.ranks)
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


def step_seconds(plan: Plan, lists: Lists | None = None) -> float:
    """Seconds of a step with a flush, from the seconds of the plan's stages.

    Args:
        plan: A plan with the seconds of its stages.
        lists: Its lists, if they were judged before.

    Raises:
        ProblemError: The schedule does not support the plan's shape, or its lists have faults.
    """
    lists = lists or lists_of(plan)
    if lists.faults:
        raise ProblemError(f"schedule {plan.schedule}: {lists.faults[0]}")

    def seconds(operation: Operation) -> float:
        kind, stage = operation.kind, plan.stages[operation.stage]
        if kind == "send_gradient":
            return (plan.stages[operation.stage - 1].output_seconds or 0.0) / 2
        if kind == "send_activation":
            return (stage.output_seconds or 0.0) / 2
        return (stage.reduce_seconds or 0.0) if kind == "reduce" else _pass_seconds(stage, kind)

    return run_seconds(lists.schedule, lists.order, seconds)


def _pass_seconds(stage: Stage, kind: str) -> float:
    forward = stage.forward_seconds or 0.0
    if kind == "forward":
        return forward
    if kind == "update":
        return (stage.update_seconds or 0.0) + (stage.tied_seconds or 0.0)
    backward = (stage.compute_seconds or 0.0) - forward
    return backward if kind == "backward" else backward / 2  # the halves are taken as equal


def steady_seconds(plan: Plan) -> float:
    """Seconds of a step without a flush: all its inputs on the slowest stage or boundary."""
    count, slowest = plan.num_microbatches, 0.0
    for stage in plan.stages:
        updates, rounds = 1.0, float(ceil(count / stage.num_replicas))
        if plan.traits.updates_each_round:
            updates = rounds = count / stage.num_replicas
        busy = rounds * (stage.compute_seconds or 0.0) + updates * (stage.update_seconds or 0.0)
        rings = updates * (stage.reduce_seconds or 0.0)
        slowest = max(slowest, busy, rings, count * (stage.output_seconds or 0.0))
    return slowest


def parts_of(plan: Plan) -> dict[str, float] | None:
    """Split a step into parts: each is what the step gets shorter by without it, one by one.

    Updates are taken away first, then all-reduces, what messages cost beside bytes, their bytes,
    and what passes cost beside layers. Compute is the rest.

    Returns:
        ``PARTS`` -> seconds, which add up to the step. None if the stages do not determine it.
    """
    if any(stage.reduce_seconds is None or stage.update_seconds is None for stage in plan.stages):
        return None
    if any(stage.forward_seconds is None for stage in plan.stages) and plan.traits.flushes:
        return None
    fixed = plan.predicted.fixed_seconds or 0.0
    seconds: Callable[[Plan], float] = steady_seconds
    try:
        if plan.traits.flushes:
            seconds = partial(step_seconds, lists=lists_of(plan))
        left = seconds(plan)
    except ProblemError:
        return None  # a plan of the steady state only
    if not isclose(left + fixed, plan.predicted.step_seconds, rel_tol=1e-9, abs_tol=1e-15):
        return None
    bare, lost = plan, []
    for without in (_no_update, _no_reduction, _no_message_cost, _no_bytes, _bare(plan)):
        bare = replace(bare, stages=tuple(without(stage) for stage in bare.stages))
        shorter = min(left, seconds(bare))
        lost.append(left - shorter)
        left = shorter
    update, reduction, message, sent, passes = lost
    parts = (update, reduction, message + sent, passes, left, fixed)
    return dict(zip(PARTS, parts, strict=True))


def _no_update(stage: Stage) -> Stage:
    return replace(stage, update_seconds=0.0)


def _no_reduction(stage: Stage) -> Stage:
    return replace(stage, reduce_seconds=0.0, tied_seconds=None)


def _no_message_cost(stage: Stage) -> Stage:
    bytes_only = (stage.output_seconds or 0.0) - 2 * (stage.message_seconds or 0.0)
    return replace(stage, output_seconds=max(0.0, bytes_only))


def _no_bytes(stage: Stage) -> Stage:
    return replace(stage, output_seconds=0.0)


def _bare(plan: Plan) -> Callable[[Stage], Stage]:
    """Return what takes the cost of passes beside layers off a stage."""
    backwards = 2 if plan.traits.splits_backward else 1

    def without(stage: Stage) -> Stage:
        own = stage.pass_seconds or 0.0
        forward = max(0.0, (stage.forward_seconds or 0.0) - own)
        whole = max((stage.compute_seconds or 0.0) - own - backwards * own, forward)
        return replace(stage, forward_seconds=forward, compute_seconds=whole)

    return without
