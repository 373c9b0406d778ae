"""Count and time a pipeline's lists of operations: the judge's own code, slow and simple.

The lists come from ``schedules/``, and ``schedules.validate`` checks them against the definitions.
What a list keeps in memory, how long it takes, and which parts a step has are counted here again,
so an error in the solvers' counters or timers is found.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil, isclose

from ..schedules.of_plan import schedule_of, shape_of
from ..schedules.operations import Operation, Schedule
from ..schedules.registry import Generator, spec_named
from ..schedules.shape import PipelineShape
from ..schema.errors import ProblemError
from ..schema.pipeline import PipelinePlan, StagePlan

_PASSES = ("forward", "backward", "backward_input", "backward_weight")
_ENDS = ("backward", "backward_weight")  # what frees a microbatch's activations
PARTS = (
    "update_seconds",
    "sync_seconds",
    "transfer_seconds",
    "virtual_node_seconds",
    "compute_seconds",
    "fixed_seconds",
)


def held_by_stage(plan: PipelinePlan) -> tuple[tuple[int, int], ...]:
    """Count what a replica of each stage holds at once, at most.

    Returns:
        [stages] microbatches whose forward pass was made and whose backward pass has not ended, and
        versions of the weights that are the newest or are still to be read.

    Raises:
        ProblemError: The schedule does not support the plan's shape.
    """
    return _held(spec_named(plan.schedule).generate, shape_of(plan))


@lru_cache(maxsize=64)
def _held(generate: Generator, shape: PipelineShape) -> tuple[tuple[int, int], ...]:
    schedule, found = generate(shape), []
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
            held.add(operation.microbatch)
        if operation.kind in _ENDS:
            held.discard(operation.microbatch)
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


def step_seconds(plan: PipelinePlan, schedule: Schedule | None = None) -> float:
    """Seconds of a step with a flush, from the seconds of the plan's stages.

    A time is the latest of what it waits for: the operation before it on its device, and a message.
    A message waits for its sender and for the one before it on the same directed link. The replicas
    of a stage reduce together. Times are filled in until all are known.

    Args:
        plan: A plan with the seconds of its stages.
        schedule: Its lists, if they were made before.

    Raises:
        ProblemError: The schedule does not support the plan's shape, or waits for ever.
    """
    schedule = schedule or schedule_of(plan)
    clock = [0.0] * len(schedule.ranks)
    place = [0] * len(schedule.ranks)
    sent: dict[tuple[int, int, bool, int, int], float] = {}
    link: dict[tuple[int, int], float] = {}
    waiting: dict[tuple[int, int], list[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, operations in enumerate(schedule.ranks):
            while place[rank] < len(operations):
                operation = operations[place[rank]]
                stage, kind, peer = operation.stage, operation.kind, operation.peer
                if kind in ("receive_activation", "receive_gradient"):
                    assert peer is not None
                    way = kind == "receive_activation"
                    message = (peer, rank, way, stage - way, operation.microbatch)
                    if message not in sent:
                        break
                    clock[rank] = max(clock[rank], sent[message])
                elif kind in ("send_activation", "send_gradient"):
                    assert peer is not None
                    way = kind == "send_activation"
                    boundary = stage if way else stage - 1
                    begin = max(clock[rank], link.get((rank, peer), 0.0))
                    end = begin + plan.stages[boundary].output_seconds / 2
                    link[rank, peer] = end
                    sent[rank, peer, way, boundary, operation.microbatch] = end
                elif kind == "reduce":
                    group = waiting.setdefault((stage, operation.microbatch), [])
                    if rank not in group:
                        group.append(rank)
                    if len(group) < len(schedule.placement[stage]):
                        break
                    end = max(clock[each] for each in group)
                    end += plan.stages[stage].reduce_seconds or 0.0
                    for each in group:
                        clock[each] = end
                        place[each] += each != rank
                else:
                    clock[rank] += _pass_seconds(plan.stages[stage], kind)
                place[rank] += 1
                moved = True
    if any(done < len(schedule.ranks[rank]) for rank, done in enumerate(place)):
        raise ProblemError(f"schedule {schedule.name} waits for ever")
    return max(clock)


def _pass_seconds(stage: StagePlan, kind: str) -> float:
    forward = stage.forward_seconds or 0.0
    if kind == "forward":
        return forward
    if kind == "update":
        return (stage.update_seconds or 0.0) + (stage.tied_seconds or 0.0)
    backward = stage.compute_seconds - forward
    return backward if kind == "backward" else backward / 2  # the halves are taken as equal


def steady_seconds(plan: PipelinePlan) -> float:
    """Seconds of a step without a flush: all its inputs on the slowest stage or boundary."""
    count, slowest = plan.microbatches, 0.0
    for stage in plan.stages:
        updates, rounds = 1.0, float(ceil(count / stage.num_replicas))
        if plan.traits.updates_each_round:
            updates = rounds = count / stage.num_replicas
        busy = rounds * stage.compute_seconds + updates * (stage.update_seconds or 0.0)
        rings = updates * (stage.reduce_seconds or 0.0)
        slowest = max(slowest, busy, rings, count * stage.output_seconds)
    return slowest


def parts_of(plan: PipelinePlan) -> dict[str, float] | None:
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
    seconds: Callable[[PipelinePlan], float] = steady_seconds
    try:
        if plan.traits.flushes:
            seconds = partial(step_seconds, schedule=schedule_of(plan))
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


def _no_update(stage: StagePlan) -> StagePlan:
    return replace(stage, update_seconds=0.0)


def _no_reduction(stage: StagePlan) -> StagePlan:
    return replace(stage, reduce_seconds=0.0, tied_seconds=None)


def _no_message_cost(stage: StagePlan) -> StagePlan:
    bytes_only = stage.output_seconds - 2 * (stage.message_seconds or 0.0)
    return replace(stage, output_seconds=max(0.0, bytes_only))


def _no_bytes(stage: StagePlan) -> StagePlan:
    return replace(stage, output_seconds=0.0)


def _bare(plan: PipelinePlan) -> Callable[[StagePlan], StagePlan]:
    """Return what takes the cost of passes beside layers off a stage."""
    backwards = 2 if plan.traits.splits_backward else 1

    def without(stage: StagePlan) -> StagePlan:
        own = stage.pass_seconds or 0.0
        forward = max(0.0, (stage.forward_seconds or 0.0) - own)
        whole = max(stage.compute_seconds - own - backwards * own, forward)
        return replace(stage, forward_seconds=forward, compute_seconds=whole)

    return without
