"""Build a plan from placed stages, with the cost of each stage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...costs.pipeline import noam, worker_bytes
from ...schema.pipeline import DevicePool, PipelineProblem
from ...schema.plan import NestedBlock, Plan, Prediction, Proof, ReplicaGroup, Stage
from .cuts import layers_of
from .makespan.bound import output_seconds, stages_of, step_of
from .packing import Seats
from .placements import PlacedStage
from .stage_costs import StageCosts

ORDERED = "; optimal among ordered placements, the gap is against all"
"""What is proved where only runs of devices in order were searched to the end."""


def assemble(
    problem: PipelineProblem,
    costs: StageCosts,
    seats: Seats,
    objective: float,
    bound: float | None,
    method: str,
) -> Plan:
    """Build the plan of a placement.

    Args:
        problem: What was asked.
        costs: The tables it was found under, with or without recomputation.
        seats: Stages, first one first, and their devices.
        objective: Seconds per input, or per step, as the problem says.
        bound: A lower bound where the search was cut short; None where it was exhaustive.
        method: How the plan was found.
    """
    return finish(
        problem,
        [_stage(problem, costs, seats, index) for index in range(len(seats.placed))],
        recompute=costs.recompute,
        objective=objective,
        bound=bound,
        step=_step(problem, costs, seats.placed, objective),
        method=method,
    )


def finish(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    *,
    recompute: bool,
    objective: float,
    bound: float | None,
    step: float,
    method: str,
    chunks: int = 1,
) -> Plan:
    """Add prediction and proof to the stages of a plan."""
    lower = objective if bound is None else min(bound, objective)
    places = len(stages) // chunks
    gap = (objective - lower) / objective if objective > 0 else 0.0
    return Plan(
        model=problem.model,
        global_batch_size=problem.global_batch_size,
        microbatch_size=problem.microbatch_size,
        num_microbatches=problem.num_microbatches,
        schedule=problem.schedule,
        num_model_chunks=chunks,
        stages=tuple(replace(s, recompute="full") for s in stages) if recompute else tuple(stages),
        predicted=Prediction(
            step_seconds=step,
            samples_per_second=problem.global_batch_size / step if step > 0 else 0.0,
        ),
        proof=Proof(
            termination="optimal" if gap <= 1e-9 else "feasible",
            objective=objective,
            lower_bound=lower,
            gap=gap,
            method=method,
        ),
        noam=noam([stage.num_replicas for stage in stages[:places]]),
        stage_cost=problem.stage_cost,
        solved=problem.solved,
        workers=problem.workers,
        objective=problem.minimises,
        optimizer=problem.optimizer,
        link_bytes_per_second=problem.link_bytes_per_second,
    )


def _step(
    problem: PipelineProblem, costs: StageCosts, placed: list[PlacedStage], objective: float
) -> float:
    """The timer's step where the schedule flushes, else M inputs of the steady state."""
    if problem.traits.flushes:
        return step_of(problem, costs, placed)
    return problem.num_microbatches * objective


def fill_seconds(costs: StageCosts, placed: list[PlacedStage]) -> float:
    """One microbatch through all stages and back, transfers included."""
    total = 0.0
    for index, (first, last, move) in enumerate(placed):
        total += costs.stage_compute(first, last, move.pool) + output_seconds(costs, placed, index)
    return total


def _stage(problem: PipelineProblem, costs: StageCosts, seats: Seats, index: int) -> Stage:
    placed, held = seats.placed, seats.devices[index]
    first, last, move = placed[index]
    pool = problem.pools[move.pool]
    workers = sum(entry[2].num_replicas for entry in placed[index:])
    in_flight, versions = costs.stashed(move.num_replicas, workers)
    timed = stages_of(problem, costs, placed)[index]
    tied = costs.tied_seconds(first, last, move.num_replicas)
    return stage_on(
        problem,
        pool,
        held,
        memory_bytes=round(costs.stage_memory(first, last, in_flight, versions))
        + worker_bytes(pool),
        layers=names_between(problem, costs, first, last),
        num_in_flight=in_flight,
        weight_versions=versions,
        seconds_per_input=costs.stage_seconds(first, last, move.pool, move.num_replicas, move.span),
        compute_seconds=costs.stage_compute(first, last, move.pool),
        forward_seconds=costs.stage_forward(first, last, move.pool),
        output_seconds=output_seconds(costs, placed, index),
        reduce_seconds=timed.reduce_seconds,
        update_seconds=timed.update_seconds - tied,
        tied_seconds=tied if costs.cuts.split_bytes is not None else None,
    )


def stage_on(
    problem: PipelineProblem,
    pool: DevicePool,
    devices: tuple[int, ...],
    *,
    memory_bytes: int,
    **costs: Any,
) -> Stage:
    """Build a stage with a replica on each of these devices of a pool."""
    is_run = devices[-1] - devices[0] + 1 == len(devices)
    group = ReplicaGroup(
        device_type=pool.device_type,
        num_replicas=len(devices),
        samples=problem.global_batch_size,
        virtual_nodes=-(-problem.num_microbatches // len(devices)),
        virtual_node_batch_size=problem.microbatch_size,
        first_device=devices[0],
        devices=() if is_run else devices,
        memory_bytes=memory_bytes,
    )
    return Stage(replicas=(group,), **costs)


def names_between(
    problem: PipelineProblem, costs: StageCosts, first: int, last: int
) -> tuple[str, ...]:
    """Ids of the layers between two cuts, in the problem's order."""
    sets = costs.cuts.layer_sets
    return tuple(problem.layers[layer].id for layer in layers_of(sets[last] & ~sets[first]))


__all__ = ["NestedBlock", "assemble", "fill_seconds", "finish", "names_between", "stage_on"]
