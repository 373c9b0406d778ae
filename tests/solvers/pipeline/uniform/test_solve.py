"""Schedules with equal replicas: against every layout and cut, and their memory rules."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import (
    any_placements,
    chain,
    enlarged,
    fixed_cost,
    flat_problems,
    levels,
    plan_of,
    same,
)

from hetflow.planning.checks.pipeline import check, device_memory, seconds_per_input, timed_stage
from hetflow.planning.schedules.of_plan import schedule_of, times_of
from hetflow.planning.schedules.timing import time_schedule
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.pipeline import DevicePool, PipelineProblem
from hetflow.schema.plan import Plan
from hetflow.schema.schedule import planned_schedules, traits
from hetflow.solvers.pipeline.assemble import ORDERED
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.profiles import examples

ALIKE = [name for name in planned_schedules() if traits(name).is_uniform]
FEW = settings(max_examples=examples(40))


@st.composite
def alike_problems(draw) -> PipelineProblem:
    problem = draw(flat_problems(graphs=False))
    schedule = draw(st.sampled_from(ALIKE))
    depth = 1 if schedule == "interleaved" else 2
    pools = tuple(dataclasses.replace(pool, levels=pool.levels[:depth]) for pool in problem.pools)
    if traits(schedule).splits_backward and draw(st.booleans()):
        pools = tuple(halved(pool, draw(st.sampled_from([0.0, 0.4, 0.9]))) for pool in pools)
    return dataclasses.replace(
        problem,
        pools=pools,
        schedule=schedule,
        stage_cost="ring",
        recompute=False,
        num_microbatches=draw(st.sampled_from([4, 6])),
        num_model_chunks=2 if schedule == "interleaved" else None,
    )


def halved(pool: DevicePool, share: float) -> DevicePool:
    """A pool whose backward passes have unlike halves, which both compute a tenth of the whole."""
    return dataclasses.replace(
        pool,
        input_gradient_seconds=tuple(share * seconds for seconds in pool.backward_seconds),
        repeated_seconds=tuple(0.1 * seconds for seconds in pool.backward_seconds),
    )


def objective(problem: PipelineProblem) -> float | None:
    try:
        plan = solve(problem)
    except InfeasibleError:
        return None
    assert check(plan, problem) == []
    assert plan.proof.termination == "optimal"
    return plan.proof.objective


def every_plan(problem: PipelineProblem):
    """All pipelines side by side: replicas, places on any devices, and cuts of the chain."""
    names = [layer.id for layer in problem.layers]
    chunks = 2 if problem.schedule in ("interleaved", "zb-v") else 1
    most = min(problem.num_devices, len(names) // chunks)
    for count in range(1, most + 1):
        for places in any_placements(problem, count):
            replicas = {m for _, _, m, _ in places}
            used = sum(m for _, _, m, _ in places)
            if len(replicas) > 1 or (problem.workers == "exactly" and used < problem.num_devices):
                continue
            stages = places * chunks
            if problem.schedule == "zb-v":
                stages = places + places[::-1]
            for inner in itertools.combinations(range(1, len(names)), len(stages) - 1):
                ends = [0, *inner, len(names)]
                layers = [tuple(names[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
                yield plan_of(problem, layers, stages, False)


def best(problem: PipelineProblem) -> float | None:
    found = None
    for plan in every_plan(problem):
        try:
            made = schedule_of(plan)
        except ProblemError:
            continue
        replicas = plan.stages[0].num_replicas
        steady = problem.minimises == "bottleneck"
        if (steady and problem.num_microbatches % replicas) or not fits(plan, problem):
            continue
        stages = [timed_stage(plan, problem, index) for index in range(len(plan.stages))]
        times = times_of(stages, flushes=True)
        seconds = (
            seconds_per_input(plan, problem)
            if steady
            else time_schedule(made, times).makespan_seconds + fixed_cost(plan, problem)
        )
        found = seconds if found is None else min(found, seconds)
    return found


def fits(plan: Plan, problem: PipelineProblem) -> bool:
    limits = {pool.device_type: pool.memory_bytes for pool in problem.pools}
    aside = {pool.device_type: pool.workspace_bytes for pool in problem.pools}
    used: dict[tuple[str, int], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        used.setdefault((stage.device_type, stage.first_device), []).append(index)
    return all(
        limits[kind] is None or device_memory(plan, problem, own)[1] + aside[kind] <= limits[kind]
        for (kind, _), own in used.items()
    )


@FEW
@given(alike_problems())
def test_small_instances_equal_brute_force(problem):
    assert same(objective(problem), best(problem))


@FEW
@given(alike_problems(), st.sampled_from(["bandwidth", "memory", "devices"]))
def test_more_never_hurts(problem, what):
    problem = dataclasses.replace(problem, workers="at_most")
    before, after = objective(problem), objective(enlarged(problem, what))
    if before is not None:
        assert after is not None
        assert after <= before * (1 + 1e-9) + 1e-15


EVEN = [(1.0, 2.0)] * 16


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble(chunks):
    problem = chain(
        EVEN, [(0, 10**6)] * 16, levels((4, 1.0)), replication=False, schedule="interleaved",
        num_model_chunks=chunks,
    )  # fmt: skip
    plan = solve(problem)
    assert check(plan, problem) == []
    assert plan.num_devices == 4
    assert plan.num_model_chunks == chunks
    # (p - 1) / (v m) of 8 microbatches of 4 layers of 3 seconds on each device (4.2.2).
    assert plan.predicted.step_seconds == pytest.approx((8 + 3 / chunks) * 12.0)


def test_zero_bubble_beats_1f1b_on_even_stages():
    steps = {}
    for schedule in ("1f1b", "zb-h1", "zb-h2", "zb-v"):
        problem = chain(
            EVEN, [(0, 10**6)] * 16, levels((4, 1.0)), replication=False, schedule=schedule
        )
        plan = solve(problem)
        assert check(plan, problem) == []
        steps[schedule] = plan.predicted.step_seconds
    assert steps["zb-v"] < steps["zb-h1"] < steps["1f1b"]
    assert steps["zb-h2"] <= steps["zb-h1"]


def test_layers_without_weights_leave_no_less_than_nothing_for_a_second_half():
    """The sums of rounded seconds differ by their last digits."""
    problem = chain([(0.1, 0.3)] * 7, [(0, 10**6)] * 7, levels((2, 1.0)), replication=False)
    (pool,) = problem.pools
    pool = dataclasses.replace(halved(pool, 1.0), repeated_seconds=(0.0,) * 7)
    problem = dataclasses.replace(problem, pools=(pool,), schedule="zb-h1")
    plan = solve(problem)
    assert check(plan, problem) == []
    assert plan.stages[1].weight_gradient_seconds == 0.0


def test_vertical_sync_keeps_as_many_versions_as_places():
    problem = chain(
        EVEN, [(0, 10**6)] * 16, levels((4, 1.0)), schedule="pipedream-vertical-sync",
        replication=False,
    )  # fmt: skip
    plan = solve(problem)
    assert check(plan, problem) == []
    assert [stage.weight_versions for stage in plan.stages] == [4, 4, 4, 4]
    assert [stage.num_in_flight for stage in plan.stages] == [4, 3, 2, 1]


def test_chunks_share_their_device_s_memory():
    sizes = [(10, 100)] * 16
    free = chain(EVEN, sizes, levels((4, 1e6)), replication=False, schedule="interleaved")
    used = solve(free)
    tight = max(stage.memory_bytes for stage in used.stages) - 2  # each states its device's
    pool = dataclasses.replace(free.pools[0], memory_bytes=tight)
    limited = dataclasses.replace(free, pools=(pool,))
    assert any("too many" in fault for fault in check(used, limited))
    pool = dataclasses.replace(free.pools[0], memory_bytes=tight + 2)
    fits = solve(dataclasses.replace(free, pools=(pool,)))
    assert fits.predicted == used.predicted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "zb-h1", "recompute": True}, "cannot recompute"),
        ({"schedule": "1f1b", "num_model_chunks": 2}, "fixes how many stages"),
        ({"schedule": "interleaved", "num_model_chunks": 1}, "at least 2 chunks"),
        ({"schedule": "zb-v", "objective": "bottleneck"}, "planned for its step"),
        ({"schedule": "zb-h2", "stage_cost": "thesis"}, "ring prices"),
    ],
)
def test_what_cannot_be_planned_is_refused(change, message):
    problem = chain([(1.0, 1.0)] * 4, [(1, 1)] * 4, levels((4, 1.0)))
    with pytest.raises(ProblemError, match=message):
        dataclasses.replace(problem, **change)


def test_too_few_microbatches_say_so():
    problem = chain(
        EVEN, [(1, 1)] * 16, levels((4, 1.0)), schedule="interleaved", workers="exactly",
        replication=False, num_microbatches=6,
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match="multiple of 4 microbatches"):
        solve(problem)


def test_equal_replicas_are_placed_inside_servers_whatever_their_order():
    # Runs of 3 behind each other would span servers of 4; one on each server does not.
    problem = chain(
        [(1.0, 2.0)] * 4, [(1, 64)] * 4, levels((4, 64.0), (2, 0.5)), num_microbatches=6,
        schedule="pipedream-vertical-sync", num_stages=2,
    )  # fmt: skip
    plan = solve(problem)
    assert check(plan, problem) == []
    assert plan.proof.termination == "optimal"
    assert same(plan.proof.objective, best(problem))


def test_interleaved_layouts_on_servers_are_bounded_against_all():
    problem = chain(
        [(1.0, 2.0)] * 4, [(8, 64)] * 4, levels((2, 64.0), (2, 0.5)), num_microbatches=4,
        schedule="interleaved", num_model_chunks=2,
    )  # fmt: skip
    plan = solve(problem)
    assert check(plan, problem) == []
    assert plan.proof.lower_bound <= best(problem) * (1 + 1e-9)
    if plan.proof.termination == "feasible":
        assert ORDERED in plan.proof.method
