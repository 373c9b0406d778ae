"""What passes, messages and steps cost themselves, and plans that errors cannot tell apart."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import best_flat, chain, flat_problems, levels, objective, same

from hetflow.planning.checks.pipeline import check
from hetflow.planning.schedules.terms import step_terms
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.pipeline import PipelineProblem
from hetflow.solvers.effort import Effort
from hetflow.solvers.pipeline.bottleneck import search_graph
from hetflow.solvers.pipeline.cuts import cuts_of
from hetflow.solvers.pipeline.makespan import relaxed_step
from hetflow.solvers.pipeline.placements import build
from hetflow.solvers.pipeline.solve import solve
from hetflow.solvers.pipeline.stage_costs import StageCosts
from hetflow.solvers.pipeline.step_sums import StepModel, Tables, step_of
from hetflow.tests.profiles import examples

FEW = settings(max_examples=examples(40))
PARTS = (
    "compute_seconds",
    "virtual_node_seconds",
    "transfer_seconds",
    "sync_seconds",
    "update_seconds",
    "fixed_seconds",
)


def with_costs(
    problem: PipelineProblem, *, a_pass: float = 0.0, a_step: float = 0.0, **changes
) -> PipelineProblem:
    pools = tuple(
        dataclasses.replace(pool, pass_seconds=a_pass, fixed_seconds=a_step, lone_pass_seconds=None)
        for pool in problem.pools
    )
    return dataclasses.replace(problem, pools=pools, **changes)


TINY = chain([(1.0, 2.0)] * 8, [(1, 1)] * 8, levels((4, 1e9)), replication=False)
"""Without any cost but layers, four stages of two layers are best."""


@st.composite
def tiny_layers(draw) -> PipelineProblem:
    """Layers that take next to nothing beside what passes and messages cost."""
    problem = draw(flat_problems())
    pools = tuple(
        dataclasses.replace(
            pool,
            forward_seconds=tuple(seconds / 64 for seconds in pool.forward_seconds),
            backward_seconds=tuple(seconds / 64 for seconds in pool.backward_seconds),
        )
        for pool in problem.pools
    )
    return dataclasses.replace(problem, pools=pools, stage_cost="ring", solved="flat")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream", "2bw", "zb-h1"])
def test_dear_passes_make_fewer_stages(schedule):
    problem = dataclasses.replace(TINY, schedule=schedule)
    free = solve(problem)
    dear = solve(with_costs(problem, a_pass=100.0, message_seconds=1000.0))
    assert len(free.stages) == 4
    assert len(dear.stages) == 1


@pytest.mark.parametrize(("schedule", "passes"), [("1f1b", 2), ("gpipe", 2), ("zb-h1", 3)])
def test_a_stage_has_so_many_passes_of_a_microbatch(schedule, passes):
    problem = dataclasses.replace(TINY, schedule=schedule, num_stages=1)
    before, after = solve(problem), solve(with_costs(problem, a_pass=0.5))
    more = after.predicted.step_seconds - before.predicted.step_seconds
    assert more == pytest.approx(8 * passes * 0.5)
    assert after.stages[0].pass_seconds == 0.5
    assert after.stages[0].forward_seconds == before.stages[0].forward_seconds + 0.5


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_replicas_wait_as_long_as_all_reduces_were_measured_to_take(schedule):
    problem = chain([(1.0, 2.0)] * 4, [(1, 8)] * 4, levels((4, 16.0)), schedule=schedule)
    problem = dataclasses.replace(problem, num_stages=1, workers="exactly")
    pool = dataclasses.replace(
        problem.pools[0], reduce_bytes_per_second=8.0, reduce_latency_seconds=0.25
    )
    measured = dataclasses.replace(problem, pools=(pool,))
    before, after = solve(problem), solve(measured)
    # 32 bytes on 4 replicas: 6 hops of 8 bytes.
    assert before.stages[0].reduce_seconds == pytest.approx(6 * 8 / 16)
    assert after.stages[0].reduce_seconds == pytest.approx(6 * (8 / 8 + 0.25))
    more = after.predicted.step_seconds - before.predicted.step_seconds
    assert more == pytest.approx(6 * (8 / 8 + 0.25) - 6 * 8 / 16)
    assert after.stages[0].reduce_latency_seconds == 0.25
    assert before.stages[0].reduce_latency_seconds is None
    assert check(after, measured) == []
    assert any("reduce_seconds is" in fault for fault in check(after, problem))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_passes_of_one_stage_have_a_price_of_their_own(schedule):
    problem = dataclasses.replace(TINY, schedule=schedule)
    dear = with_costs(problem, a_pass=8.0)
    cheap = dataclasses.replace(
        dear, pools=(dataclasses.replace(dear.pools[0], lone_pass_seconds=0.5),)
    )
    several, one = solve(dear), solve(cheap)
    assert len(several.stages) > 1
    assert len(one.stages) == 1
    assert check(one, cheap) == []
    assert one.stages[0].pass_seconds == 0.5
    assert one.proof.lower_bound <= one.proof.objective
    halves = 2 if schedule == "zb-h1" else 1
    assert one.predicted.step_seconds == pytest.approx(8 * (24.0 + (1 + halves) * 0.5))
    # A plan of several stages costs what it did.
    asked = dataclasses.replace(cheap, num_stages=4)
    before = solve(dataclasses.replace(dear, num_stages=4))
    assert solve(asked).predicted == before.predicted
    assert check(solve(asked), cheap) == []


def test_dear_all_reduces_make_stages_of_replicas():
    problem = chain([(1.0, 2.0)] * 4, [(0, 64)] * 4, levels((2, 64.0)))
    assert solve(problem).config == "2"
    pool = dataclasses.replace(problem.pools[0], reduce_bytes_per_second=4.0)
    assert solve(dataclasses.replace(problem, pools=(pool,))).config == "1-1"


def test_recomputation_is_no_further_pass():
    problem = dataclasses.replace(TINY, num_stages=1, recompute=True)
    before, after = solve(problem), solve(with_costs(problem, a_pass=0.5))
    more = after.predicted.step_seconds - before.predicted.step_seconds
    assert more == pytest.approx(8 * 2 * 0.5)


def test_each_message_of_the_way_counts():
    problem = dataclasses.replace(TINY, num_stages=4, num_microbatches=1)
    before, after = solve(problem), solve(dataclasses.replace(problem, message_seconds=0.25))
    more = after.predicted.step_seconds - before.predicted.step_seconds
    assert more == pytest.approx(6 * 0.25)
    assert [stage.message_seconds for stage in after.stages] == [0.25, 0.25, 0.25, 0.0]


@FEW
@given(tiny_layers())
@pytest.mark.slow
def test_tiny_layers_equal_brute_force(problem):
    assert same(objective(problem), best_flat(problem))


@FEW
@given(tiny_layers(), st.integers(1, 3), st.sampled_from([None, 1, 2]))
def test_the_least_step_on_so_many_devices_in_so_many_stages(problem, most, most_stages):
    problem = dataclasses.replace(
        problem, workers="at_most", most_devices=most, most_stages=most_stages
    )
    assert same(objective(problem), best_flat(problem))


@FEW
@given(tiny_layers())
def test_bounds_hold_where_the_search_gives_up(problem):
    few = Effort(limits_work=0.0, coarse_work=500.0, tree_work=0.0, anywhere_work=0.0)
    try:
        plan = solve(problem, effort=few)
    except InfeasibleError:
        return
    assert check(plan, problem) == []
    least = best_flat(problem)
    assert least is not None
    assert plan.proof.lower_bound <= least * (1 + 1e-9) + 1e-12
    assert plan.proof.objective >= least * (1 - 1e-9) - 1e-12


@settings(FEW, max_examples=examples(80))
@given(tiny_layers(), st.booleans())
def test_no_placement_beats_the_bounds_of_its_step(problem, recompute):
    """Of the least bottleneck's placement; nothing that is found later hides a wrong bound."""
    problem = dataclasses.replace(problem, schedule="1f1b", workers="at_most")
    space = build(problem)
    costs = StageCosts(problem, cuts_of(problem), space.bandwidths, recompute=recompute)
    placed = search_graph(problem, costs, space)
    if placed is None:
        return
    tables = Tables(StepModel(problem, costs, pessimistic=False), space, np.array([0]))
    model, total, most, link = tables.model, 0.0, 0.0, 0
    for first, last, move in placed:
        kind = model.kind(move.pool, move.num_replicas, move.span, move.workers, move.source == 0)
        free = np.zeros(model.size)
        total += tables.options(move, kind, first, link, free, np.inf)[last]
        most = max(most, model.left_of(kind, first, max(link, move.span))[last])
        link = max(move.span, move.gap)
    step = step_of(problem, costs, placed) * (1 + 1e-9)
    assert total + most <= step
    assert relaxed_step(problem, [costs]) <= step


def test_equal_stages_attain_the_bound():
    # (p + M - 1) C, each stage with 6 s of layers and two passes' 0.5 s; no tree closes a gap.
    problem = with_costs(dataclasses.replace(TINY, num_stages=4), a_pass=0.5)
    plan = solve(problem, effort=Effort(tree_work=0.0))
    assert plan.proof.objective == pytest.approx((4 + 8 - 1) * 7.0, rel=1e-6)
    assert plan.proof.lower_bound == pytest.approx((4 + 8 - 1) * 7.0, rel=1e-6)


def test_of_types_with_unlike_fixed_costs_the_cheaper_ones_are_tried_alone():
    problem = chain([(1.0, 2.0)] * 4, [(1, 1)] * 4, levels((2, 1e9)), replication=False)
    pool = problem.pools[0]
    other = dataclasses.replace(pool, device_type="P100", levels=levels((2, 1e9)))
    for cost, types in ((0.5, {"V100", "P100"}), (100.0, {"V100"})):
        dear = dataclasses.replace(other, fixed_seconds=cost)
        asked = dataclasses.replace(problem, pools=(pool, dear), inter_bytes_per_second=1e9)
        plan = solve(asked)
        assert check(plan, asked) == []
        assert plan.proof.termination == "optimal"
        assert {stage.device_type for stage in plan.stages} == types
        assert plan.predicted.fixed_seconds == (cost if "P100" in types else 0.0)


@pytest.mark.parametrize("solved", ["flat", "nested"])
def test_the_text_s_prices_know_none_of_it(solved):
    problem = dataclasses.replace(
        TINY, stage_cost="thesis", solved=solved, schedule="pipedream", objective="bottleneck"
    )
    dear = with_costs(problem, a_pass=9.0, a_step=9.0, message_seconds=9.0)
    assert solve(dear) == solve(problem)


@FEW
@given(flat_problems())
def test_parts_add_up_to_the_step(problem):
    problem = with_costs(
        dataclasses.replace(problem, stage_cost="ring"),
        a_pass=0.25, a_step=1.0, message_seconds=0.5, step_error=0.0,
    )  # fmt: skip
    try:
        plan = solve(problem)
    except InfeasibleError:
        return
    assert check(plan, problem) == []
    predicted = plan.predicted
    parts = [getattr(predicted, name) for name in PARTS]
    assert sum(parts) == pytest.approx(predicted.step_seconds, rel=1e-12)
    assert min(parts) >= 0
    assert sum(dataclasses.astuple(step_terms(plan))) == pytest.approx(
        predicted.step_seconds, rel=1e-12
    )
    assert predicted.step_seconds_low == predicted.step_seconds == predicted.step_seconds_high


def test_without_any_of_it_nothing_is_told_apart():
    plan = solve(TINY)
    assert [getattr(plan.predicted, name) for name in PARTS] == [None] * len(PARTS)
    assert plan.proof.tolerance is None
    assert plan.stages[0].pass_seconds is plan.stages[0].message_seconds is None


@settings(FEW, max_examples=examples(30))
@given(tiny_layers(), st.sampled_from([0.05, 0.3, 1.0]))
def test_of_plans_within_the_error_the_fewest_stages_on_the_fewest_devices(problem, error):
    problem = dataclasses.replace(problem, step_error=error)
    least = best_flat(problem)
    if least is None:
        assert objective(problem) is None
        return
    plan = solve(problem, most_given_up=error)
    assert check(plan, problem) == []
    most = least * (1 + error) * (1 + 1e-9) + 1e-12
    assert plan.proof.objective <= most
    barely = least * (1 + error) * (1 - 1e-9) - 1e-12
    for count in range(1, len(plan.stages)):
        fewer = best_flat(dataclasses.replace(problem, num_stages=count))
        assert fewer is None or fewer >= barely
    if problem.workers == "at_most" and plan.num_devices > 1:
        smaller = dataclasses.replace(
            problem, num_stages=len(plan.stages), most_devices=plan.num_devices - 1
        )
        found = best_flat(smaller)
        assert found is None or found >= barely


def test_a_simpler_plan_says_what_it_is_as_good_as():
    # Two stages take 116 s, one 138 s.
    problem = chain([(1.0, 2.0)] * 4, [(1, 1)] * 4, levels((4, 1.0)), replication=False)
    problem = with_costs(problem, a_pass=2.0, a_step=10.0, message_seconds=1.0)
    sure = solve(problem)
    assert sure.config == "1-1"
    unsure = dataclasses.replace(problem, step_error=0.3)
    assert solve(unsure).config == "1-1"
    plan = solve(unsure, most_given_up=0.3)
    assert plan.config == "1"
    assert check(plan, unsure) == []
    assert plan.proof.tolerance == 0.3
    assert plan.proof.lower_bound == sure.proof.objective
    assert plan.proof.gap == pytest.approx(1 - sure.proof.objective / plan.proof.objective)
    assert "optimal for these numbers are 1-1" in plan.proof.method
    assert plan.predicted.step_seconds_low == pytest.approx(0.7 * plan.predicted.step_seconds)
    assert check(plan, problem) != []
    assert plan.provenance["fastest"]["config"] == "1-1"
    fastest = solve(unsure, fastest=True)
    assert fastest.config == "1-1"
    assert fastest.proof == sure.proof
    assert fastest.predicted.step_seconds_high is not None
    assert check(fastest, unsure) == []
