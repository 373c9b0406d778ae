"""What an optimum leaves idle is shared out: the objective stays, and every throughput is proved.

The oracle raises all throughputs together, in proportion to what the policy's optimum asks of each
job, and then asks of each job by a program of its own whether it can still rise (scipy's HiGHS).
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.planning.checks.allocation import check
from hetflow.schema.errors import BackendError
from hetflow.schema.jobs import (
    AllocationProblem,
    Job,
    Jobs,
    MixThroughput,
    ModelThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import all_policies, allocate, engine, instance_of
from hetflow.solvers.allocation import policy as policies
from hetflow.solvers.allocation.water_filling.bottlenecks import best_levels
from hetflow.solvers.allocation.water_filling.tree import RowTree
from hetflow.solvers.allocation.water_filling.water import rise_stepwise
from hetflow.tests.profiles import examples

seeds = st.integers(0, 10_000)
drawn = settings(max_examples=examples(12))
FILLED = ("las", "las_weighted", "makespan", "finish_time_fairness")


def asked_of_jobs(policy, instance, value):
    """The throughput that the policy's optimum asks of each job, but for a factor [jobs]."""
    fair = instance.equal / instance.scale
    if policy == "finish_time_fairness":
        alone = instance.isolated_seconds + instance.steps / instance.isolated
        return instance.steps / (value * alone - instance.elapsed_seconds)
    return {"las": fair, "las_weighted": fair * instance.weight, "makespan": instance.steps}[policy]


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
@pytest.mark.slow
def test_the_objective_stays_and_the_rest_is_lexicographic(seed, space_sharing, draw, oracle):
    problem = draw(seed, num_jobs=6, space_sharing=space_sharing)
    instance, other = instance_of(problem), oracle(problem)
    for policy in FILLED:
        bare = allocate(problem, policy, fills=False)
        found = allocate(problem, policy)
        assert check(bare, problem) == []
        assert check(found, problem) == []
        value = bare.certificate.objective
        assert found.certificate.objective == pytest.approx(value, rel=1e-9)
        unit = asked_of_jobs(policy, instance, value)
        assert list(found.throughputs.values()) == pytest.approx(
            unit * other.levels(unit, lambda active: active * 1.0), rel=1e-5
        )
        assert (bare.fill, found.fill) == (None, "lexicographic")
        assert found.usable_idle_devices == {}


@pytest.mark.parametrize("seed", [2, 8, 24])
def test_the_simplex_method_fills_to_the_same_throughputs(seed, draw, monkeypatch):
    """Filled throughputs are unique: without the interior point method HiGHS finds the same."""
    problem = draw(seed, num_jobs=12)
    found = {policy: allocate(problem, policy) for policy in FILLED}

    monkeypatch.setattr(engine, "solve_interior", lambda *_, **__: None)
    for policy, usual in found.items():
        other = allocate(problem, policy)
        assert other.certificate.method.startswith(
            "HiGHS simplex, because the interior point method broke down"
        )
        assert (check(other, problem), other.fill) == ([], "lexicographic")
        assert other.throughputs == pytest.approx(usual.throughputs, rel=1e-6)


def half_used():
    """Twelve jobs crowd on two V100s; four jobs of two K80s each could use eight of nine."""
    models = (
        ModelThroughput(model="new", steps_per_second={"V100": 8.0}),
        ModelThroughput(model="old", scale_factor=2, steps_per_second={"K80": 2.0}),
    )
    jobs = [Job(id=f"new{i}", model="new", steps=100.0) for i in range(12)]
    jobs += [Job(id=f"old{i}", model="old", steps=100.0, scale_factor=2) for i in range(4)]
    return AllocationProblem(
        jobs=Jobs(jobs=tuple(jobs)),
        throughputs=Throughputs(models=models),
        num_devices={"V100": 2, "K80": 9},
    )


@pytest.mark.parametrize("policy", FILLED)
def test_idle_devices_that_jobs_could_use_are_named_and_filled(policy):
    problem = half_used()
    bare = allocate(problem, policy, fills=False)
    assert sum(bare.usable_idle_devices.values()) > 1.0
    assert bare.idle_reason == "no filling was asked for"
    found = allocate(problem, policy)
    assert found.usable_idle_devices == {}
    assert found.idle_devices == {"K80": pytest.approx(1.0, abs=1e-6)}
    assert found.idle_reason is None
    assert sum(found.throughputs.values()) > 1.05 * sum(bare.throughputs.values())
    assert check(found, problem) == check(bare, problem) == []


def test_idle_devices_on_purpose_say_why(draw):
    problem = draw(3, slos=True, num_jobs=6)
    found = allocate(problem, "min_dollars_slo")
    assert check(found, problem) == []
    assert found.fill is None
    assert found.usable_idle_devices
    assert "costs nothing" in found.idle_reason


@drawn
@given(seed=seeds)
def test_the_cheapest_columns_are_filled_and_dearer_ones_are_not(seed, draw):
    problem = draw(seed)
    bare = allocate(problem, "min_cost_per_job", fills=False)
    found = allocate(problem, "min_cost_per_job")
    assert check(bare, problem) == check(found, problem) == []
    assert found.certificate.objective == pytest.approx(bare.certificate.objective, rel=1e-9)
    assert found.fill == "lexicographic"
    cheapest = dataclasses.replace(bare, fill="lexicographic")
    if bare.throughputs != pytest.approx(found.throughputs, rel=1e-4):
        assert check(cheapest, problem) != []


@drawn
@given(seed=seeds)
def test_agnostic_policies_are_filled_as_they_see_the_pool(seed, draw):
    problem = draw(seed, heterogeneity="agnostic")
    for policy in FILLED:
        found = allocate(problem, policy)
        bare = allocate(problem, policy, fills=False)
        assert check(found, problem) == check(bare, problem) == []
        assert found.usable_idle_devices == {}
        value = bare.certificate.objective
        assert found.certificate.objective == pytest.approx(value, rel=1e-9)


def test_mixes_and_unconsolidated_devices_are_filled_too():
    one = ModelThroughput(
        model="m", scale_factor=2, steps_per_second={"V100": 8.0, "K80": 3.0},
        unconsolidated_steps_per_second={"V100": 5.0},
    )  # fmt: skip
    old = ModelThroughput(model="n", steps_per_second={"V100": 4.0})
    mix = MixThroughput(model="n", devices={"V100": 1, "K80": 2}, steps_per_second=5.0)
    jobs = [Job(id=f"m{i}", model="m", steps=10.0, scale_factor=2) for i in range(3)]
    jobs += [Job(id=f"n{i}", model="n", steps=10.0) for i in range(6)]
    for options, mixes in (
        ({"placement": "mixed", "consolidated_devices": {"V100": 2, "K80": 8}}, ()),
        ({}, (mix,)),
    ):
        problem = AllocationProblem(
            jobs=Jobs(jobs=tuple(jobs)),
            throughputs=Throughputs(models=(one, old), mixes=mixes),
            num_devices={"V100": 4, "K80": 9},
            **options,
        )
        for policy in FILLED:
            bare = allocate(problem, policy, fills=False)
            found = allocate(problem, policy)
            assert check(found, problem) == check(bare, problem) == []
            assert found.usable_idle_devices == {}


def test_a_claim_to_have_filled_is_judged():
    problem = half_used()
    bare = allocate(problem, "las", fills=False)
    claimed = dataclasses.replace(bare, fill="lexicographic")
    faults = check(claimed, problem)
    assert any("nothing shows" in fault for fault in faults)
    assert any("called filled, but" in fault for fault in faults)
    silent = dataclasses.replace(bare, idle_devices={}, usable_idle_devices={})
    assert any("0.0 idle K80 stated" in fault for fault in check(silent, problem))
    assert any("0.0 idle usable K80 stated" in fault for fault in check(silent, problem))
    older = dataclasses.replace(bare, idle_devices=None, usable_idle_devices=None)
    assert check(older, problem) == []
    # Who has more than the least gives a little of it back: the objective is the same.
    found = allocate(problem, "las")
    least = found.certificate.objective
    instance = instance_of(problem)
    level = dict(zip(instance.ids, instance.equal / instance.scale, strict=True))
    rich = max(found.throughputs, key=lambda name: found.throughputs[name] / level[name])
    assert found.throughputs[rich] / level[rich] > 1.1 * least
    part = 0.99
    worse = dataclasses.replace(
        found,
        x=found.x | {rich: {c: t * part for c, t in found.x[rich].items()}},
        throughputs=found.throughputs | {rich: found.throughputs[rich] * part},
        idle_devices=None,
        usable_idle_devices=None,
    )
    assert any(rich in fault and "nothing shows" in fault for fault in check(worse, problem))


def test_where_filling_breaks_down_the_optimum_stands_and_says_so(monkeypatch):
    def broken(*_):
        raise BackendError("no more numbers")

    monkeypatch.setattr(policies, "fill", broken)
    problem = half_used()
    found = allocate(problem, "las")
    assert check(found, problem) == []
    assert found.fill is None
    assert "no more numbers" in found.idle_reason


def test_only_cost_policies_leave_devices_idle_on_purpose():
    on_purpose = {name for name, policy in all_policies().items() if policy.leaves_idle}
    assert on_purpose == {name for name in all_policies() if name.startswith("min_")} | {
        "makespan_budget"
    }


def test_a_pool_with_a_device_for_each_job_is_filled_without_a_program_for_each_level():
    """Nearly every job has a device of its own, so bottlenecks are many and their prices tiny."""
    rng = np.random.default_rng(0)
    types = [f"t{k}" for k in range(8)]
    jobs = tuple(Job(id=f"j{i}", model=f"m{i}", steps=100.0) for i in range(80))
    rates = rng.uniform(1.0, 8.0, (80, 8)).tolist()
    problem = AllocationProblem(
        jobs=Jobs(jobs=jobs),
        throughputs=Throughputs(
            models=tuple(
                ModelThroughput(model=f"m{i}", steps_per_second=dict(zip(types, row, strict=True)))
                for i, row in enumerate(rates)
            )
        ),
        num_devices=dict.fromkeys(types, 10),
    )
    instance = instance_of(problem)
    unit = instance.equal / instance.scale
    merged = engine.MergedProgram.of(instance, instance.program(level=unit))
    tree = RowTree((), np.full(80, -1), np.ones(80), merged.small.count)
    slow = rise_stepwise(merged, tree, best_levels(merged))
    found = allocate(problem, "las")
    assert "shared bottlenecks" in found.certificate.method
    assert found.certificate.gap < 1e-10
    assert check(found, problem) == []
    assert list(found.throughputs.values()) == pytest.approx(unit * slow.level, rel=1e-7)
