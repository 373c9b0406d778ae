"""The step of schedules that flush: replayed as the timer has it, and minimised exactly."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import (
    best_flat,
    chain,
    enlarged,
    fixed_cost,
    flat_problems,
    levels,
    replayed_step,
    same,
)

from hetflow.planning.checks.pipeline import check
from hetflow.planning.checks.pipeline_bound import is_proved
from hetflow.planning.schedules.of_plan import timed
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.pipeline import PipelineLayer, PipelineProblem
from hetflow.schema.plan import Restrictions
from hetflow.solvers.effort import Effort
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.profiles import examples

FEW = settings(max_examples=examples(50))


@st.composite
def step_problems(draw) -> PipelineProblem:
    problem = draw(flat_problems())
    flushing = draw(st.sampled_from(["1f1b", "1f1b", "gpipe"]))
    return dataclasses.replace(problem, schedule=flushing, stage_cost="ring")


def least_step(problem: PipelineProblem) -> float | None:
    try:
        plan = solve(problem)
    except InfeasibleError:
        return None
    assert check(plan, problem) == []
    assert plan.objective == "step_seconds"
    assert plan.predicted.step_seconds == plan.proof.objective
    seconds = timed(plan).makespan_seconds
    seconds += fixed_cost(plan, problem)
    assert plan.predicted.step_seconds == pytest.approx(seconds, rel=1e-12)
    # Instances this small are searched to the end.
    assert plan.proof.termination == "optimal"
    step = plan.proof.objective
    assert step == 0.0 or not is_proved(problem, step * (1 + 1e-6), Restrictions())
    return step


@FEW
@given(flat_problems(), st.booleans(), st.sampled_from([1, 50, 500]))
def test_the_judge_proves_no_bound_that_is_too_high(problem, tied, num_bytes):
    first, last = problem.layers[0], problem.layers[-1]
    if tied and first is not last:
        first = dataclasses.replace(first, weight_bytes=first.weight_bytes + num_bytes)
        last = dataclasses.replace(last, shared_with=(first.id,), shared_weight_bytes=num_bytes)
        problem = dataclasses.replace(
            problem, stage_cost="ring", layers=(first, *problem.layers[1:-1], last)
        )
    try:
        plan = solve(problem)
    except (InfeasibleError, ProblemError):
        return
    best = plan.proof.objective
    if plan.proof.termination == "optimal" and best:
        assert not is_proved(problem, best * (1 + 1e-6), Restrictions())


def test_the_judge_proves_a_graph_with_tied_weights():
    layers = [PipelineLayer(id=f"l{i}", activation_bytes=8, weight_bytes=40) for i in range(6)]
    layers[-1] = dataclasses.replace(
        layers[-1], weight_bytes=0, shared_with=("l0",), shared_weight_bytes=40
    )
    problem = dataclasses.replace(
        chain([(1.0, 2.0)] * 5 + [(1.0, 3.0)], [(8, 40)] * 6, levels((2, 1e9))),
        layers=tuple(layers),
        edges=tuple(sorted({(i, i + 1) for i in range(5)} | {(0, 3), (1, 5)})),
        replication=False,
        schedule="1f1b",
        stage_cost="ring",
    )
    plan = solve(problem)
    assert len(plan.stages) > 1
    verdict = check(plan, problem)
    assert (verdict, verdict.bound) == ([], "recomputed")


@FEW
@given(step_problems())
@pytest.mark.slow
def test_the_oracle_s_step_is_the_timer_s(problem):
    try:
        plan = solve(dataclasses.replace(problem, workers="at_most"))
    except InfeasibleError:
        return
    seconds = timed(plan).makespan_seconds
    seconds += fixed_cost(plan, problem)
    assert replayed_step(plan, problem) == pytest.approx(seconds, rel=1e-12)


@settings(FEW, max_examples=examples(40))
@given(step_problems())
def test_the_least_step_equals_brute_force(problem):
    assert same(least_step(problem), best_flat(problem))


@settings(FEW, max_examples=examples(40))
@given(step_problems(), st.integers(1, 3))
def test_the_least_step_of_so_many_stages(problem, count):
    count = min(count, len(problem.layers), problem.num_devices)
    problem = dataclasses.replace(problem, num_stages=count)
    assert same(least_step(problem), best_flat(problem))


@settings(FEW, max_examples=examples(25))
@given(step_problems(), st.sampled_from(["bandwidth", "memory", "devices", "servers"]))
@pytest.mark.slow
def test_more_never_hurts_the_step(problem, what):
    problem = dataclasses.replace(problem, workers="at_most")
    before, after = least_step(problem), least_step(enlarged(problem, what))
    if before is not None:
        assert after is not None
        assert after <= before * (1 + 1e-9) + 1e-15


def test_filling_and_drain_decide_where_microbatches_are_few():
    # The slowest of four short stages takes a fourth of one stage's time, but with two
    # microbatches and slow links the way through all of them costs more than it saves.
    problem = chain(
        [(1.0, 1.0)] * 4, [(10, 0)] * 4, levels((4, 8.0)), num_microbatches=2, replication=False
    )
    steady = solve(dataclasses.replace(problem, objective="bottleneck"))
    whole = solve(problem)
    assert whole.proof.objective == whole.predicted.step_seconds
    assert whole.predicted.step_seconds < steady.predicted.step_seconds * 0.95
    assert len(whole.stages) < len(steady.stages)


@pytest.mark.slow
def test_a_gap_is_stated_where_the_search_ends_early():
    draw = random.Random(0)
    times = [(draw.uniform(1, 10), draw.uniform(2, 20)) for _ in range(50)]
    sizes = [(draw.randint(1, 1000), 1) for _ in range(50)]
    slow = levels((4, 10.0), (2, 1.0))
    problem = chain(times, sizes, slow, replication=False, num_microbatches=16)
    assert solve(problem).proof.termination == "optimal"
    plan = solve(problem, effort=Effort(tree_work=1e4))
    assert check(plan, problem) == []
    assert plan.proof.termination == "feasible"
    assert 0 < plan.proof.lower_bound < plan.proof.objective
    assert plan.proof.gap == pytest.approx(1 - plan.proof.lower_bound / plan.proof.objective)


@settings(FEW, max_examples=examples(60))
@given(step_problems())
def test_a_problem_too_large_for_tables_has_a_plan_and_a_bound_that_hold(problem):
    try:
        plan = solve(problem, effort=Effort(limits_work=0.0, coarse_work=500.0))
    except InfeasibleError:
        return
    least = best_flat(problem)
    assert check(plan, problem) == []
    assert plan.proof.lower_bound <= least * (1 + 1e-9)
    assert plan.proof.objective >= least * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "effort", "most_seconds"), [
    # 18 devices: the two tables of all cuts and runs that this affords find 4,424 s alone.
    ((24, 6), Effort(limits_work=5e5, coarse_work=3e6), 3600),
    # 36 devices, and 3,455 s.
    ((40, 12), Effort(limits_work=1e7), 3200),
])  # fmt: skip
def test_a_large_pool_is_searched_beyond_its_few_tables(shape, effort, most_seconds):
    large = unlike(*shape)
    plan = solve(large, effort=effort)
    assert check(plan, large) == []
    assert plan.proof.termination == "feasible"
    assert plan.proof.objective < most_seconds
    assert 0 < plan.proof.gap < 0.35


def unlike(num_layers: int, count: int) -> PipelineProblem:
    """Three types of so many devices, one, two and three times as slow."""
    draw = random.Random(0)
    times = [(draw.uniform(1, 10), draw.uniform(2, 20)) for _ in range(num_layers)]
    sizes = [(draw.randint(10**5, 10**8), draw.randint(10**4, 10**7)) for _ in times]
    problem = chain(times, sizes, levels((count, 1e7)), num_microbatches=64)
    pools = tuple(
        dataclasses.replace(
            problem.pools[0],
            device_type=name,
            forward_seconds=tuple(slowness * forward for forward, _ in times),
            backward_seconds=tuple(slowness * backward for _, backward in times),
        )
        for name, slowness in (("A", 1.0), ("B", 2.0), ("C", 3.0))
    )
    return dataclasses.replace(problem, pools=pools, inter_bytes_per_second=1e6)


@pytest.mark.parametrize("change", [{"schedule": "pipedream"}, {"stage_cost": "thesis"}])
def test_a_steady_state_has_no_step_to_minimise(change):
    problem = chain([(1.0, 1.0)] * 3, [(1, 1)] * 3, levels((4, 1.0)))
    assert dataclasses.replace(problem, **change).minimises == "bottleneck"
    with pytest.raises(ProblemError, match="no step to minimise"):
        dataclasses.replace(problem, objective="step_seconds", **change)


def test_check_recounts_a_plan_s_step():
    problem = chain([(1.0, 2.0)] * 4, [(4, 9)] * 4, levels((4, 8.0)))
    plan = solve(problem)
    short = dataclasses.replace(plan.predicted, step_seconds=plan.predicted.step_seconds * 0.9)
    faults = check(dataclasses.replace(plan, predicted=short), problem)
    assert any("predicted.step_seconds" in fault for fault in faults)
    lied = dataclasses.replace(plan.stages[0], reduce_seconds=9.0)
    faults = check(dataclasses.replace(plan, stages=(lied, *plan.stages[1:])), problem)
    assert any("reduce_seconds is 9.0" in fault for fault in faults)
    faults = check(dataclasses.replace(plan, objective="bottleneck"), problem)
    assert any("objective" in fault for fault in faults)
