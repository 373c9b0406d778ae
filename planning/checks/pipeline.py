"""Check a pipeline plan against the definitions: graph, links, memory and stage costs.

Everything is recomputed from the problem's layers and edges, independently of how solvers find
plans. The code is slow and simple on purpose.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import isclose

from ...schema.errors import ProblemError
from ...schema.pipeline import DevicePool, PipelineProblem
from ...schema.plan import Plan, Stage
from ...schema.restrictions import Restrictions
from . import definitions
from .chain_bound import is_proved
from .methods import METHOD_JUDGES
from .pipeline_recount import (
    crossing_bytes,
    planned_memory,
    pool_of,
    seconds_per_input,
    stage_memory,
    timed_stage,
)
from .plan import device_faults, number_faults, question_faults, step_faults
from .proofs import Verdict
from .schedule import lists_of
from .step import PARTS, parts_of, step_seconds

_TOLERANCE = 1e-6


def check(plan: Plan, problem: PipelineProblem) -> Verdict:
    """List every fault of a plan for a problem.

    Args:
        plan: The plan to check, from a solver or a file.
        problem: The problem that it claims to answer.

    Returns:
        One line per fault, empty if the plan is valid; and how its bound is known.
    """
    faults = _header_faults(plan, problem) + _layer_faults(plan, problem)
    faults = faults or _device_faults(plan, problem) or _memory_faults(plan, problem)
    faults = faults or _schedule_faults(plan, problem) or [*_claim_faults(plan, problem)]
    bound, asked = plan.proof.lower_bound, plan.restrictions
    if faults or bound is None:
        return Verdict(faults)
    proved = is_proved(problem, bound, asked or Restrictions())
    return Verdict((), "recomputed" if proved else "stated")


def _header_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    pairs = [
        ("microbatch_size", plan.microbatch_size, problem.microbatch_size),
        ("microbatches", plan.num_microbatches, problem.num_microbatches),
        ("schedule", plan.schedule, problem.schedule),
        ("stage_cost", plan.stage_cost, problem.stage_cost),
        ("solved", plan.solved, problem.solved),
        ("objective", plan.objective, problem.minimises),
    ]
    if plan.link_bytes_per_second is not None:
        pairs.append(
            ("link_bytes_per_second", plan.link_bytes_per_second, problem.link_bytes_per_second)
        )
    faults = [
        f"{name} is {got}, the problem says {want}" for name, got, want in pairs if got != want
    ]
    faults += [*question_faults(plan, problem), *_optimizer_faults(plan, problem)]
    if problem.recompute is not None and plan.recomputes != problem.recompute:
        faults.append(f"recompute is {plan.recomputes}, the problem says {problem.recompute}")
    if plan.solved == "nested":
        faults += METHOD_JUDGES.get("pipedream-nested").faults(plan, problem)
    counts = [stage.num_replicas for stage in plan.stages]
    if problem.most_devices is not None and plan.num_devices > problem.most_devices:
        faults.append(f"{plan.num_devices} devices, at most {problem.most_devices} are asked for")
    if problem.most_stages is not None and len(plan.stages) > problem.most_stages:
        faults.append(f"{len(plan.stages)} stages, at most {problem.most_stages} are asked for")
    too_many = problem.traits.is_double_buffered and sum(counts) > problem.most_workers
    if not all(map(problem.may_replicate, counts)) or too_many:
        faults.append(
            f"launch cannot run {problem.num_microbatches} microbatches of {problem.schedule} on "
            f"replicas {counts}"
        )
    if problem.num_stages not in (None, len(plan.stages)):
        faults.append(f"{len(plan.stages)} stages, the problem asks for {problem.num_stages}")
    return faults


def _optimizer_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    asked, planned = problem.optimizer, plan.optimizer
    if planned is None or isclose(
        planned.state_bytes_per_weight_byte, asked.state_bytes_per_weight_byte, rel_tol=_TOLERANCE
    ):
        return []
    return [f"memory is planned for {planned}, the problem says {asked}"]


def _layer_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    known = {layer.id for layer in problem.layers}
    faults = [
        f"layer {layer.id} is in no stage" for layer in problem.layers if layer.id not in stage_of
    ]
    faults += [f"layer {name} is not in the problem" for name in stage_of if name not in known]
    if faults:
        return faults
    listed = [name for stage in plan.stages for name in stage.layers]
    for source, target in problem.links:
        before, after = problem.layers[source].id, problem.layers[target].id
        if stage_of[before] > stage_of[after]:
            faults.append(f"{before} feeds {after}, which is in an earlier stage")
        elif listed.index(before) > listed.index(after):
            faults.append(f"{before} feeds {after}, which its stage lists before it")
    return faults + _tied_faults(plan, problem, stage_of)


def _tied_faults(plan: Plan, problem: PipelineProblem, stage_of: dict[str, int]) -> list[str]:
    """List tied weights over several stages without a flush: their stages update separately."""
    if plan.traits.flushes:
        return []
    return [
        f"{layer.id} and {other} share weights in two stages, which {plan.schedule} updates apart"
        for layer in problem.layers
        for other in layer.shared_with
        if stage_of[layer.id] != stage_of[other]
    ]


def _device_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    there = {pool.device_type: definitions.devices_of(pool) for pool in problem.pools}
    faults = [*_chunk_faults(plan), *device_faults(plan, there)]
    for pool in problem.pools:
        mine = [stage for stage in plan.stages if stage.device_type == pool.device_type]
        if plan.traits.is_chunked:
            mine = _one_of_each_device(mine)
        used, known = sum(stage.num_replicas for stage in mine), definitions.devices_of(pool)
        if problem.workers == "exactly" and used < known:
            faults.append(f"{used} of {known} {pool.device_type} are used, not all")
        faults += _held_faults(mine, pool)
    for index, stage in enumerate(plan.stages):
        if pool_of(problem, stage) is None:
            faults.append(f"stage {index}: no pool of {stage.device_type}")
        if not problem.replication and stage.num_replicas > 1:
            faults.append(f"stage {index}: {stage.num_replicas} replicas, none are allowed")
    return faults


def _chunk_faults(plan: Plan) -> list[str]:
    """List stages that do not share the devices that the schedule's placement gives them."""
    chunks, known = plan.num_model_chunks, plan.traits.placement
    if not plan.traits.is_chunked:
        return []
    p, rest = divmod(len(plan.stages), chunks)
    if rest or chunks < 2:
        return [f"{len(plan.stages)} stages are not equally many for each device"]
    faults = []
    for index, stage in enumerate(plan.stages[p:], p):
        place = index % p if known == "round-robin" else len(plan.stages) - 1 - index
        first = plan.stages[place]
        if (stage.device_type, stage.held) != (first.device_type, first.held):
            faults.append(f"stage {index} is not on the devices of stage {place}")
    held = [(stage.device_type, device) for stage in plan.stages[:p] for device in stage.held]
    if len(set(held)) < len(held):
        faults.append("positions of the pipeline share devices")
    return faults


def _one_of_each_device(stages: list[Stage]) -> list[Stage]:
    """Select one stage of each set of stages on the same devices, in the order of the devices."""
    held = {stage.first_device: stage for stage in stages}
    return [held[first] for first in sorted(held)]


def _held_faults(stages: list[Stage], pool: DevicePool) -> list[str]:
    """List devices that two stages hold or that do not exist; the order of devices is free."""
    taken: set[int] = set()
    faults = []
    for stage in stages:
        twice = sorted(taken & set(stage.held))
        faults += [f"device {device} of {pool.device_type} is given out twice" for device in twice]
        taken |= set(stage.held)
    last = definitions.devices_of(pool) - 1
    if taken and max(taken) > last:
        faults.append(f"{pool.device_type}: device {max(taken)} is held, the last is {last}")
    return faults


def _memory_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    faults = []
    of_device: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for index, stage in enumerate(plan.stages):
        used = stage_memory(plan, problem, index)
        of_device.setdefault((stage.device_type, stage.first_device), []).append((index, used))
        whole = planned_memory(plan, problem, index)
        if abs(whole - (stage.memory_bytes or 0)) > 1 + _TOLERANCE * whole:
            faults.append(
                f"stage {index}: memory_bytes is {stage.memory_bytes}, it needs {whole:.0f}"
            )
    for held in of_device.values():
        names = " + ".join(f"stage {index}" for index, _ in held)
        used, stage = sum(bytes_ for _, bytes_ in held), plan.stages[held[0][0]]
        pool = pool_of(problem, stage)
        if pool is None or pool.memory_bytes is None:
            continue
        needed = used + pool.workspace_bytes + (pool.base_memory_bytes or 0)
        # The published optimizer checks memory less strictly; its plans serve comparison only.
        if needed > pool.memory_bytes + 1 and problem.stage_cost != "published":
            faults.append(
                f"{names} needs {needed:.0f} bytes on a {stage.device_type} of "
                f"{pool.memory_bytes}: {needed - pool.memory_bytes:.0f} too many"
            )
    return faults


def _schedule_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    """Validate the schedule that the plan would run, and its in-flight and version counts."""
    try:
        faults = lists_of(plan).faults
    except ProblemError as error:
        # A plan that need not be launched may describe only the steady state.
        return [f"schedule: {error.message}"] if problem.launchable else []
    return [f"schedule: {fault}" for fault in faults]


def _claim_faults(plan: Plan, problem: PipelineProblem) -> Iterator[str]:
    stages = [timed_stage(plan, problem, index) for index in range(len(plan.stages))]
    counted = replace(plan, stages=tuple(stages))
    steady = 0.0 if plan.objective == "step_seconds" else seconds_per_input(plan, problem)
    fixed = definitions.step_overhead(problem, {stage.device_type for stage in plan.stages})
    step = problem.num_microbatches * steady
    if problem.traits.flushes:
        step = step_seconds(counted)
    step += fixed
    whole = replace(plan.predicted, step_seconds=step, fixed_seconds=fixed, load_seconds=None)
    counted = replace(counted, predicted=whole)
    parts = {name: 0.0 for name in PARTS} | {
        "fixed_seconds": fixed,
        "compute_seconds": step - fixed,
    }
    parts = parts_of(counted) or parts  # else the step must be compute and fixed cost only
    error, got = problem.step_error, plan.predicted
    low = None if error is None else max(0.0, got.step_seconds * (1 - error))
    high = None if error is None else got.step_seconds * (1 + error)
    objective = step if plan.objective == "step_seconds" else steady
    counted = replace(
        counted,
        predicted=replace(whole, **parts, step_seconds_low=low, step_seconds_high=high),
        proof=replace(plan.proof, objective=objective),
    )
    stated = {name: getattr(got, name) or 0.0 for name in PARTS}
    if any(getattr(got, name) is not None for name in PARTS):  # then the parts are the whole step
        plan = replace(plan, predicted=replace(got, **stated))
    yield from number_faults(plan, counted, _TOLERANCE)
    tolerance = plan.proof.tolerance
    if tolerance is not None and (error is None or tolerance > error):
        yield f"proof.tolerance is {tolerance}, the problem's steps are off by {error}"
    yield from step_faults(plan, _TOLERANCE)
    replicas = plan.position_replicas
    noam = -(-sum(replicas) // replicas[0])  # workers over input-stage replicas (2.4.2)
    if noam != plan.noam:
        yield f"noam is {plan.noam}, expected {noam}"


__all__ = ["check", "crossing_bytes", "seconds_per_input", "stage_memory", "timed_stage"]
