"""Tied weights in the planner: counted once a stage, reduced at a flush, never split without."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import best_flat, chain, flat_problems, levels, objective, plan_of, same

from hetflow.planning.checks.pipeline import check, stage_memory
from hetflow.schema.errors import ProblemError
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.pipeline import PipelineProblem
from hetflow.schema.schedule import traits
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.profiles import examples

FEW = settings(max_examples=examples(50))


def tied(problem: PipelineProblem, *pairs: tuple[int, int, int]) -> PipelineProblem:
    """``pairs`` are (holder, sharer, bytes)."""
    layers = list(problem.layers)
    for holder, sharer, size in pairs:
        layers[sharer] = dataclasses.replace(
            layers[sharer], shared_with=(layers[holder].id,), shared_weight_bytes=size
        )
    return dataclasses.replace(problem, layers=tuple(layers))


@st.composite
def tied_problems(draw) -> PipelineProblem:
    problem = draw(flat_problems())
    size = len(problem.layers)
    if size < 2:
        return problem
    holder = draw(st.integers(0, size - 2))
    sharers = draw(st.lists(st.integers(holder + 1, size - 1), max_size=2, unique=True))
    amount = draw(st.integers(1, 13))
    return tied(problem, *((holder, sharer, amount) for sharer in sharers))


@FEW
@given(tied_problems())
def test_plans_with_tied_weights_equal_brute_force(problem):
    assert same(objective(problem), best_flat(problem))


GPT = [(1.0, 2.0)] * 8, [(5, 400), *[(5, 50)] * 6, (5, 0)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_a_flush_holds_a_copy_and_pays_for_its_reduction(schedule):
    free = chain(*GPT, levels((2, 10.0)), replication=False, schedule=schedule)
    problem = tied(free, (0, 7, 400))
    plan, before = solve(problem), solve(free)
    assert check(plan, problem) == []
    assert len(plan.stages) >= 2
    # A ring of two over the slowest link, behind the update of the stage that ends last.
    assert plan.stages[0].tied_seconds == pytest.approx(400 / 10.0)
    assert plan.predicted.step_seconds >= before.predicted.step_seconds + 400 / 10.0 - 1e-9
    assert plan.stages[-1].memory_bytes >= 2 * 400


def test_a_copy_that_does_not_fit_moves_a_cut():
    forward = (1.5, 1.5, 0.25, 0.25, 2.0, 0.5, 1.5, 1.5)
    sizes = [(5, 3), (13, 3), (5, 1), (13, 3), (2, 8), (13, 1), (1, 3), (5, 1)]
    problem = chain(
        [(seconds, 2 * seconds) for seconds in forward],
        sizes,
        levels((2, 1.0)),
        memory_bytes=144,
        schedule="gpipe",
        num_microbatches=2,
        optimizer=OptimizerState(name="adam", state_bytes_per_weight_byte=2.0),
        recompute=False,
    )
    pool = dataclasses.replace(problem.pools[0], pass_seconds=1.0)
    problem = tied(dataclasses.replace(problem, pools=(pool,)), (0, 7, 3))
    assert same(objective(problem), best_flat(problem))


def test_a_stage_with_all_users_holds_them_once():
    problem = tied(chain(*GPT, levels((1, 10.0))), (0, 7, 400))
    names = tuple(layer.id for layer in problem.layers)
    plan = plan_of(problem, [names], [("V100", 0, 1)], False)
    free = chain(*GPT, levels((1, 10.0)))
    standing, passing = stage_memory(plan, problem, 0)
    assert standing == stage_memory(plan, free, 0)[0]
    # In a pass the last layer's gradient of them waits for the first's, which has no others beside.
    kept = problem.layers[7].kept_bytes
    assert passing == stage_memory(plan, free, 0)[1] + 400 - kept


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical-sync", "2bw"])
def test_without_a_flush_all_users_are_in_one_stage(schedule):
    assert not traits(schedule).flushes
    problem = tied(chain(*GPT, levels((4, 1e4)), schedule=schedule), (2, 4, 50))
    plan = solve(problem)
    assert check(plan, problem) == []
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    assert stage_of["l2"] == stage_of["l4"]
    stages = [tuple(f"l{i}" for i in range(4)), tuple(f"l{i}" for i in range(4, 8))]
    split = plan_of(problem, stages, [("V100", 0, 1), ("V100", 1, 1)], False)
    assert any("share weights in two stages" in fault for fault in check(split, problem))


def test_nested_levels_refuse_tied_weights():
    free = chain(*GPT, levels((4, 1e4)), schedule="pipedream", solved="nested")
    with pytest.raises(ProblemError, match="know no tied weights"):
        tied(free, (0, 7, 400))
