"""Placements out of order: against every choice of devices for every stage."""

import dataclasses
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import best_flat, chain, flat_problems, levels, runs, same

from hetflow.planning.checks.pipeline import check
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.pipeline import PipelineProblem
from hetflow.solvers.effort import Effort
from hetflow.solvers.pipeline import solve as pipeline
from hetflow.solvers.pipeline.assemble import ORDERED
from hetflow.solvers.pipeline.placements import Move, Seats
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.plan_parts import with_replicas
from hetflow.tests.profiles import examples

FEW = settings(max_examples=examples(25))
SHAPES = [(2, 2), (3, 2), (2, 3)]


@st.composite
def two_level_problems(draw) -> PipelineProblem:
    """Small servers of devices, of one type or two, with few layers."""
    problem = draw(flat_problems())
    if len(problem.layers) > 4:
        problem = draw(flat_problems(graphs=False).filter(lambda found: len(found.layers) <= 4))
    shapes = [draw(st.sampled_from(SHAPES)), (2, 2)]
    pools = []
    for pool, shape in zip(problem.pools, shapes, strict=False):
        fast = draw(st.sampled_from([1.0, 8.0, 64.0]))
        slow = draw(st.sampled_from([0.05, 0.25, 1.0]))
        pools.append(dataclasses.replace(pool, levels=levels((shape[0], fast), (shape[1], slow))))
    if len(pools) > 1:
        pools[0] = dataclasses.replace(pools[0], levels=levels((2, 8.0), (2, 0.25)))
        pools[1] = dataclasses.replace(pools[1], levels=pools[1].levels[:1])
    return dataclasses.replace(problem, pools=tuple(pools))


def drawn(seed: int, **options) -> PipelineProblem:
    """Servers on slow links, where a server is left half full by one stage."""
    draw = random.Random(seed)
    count = draw.randint(3, 4)
    width, servers = draw.choice([(2, 2), (3, 2), (4, 2), (2, 3)])
    slow = draw.choice([0.05, 0.1, 0.3])
    topology = levels((width, draw.choice([1.0, 4.0, 16.0])), (servers, slow))
    times = [(draw.uniform(0.5, 6), draw.uniform(1, 12)) for _ in range(count)]
    sizes = [(draw.choice([0, 0, 1, 2, 3]), draw.choice([0, 1, 5, 20])) for _ in range(count)]
    batches = draw.choice([4, 8])
    filled = {"schedule": "pipedream", "num_microbatches": batches, **options}
    return chain(times, sizes, topology, **filled)


def answer(problem: PipelineProblem, **options):
    """The plan, judged; None where there is none."""
    try:
        plan = solve(problem, **options)
    except InfeasibleError:
        return None
    assert check(plan, problem) == []
    return plan


least = cache(best_flat)  # seconds of trying all placements, of problems that tests share


def value(plan) -> float | None:
    return None if plan is None else plan.proof.objective


@pytest.mark.parametrize("seed", [7, 13, 20, 41])
@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
@pytest.mark.slow
def test_a_better_placement_out_of_order_is_found(seed, schedule):
    problem = drawn(seed, schedule=schedule)
    plan = answer(problem)
    assert plan.proof.termination == "optimal"
    assert same(value(plan), least(problem))
    if schedule == "pipedream":
        assert value(plan) < best_flat(problem, runs) * 0.95


@FEW
@given(two_level_problems())
def test_the_least_bottleneck_is_that_of_any_devices(problem):
    objective = "bottleneck" if problem.minimises == "step_seconds" else None
    problem = dataclasses.replace(problem, objective=objective)
    plan = answer(problem)
    assert same(value(plan), best_flat(problem))
    assert plan is None or plan.proof.termination == "optimal"


@settings(FEW, max_examples=examples(15))
@given(two_level_problems(), st.sampled_from(["1f1b", "gpipe"]))
def test_the_least_step_is_that_of_any_devices(problem, schedule):
    problem = dataclasses.replace(problem, schedule=schedule, stage_cost="ring")
    plan = answer(problem)
    assert same(value(plan), best_flat(problem))
    assert plan is None or plan.proof.termination == "optimal"


@FEW
@given(two_level_problems())
def test_what_is_not_searched_is_bounded(problem):
    """The plan is then the best ordered one, and its bound holds for all."""
    plan = answer(problem, effort=Effort(anywhere_work=0.0, relaxed_work=0.0))
    if plan is None:
        return
    least = best_flat(problem)
    assert plan.proof.lower_bound <= least * (1 + 1e-9)
    if plan.proof.termination == "optimal":
        assert same(value(plan), least)
    elif problem.minimises == "bottleneck":
        assert ORDERED in plan.proof.method
        assert plan.proof.gap > 0
        assert same(value(plan), best_flat(problem, runs))


def test_a_gap_against_all_placements_is_told_from_a_search_cut_short():
    plan = answer(drawn(20), effort=Effort(anywhere_work=0.0))
    assert plan.proof.termination == "feasible"
    assert plan.proof.method.endswith(ORDERED)
    assert plan.proof.gap == pytest.approx(1 - plan.proof.lower_bound / plan.proof.objective)


def test_a_placement_out_of_order_can_be_lowered_to_ranks_on_its_devices():
    problem = drawn(20, launchable=True)
    plan = answer(problem)
    config = lower(plan)
    held = [slot.device for slot in config.workers]
    assert held != sorted(held)
    assert sorted(held) == sorted(device for stage in plan.stages for device in stage.held)


def test_check_recounts_links_from_the_devices():
    problem = drawn(20)
    plan = answer(problem)
    first, second, *rest = plan.stages
    far = with_replicas(second, first_device=0, devices=(0, 1, 4, 5))
    near = with_replicas(first, first_device=2, devices=(2, 6))
    moved = dataclasses.replace(plan, stages=(near, far, *rest))
    faults = check(moved, problem)
    assert any("given out twice" in fault for fault in faults)
    apart = with_replicas(plan.stages[-1], first_device=4, devices=(4, 6))
    faults = check(dataclasses.replace(plan, stages=(*plan.stages[:-1], apart)), problem)
    assert faults


@pytest.mark.parametrize("devices", [(3, 2), (2, 2), (2,), (4, 5)])
def test_devices_are_ascending_one_a_replica_from_the_first(devices):
    plan = answer(drawn(20))
    stage = next(stage for stage in plan.stages if stage.num_replicas == 2)
    with pytest.raises(ProblemError, match="devices"):
        with_replicas(stage, first_device=3, devices=devices)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b", "zb-h1", "pipedream-vertical-sync"])
@pytest.mark.parametrize("graph", [False, True])
def test_a_search_that_is_stopped_has_a_plan_and_a_bound(schedule, graph):
    problem = drawn(20, schedule=schedule)
    if graph:
        problem = dataclasses.replace(problem, edges=((0, 1), (0, 2)))
    least = answer(problem).proof.objective
    plan = answer(problem, effort=Effort(should_stop=lambda: True))
    assert plan.proof.lower_bound <= least * (1 + 1e-9)
    assert plan.proof.objective >= least * (1 - 1e-9)


def test_a_gap_that_is_near_enough_ends_the_search():
    times = [(0.3 * (number % 5 + 1), 0.7 * (number % 3 + 1)) for number in range(30)]
    sizes = [(number % 7, number % 4) for number in range(30)]
    problem = chain(times, sizes, levels((4, 8.0), (2, 1.0)), schedule="1f1b", num_microbatches=16)
    calls: list[None] = []

    def count(effort: Effort) -> int:
        calls.clear()
        plan = answer(problem, effort=dataclasses.replace(effort, should_stop=watch))
        assert plan.proof.gap <= max(effort.gap, 1e-9)
        return len(calls)

    def watch() -> bool:
        calls.append(None)
        return False

    assert count(Effort(gap=0.5)) < count(Effort())


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
@pytest.mark.slow
def test_a_blind_bound_holds_where_chains_are_too_many(schedule, monkeypatch):
    monkeypatch.setattr(pipeline, "relaxed", lambda *_, **__: None)
    for seed in (1, 7, 13, 20, 41):
        problem = drawn(seed, schedule=schedule)
        plan = answer(problem)
        assert plan.proof.lower_bound <= least(problem) * (1 + 1e-9)


def test_only_an_ordered_plan_is_called_optimal_among_ordered_ones():
    placed = [(0, 1, None), (1, 2, None)]
    moves = [entry[:2] + (Move(0, 0, 0, 2, 0, 0, 0, 2),) for entry in placed]
    assert Seats(moves, ((0, 1), (4, 5))).are_runs()
    assert not Seats(moves, ((4, 5), (0, 1))).are_runs()
    assert not Seats(moves, ((0, 1), (2, 4))).are_runs()
