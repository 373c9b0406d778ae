"""Build a plan from placed stages, with the cost of each stage."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from ...planning.costs.pipeline import StageHeld, noam
from ...schema.errors import InfeasibleError
from ...schema.pipeline import DevicePool, PipelineProblem
from ...schema.plan import Plan, Prediction, Proof, ReplicaGroup, Stage
from .cuts import layers_of
from .placements import PlacedStage, PlacementSpace, Seats
from .stage_costs import PlacementSearch, StageCosts
from .step_sums import output_seconds, step_of

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

    ``objective`` is in seconds per input, or per step, as the problem says. ``bound`` is a lower
    bound where the search was cut short, None where it was exhaustive.
    """
    # The timer's step where the schedule flushes, else M inputs of the steady state.
    step = problem.num_microbatches * objective
    if problem.traits.flushes:
        step = step_of(problem, costs, seats.placed)
    return finish(
        problem,
        [_stage(costs, seats, index) for index in range(len(seats.placed))],
        recompute=costs.recompute,
        objective=objective,
        bound=bound,
        step=step,
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
    places = len(stages) // chunks
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
        proof=proof_of(objective, objective if bound is None else bound, method),
        noam=noam([stage.num_replicas for stage in stages[:places]]),
        stage_cost=problem.stage_cost,
        solved=problem.solved,
        workers=problem.workers,
        objective=problem.minimises,
        optimizer=problem.optimizer,
        link_bytes_per_second=problem.link_bytes_per_second,
    )


def proof_of(objective: float, bound: float, method: str) -> Proof:
    """The proof of a plan by a lower bound, which rounding may have put above the objective."""
    bound = min(bound, objective)
    gap = (objective - bound) / objective if objective > 0 else 0.0
    return Proof(
        termination="optimal" if gap <= 1e-9 else "feasible",
        objective=objective,
        lower_bound=bound,
        gap=gap,
        method=method,
    )


def fill_seconds(costs: StageCosts, placed: list[PlacedStage]) -> float:
    """One microbatch through all stages and back, transfers included."""
    total = 0.0
    for index, (first, last, move) in enumerate(placed):
        total += costs.stage_compute(first, last, move.pool) + output_seconds(costs, placed, index)
    return total


def _stage(costs: StageCosts, seats: Seats, index: int) -> Stage:
    placed = seats.placed
    first, last, move = placed[index]
    workers = sum(entry[2].num_replicas for entry in placed[index:])
    held = costs.stashed(move.num_replicas, workers)
    parts = costs.memory_parts(first, last, move.pool, move.num_replicas, held)
    return stage_between(
        costs,
        (first, last),
        move.pool,
        seats.devices[index],
        span=move.span,
        held=held,
        sent=output_seconds(costs, placed, index),
        memory_bytes=costs.device_bytes(move.pool, move.num_replicas, *parts),
    )


def stage_between(
    costs: StageCosts,
    cuts: tuple[int, int],
    number: int,
    devices: tuple[int, ...],
    *,
    span: int,
    held: StageHeld,
    sent: float,
    memory_bytes: int,
) -> Stage:
    """Build the stage between two cuts, with its costs.

    ``number`` is its pool's, ``span`` the place in the tables of the slowest link among its
    devices, ``sent`` the seconds of both messages over the boundary behind it.
    """
    (first, last), problem, replicas = cuts, costs.problem, len(devices)
    pool = problem.pools[number]
    weight = float(costs.cuts.weight_bytes[last] - costs.cuts.weight_bytes[first])
    tied = costs.tied_seconds(first, last, replicas)
    reduction = costs.reductions[number].seconds(weight, replicas, costs.bandwidths[span])
    return stage_on(
        problem,
        pool,
        devices,
        memory_bytes=memory_bytes,
        layers=names_between(problem, costs, first, last),
        num_in_flight=held[0],
        weight_versions=held[1],
        seconds_per_input=costs.stage_seconds(first, last, number, replicas, span),
        compute_seconds=costs.stage_compute(first, last, number),
        forward_seconds=costs.stage_forward(first, last, number),
        weight_gradient_seconds=costs.stage_weight_gradient(first, last, number),
        output_seconds=sent,
        reduce_seconds=reduction,
        update_seconds=pool.update_seconds * (weight / max(costs.total_weight, 1.0)),
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


def explain(
    problem: PipelineProblem,
    costs: StageCosts,
    space: PlacementSpace,
    search: PlacementSearch,
    fits: PlacementSearch,
) -> InfeasibleError:
    """Find how many bytes more a device would need, and the stage that needs them.

    ``costs`` are of the option that needs the least memory; ``fits`` finds any placement in larger
    memory, of which ``search`` then finds the best.
    """
    if fits(problem, costs, space, float("inf")) is None:
        more = ", or another batch" if problem.launchable else ""
        hint = f"use fewer workers or stages, or at_most{more}"
        return InfeasibleError(_counts(problem), hint=hint)
    low, high = 0.0, 1.0
    while fits(problem, costs, space, high) is None:
        low, high = high, high * 4
    while high - low > max(1.0, 1e-6 * high):
        middle = (low + high) / 2
        if fits(problem, costs, space, middle) is None:
            low = middle
        else:
            high = middle
    placed = search(problem, costs, space, high)
    return _shortfall(problem, costs, placed or [], high)


def needs(pool: DevicePool, used_bytes: float) -> str:
    """Say how many bytes a device would have to hold, workspace and base included, and has."""
    parts = {
        "for workspace": pool.workspace_bytes,
        "before there is a model": pool.base_memory_bytes,
    }
    whole = used_bytes + sum(size or 0 for size in parts.values())
    said = [f"{size} of them {what}" for what, size in parts.items() if size]
    aside = f" ({', '.join(said)})" if said else ""
    return (
        f"needs {round(whole)} bytes{aside} on a {pool.device_type} of {pool.memory_bytes}, "
        f"{round(whole - (pool.memory_bytes or 0))} bytes too many"
    )


def _counts(problem: PipelineProblem) -> str:
    return (
        f"no partition of {len(problem.layers)} layers uses "
        f"{'exactly ' if problem.workers == 'exactly' else ''}{problem.num_devices} devices"
        + (f" in {problem.num_stages} stages" if problem.num_stages else "")
        + ("" if problem.replication else " without replicated stages")
        + (f" with {problem.num_microbatches} microbatches" if problem.launchable else "")
    )


def _shortfall(
    problem: PipelineProblem, costs: StageCosts, placed: list[PlacedStage], extra: float
) -> InfeasibleError:
    def lack(index: int) -> float:
        workers = sum(entry[2].num_replicas for entry in placed[index:])
        return costs.lack_bytes(*placed[index], workers)

    worst = max(range(len(placed)), key=lack)
    first, last, move = placed[worst]
    names = names_between(problem, costs, first, last)
    pool = problem.pools[move.pool]
    what = f"layer {names[0]}" if len(names) == 1 else f"the stage {names[0]} .. {names[-1]}"
    return InfeasibleError(
        "no partition fits the memory: even where the least is needed, "
        f"{what} {needs(pool, lack(worst) + (pool.limit_bytes or 0))}",
        hint=f"it would fit with {ceil(extra)} bytes more on every device; or use a smaller "
        f"microbatch{'' if costs.recompute else ' or recomputation'}",
    )
