"""Judge a pipeline plan from the definitions: the graph, the links, the memory, the prices.

Everything is recounted from the problem's layers and edges; nothing here knows how plans are
found. Slow and plain on purpose.
"""

from dataclasses import replace
from math import isclose, prod

from ..costs import pipeline as costs
from ..schedules.counting import held_by_stage
from ..schedules.of_plan import schedule_of, times_of
from ..schedules.timing import time_schedule
from ..schema.pipeline import (
    ALIKE,
    CHUNKED,
    FLUSHING,
    DevicePool,
    PipelinePlan,
    PipelineProblem,
    StagePlan,
)

_TOLERANCE = 1e-6


def check(plan: PipelinePlan, problem: PipelineProblem) -> list[str]:
    """Find every fault of a plan for a problem.

    Args:
        plan: What a solver or a file claims.
        problem: What was asked.

    Returns:
        One line a fault; empty when the plan holds.
    """
    faults = _header_faults(plan, problem) + _layer_faults(plan, problem)
    if faults:
        return faults
    faults = _device_faults(plan, problem) + _memory_faults(plan, problem)
    return faults or _claim_faults(plan, problem)


def _header_faults(plan: PipelinePlan, problem: PipelineProblem) -> list[str]:
    pairs = [
        ("model", plan.model, problem.model),
        ("microbatch_size", plan.microbatch_size, problem.microbatch_size),
        ("microbatches", plan.microbatches, problem.num_microbatches),
        ("schedule", plan.schedule, problem.schedule),
        ("stage_cost", plan.stage_cost, problem.stage_cost),
        ("solved", plan.solved, problem.solved),
        ("objective", plan.objective, problem.minimises),
    ]
    faults = [
        f"{name} is {got}, the problem says {want}" for name, got, want in pairs if got != want
    ]
    if problem.recompute is not None and plan.recompute != problem.recompute:
        faults.append(f"recompute is {plan.recompute}, the problem says {problem.recompute}")
    if plan.solved == "nested":
        faults += _nesting_faults(plan, problem)
    if problem.num_stages not in (None, len(plan.stages)):
        faults.append(f"{len(plan.stages)} stages, the problem asks for {problem.num_stages}")
    return faults


def _nesting_faults(plan: PipelinePlan, problem: PipelineProblem) -> list[str]:
    depth = len(problem.pools[0].levels)
    return [
        f"stage {index}: nesting must name {depth} blocks whose replicas multiply to "
        f"{stage.num_replicas}"
        for index, stage in enumerate(plan.stages)
        if len(stage.nesting) != depth
        or prod(block.num_replicas for block in stage.nesting) != stage.num_replicas
    ]


def _layer_faults(plan: PipelinePlan, problem: PipelineProblem) -> list[str]:
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    known = {layer.id for layer in problem.layers}
    faults = [
        f"layer {layer.id} is in no stage" for layer in problem.layers if layer.id not in stage_of
    ]
    faults += [f"layer {name} is not in the problem" for name in stage_of if name not in known]
    if faults:
        return faults
    for source, target in problem.links:
        before, after = problem.layers[source].id, problem.layers[target].id
        if stage_of[before] > stage_of[after]:
            faults.append(f"{before} feeds {after}, which is in an earlier stage")
    return faults


def _pool(problem: PipelineProblem, stage: StagePlan) -> DevicePool | None:
    return next((p for p in problem.pools if p.device_type == stage.device_type), None)


def _device_faults(plan: PipelinePlan, problem: PipelineProblem) -> list[str]:
    faults: list[str] = []
    for pool in problem.pools:
        mine = [stage for stage in plan.stages if stage.device_type == pool.device_type]
        if plan.schedule in CHUNKED:
            mine = _one_of_each_device(mine)
        used = sum(stage.num_replicas for stage in mine)
        if used > pool.num_devices:
            faults.append(f"{used} {pool.device_type} are used, {pool.num_devices} exist")
        if problem.workers == "exactly" and used < pool.num_devices:
            faults.append(f"{used} of {pool.num_devices} {pool.device_type} are used, not all")
        if plan.solved == "flat":
            faults += _run_faults(mine, pool)
    for index, stage in enumerate(plan.stages):
        if _pool(problem, stage) is None:
            faults.append(f"stage {index}: no pool of {stage.device_type}")
        if not problem.replication and stage.num_replicas > 1:
            faults.append(f"stage {index}: {stage.num_replicas} replicas, none are allowed")
    return faults


def _one_of_each_device(stages: list[StagePlan]) -> list[StagePlan]:
    """One stage of those that share their devices, in the order of the devices."""
    held = {stage.first_device: stage for stage in stages}
    return [held[first] for first in sorted(held)]


def _run_faults(stages: list[StagePlan], pool: DevicePool) -> list[str]:
    free, faults = 0, []
    for stage in stages:
        if stage.first_device < free:
            faults.append(f"device {stage.first_device} of {pool.device_type} is given out twice")
        free = max(free, stage.first_device + stage.num_replicas)
    if free > pool.num_devices:
        faults.append(f"{pool.device_type}: a run ends behind device {pool.num_devices - 1}")
    return faults


def stage_memory(plan: PipelinePlan, problem: PipelineProblem, index: int) -> float:
    """Bytes of one replica of a stage under the plan's schedule, by definition."""
    stage = plan.stages[index]
    in_flight, versions = _held(plan, problem, index)
    inside = set(stage.layers)
    mine = [layer for layer in problem.layers if layer.id in inside]
    return costs.stage_bytes(
        sum(layer.weight_bytes for layer in mine),
        sum(layer.kept_bytes for layer in mine),
        crossing_bytes(plan, problem, index),
        in_flight,
        versions,
        problem.state_bytes_per_weight_byte,
        recompute=plan.recompute,
    )


def _held(plan: PipelinePlan, problem: PipelineProblem, index: int) -> tuple[int, int]:
    """Microbatches in flight and weight versions of one replica of a stage."""
    if plan.schedule in ALIKE:
        return held_by_stage(schedule_of(plan))[index]
    replicas = plan.stages[index].num_replicas
    workers = sum(entry.num_replicas for entry in plan.stages[index:])
    in_flight = costs.num_in_flight(problem.schedule, workers, replicas, problem.num_microbatches)
    is_only = len(plan.stages) == 1
    return in_flight, costs.weight_versions(problem.schedule, in_flight, is_only_stage=is_only)


def crossing_bytes(plan: PipelinePlan, problem: PipelineProblem, index: int) -> float:
    """What flows into stage ``index`` or past it: outputs of earlier layers needed from it on."""
    before = {name for stage in plan.stages[:index] for name in stage.layers}
    if problem.cut_rule == "released" or problem.stage_cost == "published":
        return _released_crossing(problem, before)
    senders = {
        source
        for source, target in problem.links
        if problem.layers[source].id in before and problem.layers[target].id not in before
    }
    return sum(problem.layers[source].activation_bytes for source in senders)


def _released_crossing(problem: PipelineProblem, before: set[str]) -> float:
    """The released optimizer's reading: last layers, and ancestors that feed past one of them."""
    inside = {i for i, layer in enumerate(problem.layers) if layer.id in before}
    if not inside or len(inside) == len(problem.layers):
        return 0.0
    ancestors: list[set[int]] = [set() for _ in problem.layers]
    for source, target in sorted(problem.links, key=lambda link: link[1]):
        ancestors[target] |= ancestors[source] | {source}
    covered = set().union(*(ancestors[layer] for layer in inside))
    last = inside - covered
    extra = {
        source
        for member in last
        for source, target in problem.links
        if source in ancestors[member] and target not in ancestors[member] and target != member
    }
    return sum(problem.layers[layer].activation_bytes for layer in last | extra)


def _memory_faults(plan: PipelinePlan, problem: PipelineProblem) -> list[str]:
    faults = []
    of_device: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for index, stage in enumerate(plan.stages):
        used = stage_memory(plan, problem, index)
        of_device.setdefault((stage.device_type, stage.first_device), []).append((index, used))
        if abs(used - stage.memory_bytes) > 1 + _TOLERANCE * used:
            faults.append(
                f"stage {index}: memory_bytes is {stage.memory_bytes}, it needs {used:.0f}"
            )
    for held in of_device.values():
        names = " + ".join(f"stage {index}" for index, _ in held)
        used, stage = sum(bytes_ for _, bytes_ in held), plan.stages[held[0][0]]
        pool = _pool(problem, stage)
        limit = pool.memory_bytes if pool is not None else None
        # The released optimizer's own test is laxer; its plans are for comparison.
        if limit is not None and used > limit + 1 and problem.stage_cost != "published":
            faults.append(
                f"{names} needs {used:.0f} bytes on a {stage.device_type} of {limit}: "
                f"{used - limit:.0f} too many"
            )
    return faults


def _claim_faults(plan: PipelinePlan, problem: PipelineProblem) -> list[str]:
    faults = _forward_faults(plan, problem)
    expected = plan
    if plan.solved == "flat":
        stages = [timed_stage(plan, problem, index) for index in range(len(plan.stages))]
        expected = replace(plan, stages=tuple(stages))
        faults += _stage_time_faults(plan, expected)
    steady = 0.0 if plan.objective == "step" else seconds_per_input(plan, problem)
    step = problem.num_microbatches * steady
    if problem.schedule in FLUSHING:
        step = _timed_step(expected)
    found = step if plan.objective == "step" else steady
    claimed = plan.proof.objective
    if not isclose(found, claimed, rel_tol=_TOLERANCE, abs_tol=1e-15):
        faults.append(f"proof.objective is {claimed}, the stages give {found}")
    bound = plan.proof.lower_bound
    if bound is not None and bound > claimed * (1 + _TOLERANCE):
        faults.append(f"proof.lower_bound {bound} is above the objective {claimed}")
    if not isclose(step, plan.predicted.step_seconds, rel_tol=_TOLERANCE, abs_tol=1e-15):
        faults.append(f"predicted.step_seconds is {plan.predicted.step_seconds}, expected {step}")
    noam = costs.noam(plan.position_replicas)
    if noam != plan.noam:
        faults.append(f"noam is {plan.noam}, expected {noam}")
    return faults


def _timed_step(plan: PipelinePlan) -> float:
    """The timer's makespan of a plan that flushes, all-reduces and updates included."""
    return time_schedule(schedule_of(plan), times_of(plan)).makespan_seconds


def timed_stage(plan: PipelinePlan, problem: PipelineProblem, index: int) -> StagePlan:
    """A stage with the times that its layers, its links and its pool give."""
    stage = plan.stages[index]
    pool = _pool(problem, stage)
    assert pool is not None
    compute, weights = _sums(plan, problem, [index])
    names = set(stage.layers)
    total = sum(layer.weight_bytes for layer in problem.layers)
    sent = 0.0
    if index + 1 < len(plan.stages):
        sent = costs.boundary_seconds(
            crossing_bytes(plan, problem, index + 1), _boundary_link(plan, problem, index + 1)
        )
    return replace(
        stage,
        compute_seconds=compute,
        forward_seconds=sum(
            seconds
            for layer, seconds in zip(problem.layers, pool.forward_seconds, strict=True)
            if layer.id in names
        ),
        output_seconds=sent,
        reduce_seconds=costs.ring_sync_seconds(
            weights, stage.num_replicas, _span(plan, problem, index)
        ),
        update_seconds=pool.update_seconds * (weights / max(total, 1)),
    )


def _stage_time_faults(plan: PipelinePlan, expected: PipelinePlan) -> list[str]:
    faults = []
    for index, stage in enumerate(plan.stages):
        for name in ("compute_seconds", "output_seconds", "reduce_seconds", "update_seconds"):
            got, want = getattr(stage, name), getattr(expected.stages[index], name)
            if got is not None and not isclose(got, want, rel_tol=_TOLERANCE, abs_tol=1e-12):
                faults.append(f"stage {index}: {name} is {got}, expected {want}")
    return faults


def _forward_faults(plan: PipelinePlan, problem: PipelineProblem) -> list[str]:
    position = {layer.id: index for index, layer in enumerate(problem.layers)}
    faults = []
    for index, stage in enumerate(plan.stages):
        pool = _pool(problem, stage)
        if stage.forward_seconds is None or pool is None:
            continue
        forward = sum(pool.forward_seconds[position[name]] for name in stage.layers)
        if not isclose(stage.forward_seconds, forward, rel_tol=_TOLERANCE, abs_tol=1e-12):
            faults.append(
                f"stage {index}: forward_seconds is {stage.forward_seconds}, expected {forward}"
            )
    return faults


def seconds_per_input(plan: PipelinePlan, problem: PipelineProblem) -> float:
    """The objective of a plan's stages: the slowest stage or boundary, by definition."""
    if plan.solved == "nested":
        return _nested_seconds(plan, problem, list(range(len(plan.stages))), 0)
    return max(
        [_flat_stage(plan, problem, index) for index in range(len(plan.stages))]
        + [_flat_boundary(plan, problem, index) for index in range(1, len(plan.stages))]
    )


def _sums(plan: PipelinePlan, problem: PipelineProblem, stages: list[int]) -> tuple[float, float]:
    """Compute seconds and weight bytes of some stages, on the first one's device type."""
    names = {name for index in stages for name in plan.stages[index].layers}
    pool = _pool(problem, plan.stages[stages[0]])
    assert pool is not None
    passes = 2 if plan.recompute else 1
    chosen = [i for i, layer in enumerate(problem.layers) if layer.id in names]
    return (
        sum(passes * pool.forward_seconds[i] + pool.backward_seconds[i] for i in chosen),
        sum(problem.layers[i].weight_bytes for i in chosen),
    )


def _slowest_link(pool: DevicePool, one: int, other: int) -> float:
    level = costs.shared_level(pool.levels, one, other)
    return costs.slowest_links(pool.levels)[level - 1] if level else float("inf")


def _span(plan: PipelinePlan, problem: PipelineProblem, index: int) -> float:
    stage = plan.stages[index]
    pool = _pool(problem, stage)
    assert pool is not None
    return _slowest_link(pool, stage.first_device, stage.first_device + stage.num_replicas - 1)


def _flat_stage(plan: PipelinePlan, problem: PipelineProblem, index: int) -> float:
    stage, bandwidth = plan.stages[index], _span(plan, problem, index)
    pool = _pool(problem, stage)
    assert pool is not None
    compute, weights = _sums(plan, problem, [index])
    if problem.stage_cost == "thesis":
        return costs.thesis_seconds(compute, weights, stage.num_replicas, bandwidth)
    total = sum(layer.weight_bytes for layer in problem.layers)
    return costs.ring_seconds(
        problem.schedule,
        compute,
        pool.update_seconds * weights / max(total, 1),
        weights,
        stage.num_replicas,
        problem.num_microbatches,
        bandwidth,
    )


def _boundary_link(plan: PipelinePlan, problem: PipelineProblem, index: int) -> float:
    """The slowest link that any pair of replicas of stage index - 1 and index has."""
    before, after = plan.stages[index - 1], plan.stages[index]
    if before.device_type == after.device_type:
        pool = _pool(problem, after)
        assert pool is not None
        low, high = sorted((before, after), key=lambda stage: stage.first_device)
        return _slowest_link(pool, low.first_device, high.first_device + high.num_replicas - 1)
    spans = (_span(plan, problem, index - 1), _span(plan, problem, index))
    return min(*spans, problem.inter_bytes_per_second or 0.0)


def _flat_boundary(plan: PipelinePlan, problem: PipelineProblem, index: int) -> float:
    """What a boundary weighs in the bottleneck."""
    if not problem.count_boundaries:
        return 0.0
    bandwidth = _boundary_link(plan, problem, index)
    seconds = costs.boundary_seconds(crossing_bytes(plan, problem, index), bandwidth)
    count = problem.num_microbatches
    flushes = problem.schedule in FLUSHING and problem.stage_cost == "ring"
    return seconds * (count - 1) / count if flushes else seconds


def _nested_seconds(
    plan: PipelinePlan, problem: PipelineProblem, stages: list[int], depth: int
) -> float:
    """A(i -> j) of the blocks at one level, each with the level below inside."""
    levels = problem.pools[0].levels
    number = len(levels) - 1 - depth
    blocks: dict[int, list[int]] = {}
    for index in stages:
        blocks.setdefault(plan.stages[index].nesting[depth].index, []).append(index)
    groups = [blocks[key] for key in sorted(blocks)]
    slowest = 0.0
    for order, group in enumerate(groups):
        replicas = plan.stages[group[0]].nesting[depth].num_replicas
        compute, weights = _sums(plan, problem, group)
        if number > 0:
            compute = _nested_seconds(plan, problem, group, depth + 1)
        slowest = max(
            slowest,
            _block(problem, number, order, compute, weights, replicas),
            _nested_boundaries(plan, problem, groups, order, replicas, number),
        )
    return slowest


def _block(
    problem: PipelineProblem, number: int, order: int, compute: float, weights: float, replicas: int
) -> float:
    levels = problem.pools[0].levels
    bandwidth = levels[number].bytes_per_second
    if problem.stage_cost == "thesis":
        return costs.thesis_seconds(compute, weights, replicas, bandwidth)
    if problem.stage_cost == "published":
        below = levels[number - 1].num_components if number and order == 0 else 1
        return costs.published_seconds(compute, weights, replicas, bandwidth, below)
    below = prod(level.num_components for level in levels[:number])
    return costs.nested_ring_seconds(compute, weights, replicas, bandwidth, below)


def _nested_boundaries(
    plan: PipelinePlan,
    problem: PipelineProblem,
    groups: list[list[int]],
    order: int,
    replicas: int,
    number: int,
) -> float:
    """What a block pays for its input and, in the released code, its output too."""
    if order == 0 or not problem.count_boundaries:
        return 0.0
    bandwidth = problem.pools[0].levels[number].bytes_per_second
    into = costs.boundary_seconds(crossing_bytes(plan, problem, groups[order][0]), bandwidth)
    if problem.stage_cost != "published":
        return into
    out = groups[order][-1] + 1
    after = crossing_bytes(plan, problem, out) if out < len(plan.stages) else 0.0
    return max(into, costs.boundary_seconds(after, bandwidth)) / replicas
