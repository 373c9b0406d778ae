"""The costs of a pipeline plan's stages by definition, recomputed from layers and edges."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from ...schema.pipeline import DevicePool, PipelineProblem
from ...schema.plan import Plan, Stage
from . import definitions
from .methods import prices_of
from .schedule import lists_of


def pool_of(problem: PipelineProblem, stage: Stage) -> DevicePool | None:
    """Find the pool of a stage's device type; None if the problem has none."""
    return next((p for p in problem.pools if p.device_type == stage.device_type), None)


def planned_memory(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Bytes that a plan must state for a stage.

    Of the stages on one device, the first also counts what the worker itself holds.
    """
    stage = plan.stages[index]
    used, pool = stage_memory(plan, problem, index), pool_of(problem, stage)
    if pool is None or pool.base_memory_bytes is None:
        return used
    device = (stage.device_type, stage.first_device)
    before = [(other.device_type, other.first_device) for other in plan.stages[:index]]
    alone = pool.workspace_bytes + pool.base_memory_bytes
    return used if device in before else used + alone


def stage_memory(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Bytes of memory of one replica of a stage under the plan's schedule."""
    stage = plan.stages[index]
    in_flight, versions = held(plan, problem, index)
    inside = set(stage.layers)
    mine = [layer for layer in problem.layers if layer.id in inside]
    copied, _ = definitions.tied_bytes(problem.layers, inside)
    return definitions.replica_bytes(
        sum(layer.weight_bytes for layer in mine) + copied,
        sum(layer.kept_bytes for layer in mine),
        crossing_bytes(plan, problem, index),
        (in_flight, versions),
        problem.optimizer.state_bytes_per_weight_byte,
        recompute=plan.recomputes,
    )


def held(plan: Plan, problem: PipelineProblem, index: int) -> tuple[int, int]:
    """Microbatches in flight and weight versions of one replica of a stage."""
    if plan.traits.is_uniform:
        return lists_of(plan).held[index]
    replicas = plan.stages[index].num_replicas
    workers = sum(entry.num_replicas for entry in plan.stages[index:])
    count = problem.num_microbatches
    in_flight = definitions.in_flight(problem.schedule, workers, replicas, count)
    return in_flight, definitions.weight_versions(problem.schedule, in_flight)


def crossing_bytes(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Bytes sent into or past stage ``index`` per microbatch.

    These are the outputs of all earlier layers that stage ``index`` or a later stage needs.
    """
    before = {name for stage in plan.stages[:index] for name in stage.layers}
    prices = prices_of(problem)
    own = None if prices is None else prices.crossing_bytes(problem, before)
    if own is not None:
        return own
    senders = {
        source
        for source, target in problem.links
        if problem.layers[source].id in before and problem.layers[target].id not in before
    }
    return sum(problem.layers[source].activation_bytes for source in senders)


def timed_stage(plan: Plan, problem: PipelineProblem, index: int) -> Stage:
    """Return a stage with its numbers counted again from its layers, links and pool.

    All-reduces and updates are those of flat plans; None in nested ones, which do not count them.
    """
    stage = plan.stages[index]
    pool = pool_of(problem, stage)
    assert pool is not None
    compute, weights = sums(plan, problem, [index])
    names = set(stage.layers)
    total = sum(layer.weight_bytes for layer in problem.layers)
    in_flight, versions = held(plan, problem, index)
    sent = 0.0
    if index + 1 < len(plan.stages):
        sent = _boundary_at(plan, problem, index + 1, _boundary_link(plan, problem, index + 1))
    flat = plan.solved == "flat"
    prices = prices_of(problem)
    price = _flat_price if prices is None else prices.of_stage
    return replace(
        stage,
        num_in_flight=in_flight,
        weight_versions=versions,
        seconds_per_input=price(plan, problem, index),
        compute_seconds=compute,
        forward_seconds=definitions.own_seconds(problem, pool, len(plan.stages))[0]
        + sum(
            seconds
            for layer, seconds in zip(problem.layers, pool.forward_seconds, strict=True)
            if layer.id in names
        ),
        output_seconds=sent,
        reduce_seconds=definitions.reduce_seconds(
            problem, pool, weights, stage.num_replicas, _span(plan, problem, index)
        )
        if flat
        else None,
        update_seconds=pool.update_seconds * (weights / max(total, 1)) if flat else None,
        tied_seconds=_tied_seconds(problem, stage) if flat else None,
        pass_seconds=definitions.own_seconds(problem, pool, len(plan.stages))[0],
        message_seconds=definitions.message_seconds(problem) if sent else 0.0,
        reduce_latency_seconds=pool.reduce_latency_seconds
        if definitions.counts_overheads(problem) and pool.reduce_bytes_per_second is not None
        else None,
    )


def _flat_price(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Seconds per input of a stage and its boundaries, over the link between its own replicas."""
    ends = [cut for cut in (index, index + 1) if 0 < cut < len(plan.stages)]
    bandwidth = _span(plan, problem, index)
    boundaries = [_weighed_boundary(plan, problem, cut, bandwidth) for cut in ends]
    return max([_flat_stage(plan, problem, index), *boundaries])


def _tied_seconds(problem: PipelineProblem, stage: Stage) -> float | None:
    """Seconds of the all-reduce of tied weights; None if the model has none.

    Counted as a ring over the stage's replicas and one more member, at the slowest link.
    """
    if not any(layer.shared_with for layer in problem.layers):
        return None
    _, split = definitions.tied_bytes(problem.layers, set(stage.layers))
    members = stage.num_replicas + 1
    return definitions.ring_seconds(split, members, definitions.slowest_link(problem))


def seconds_per_input(plan: Plan, problem: PipelineProblem) -> float:
    """Seconds per input of the slowest stage or boundary of a plan (thesis 2.4.1)."""
    prices = prices_of(problem)
    if prices is not None:
        return prices.objective(plan, problem)
    return max(
        [_flat_stage(plan, problem, index) for index in range(len(plan.stages))]
        + [_flat_boundary(plan, problem, index) for index in range(1, len(plan.stages))]
    )


def sums(plan: Plan, problem: PipelineProblem, stages: list[int]) -> tuple[float, float]:
    """Sum the compute seconds and weight bytes of stages, on the first one's device type.

    The fixed cost of passes is counted for a single stage only; for several stages it is counted at
    a lower level of nesting.
    """
    names = {name for index in stages for name in plan.stages[index].layers}
    pool = pool_of(problem, plan.stages[stages[0]])
    assert pool is not None
    passes = 2 if plan.recomputes else 1
    chosen = [i for i, layer in enumerate(problem.layers) if layer.id in names]
    own = sum(definitions.own_seconds(problem, pool, len(plan.stages)))
    return (
        own + sum(passes * pool.forward_seconds[i] + pool.backward_seconds[i] for i in chosen),
        sum(problem.layers[i].weight_bytes for i in chosen),
    )


def _slowest_link(pool: DevicePool, devices: Iterable[int]) -> float:
    """Bytes per second of the slowest link between any two of the devices."""
    pairs = combinations(tuple(devices), 2)
    rates = (definitions.link_between(pool.levels, one, two) for one, two in pairs)
    return min(rates, default=float("inf"))


def _span(plan: Plan, problem: PipelineProblem, index: int) -> float:
    stage = plan.stages[index]
    pool = pool_of(problem, stage)
    assert pool is not None
    return _slowest_link(pool, stage.held)


def _flat_stage(plan: Plan, problem: PipelineProblem, index: int) -> float:
    stage, bandwidth = plan.stages[index], _span(plan, problem, index)
    pool = pool_of(problem, stage)
    assert pool is not None
    compute, weights = sums(plan, problem, [index])
    if problem.stage_cost == "thesis":
        return definitions.thesis_seconds(compute, weights, stage.num_replicas, bandwidth)
    total = sum(layer.weight_bytes for layer in problem.layers)
    update = pool.update_seconds * weights / max(total, 1)
    rings = definitions.reduce_seconds(problem, pool, weights, stage.num_replicas, bandwidth)
    return definitions.stage_seconds(problem, compute, update, stage.num_replicas, rings)


def _boundary_link(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Bytes per second of the slowest link between stages ``index`` - 1 and ``index``.

    Every pair of their replicas counts.
    """
    before, after = plan.stages[index - 1], plan.stages[index]
    prices = prices_of(problem)
    if prices is not None:
        return prices.link(problem, before, after)
    if before.device_type == after.device_type:
        pool = pool_of(problem, after)
        assert pool is not None
        return _slowest_link(pool, {*before.held, *after.held})
    spans = (_span(plan, problem, index - 1), _span(plan, problem, index))
    return min(*spans, problem.inter_bytes_per_second or 0.0)


def _flat_boundary(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Seconds per input of the boundary before stage ``index``, in a flat plan's bottleneck."""
    return _weighed_boundary(plan, problem, index, _boundary_link(plan, problem, index))


def _weighed_boundary(
    plan: Plan, problem: PipelineProblem, index: int, bytes_per_second: float
) -> float:
    if not problem.count_boundaries:
        return 0.0
    seconds = _boundary_at(plan, problem, index, bytes_per_second)
    count = problem.num_microbatches
    flushes = problem.traits.flushes and problem.stage_cost == "ring"
    return seconds * (count - 1) / count if flushes else seconds


def _boundary_at(
    plan: Plan, problem: PipelineProblem, index: int, bytes_per_second: float
) -> float:
    """Seconds of a microbatch's messages over the boundary before stage ``index``."""
    return definitions.boundary_seconds(
        crossing_bytes(plan, problem, index),
        bytes_per_second,
        definitions.message_seconds(problem),
    )
