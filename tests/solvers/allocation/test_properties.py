"""Properties of thesis 5.4.4, symmetry, determinism, scaling."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.planning.checks.allocation import check
from hetflow.schema import files
from hetflow.schema.jobs import (
    Allocation,
    AllocationProblem,
    Entity,
    Job,
    Jobs,
    ModelThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import all_policies, allocate, instance_of
from hetflow.tests.profiles import examples

seeds = st.integers(0, 10_000)
drawn = settings(max_examples=examples(10))
ENTITIES = (Entity(name="a"), Entity(name="b", weight=2.0))
SENSE = {"las": 1, "las_weighted": 1, "makespan": -1, "finish_time_fairness": -1,
         "max_throughput": 1, "min_cost": 1, "fifo": 1, "static_priority": 1, "sjf": -1,
         "max_normalised_throughput": 1, "las_water_filling": 1, "hierarchical": 1}  # fmt: skip


@drawn
@given(seed=seeds)
def test_sharing_incentive(seed, draw):
    """No policy's objective is worse than with 1/n of every type for each job."""
    problem = draw(seed)
    instance = instance_of(problem)
    isolated, steps = instance.isolated, instance.steps
    las = (isolated / instance.equal * instance.scale).min()
    assert allocate(problem, "las").certificate.objective >= las * (1 - 1e-9)
    makespan = (steps / isolated).max()
    assert allocate(problem, "makespan").certificate.objective <= makespan * (1 + 1e-9)
    alone = instance.isolated_seconds + steps / isolated
    rho = ((instance.elapsed_seconds + steps / isolated) / alone).max()
    assert allocate(problem, "finish_time_fairness").certificate.objective <= rho * (1 + 1e-9)
    best, number = instance.rate.max(axis=1), len(steps)
    place = np.empty(number)
    place[np.argsort(-instance.weight, kind="stable")] = np.arange(number)
    for policy, worth in (
        ("max_throughput", np.ones(number)), ("max_normalised_throughput", 1 / best),
        ("fifo", (number - np.arange(number)) / best), ("static_priority", (number - place) / best),
    ):  # fmt: skip
        naive = float(worth @ isolated)
        assert allocate(problem, policy).certificate.objective >= naive * (1 - 1e-9)
    first = float((steps / isolated).min())
    assert allocate(problem, "sjf").certificate.objective <= first * (1 + 1e-9)


@drawn
@given(seed=seeds)
def test_water_filling_is_pareto_efficient(seed, draw, oracle):
    """Nobody's throughput can rise without another's falling."""
    problem = draw(seed)
    other = oracle(problem)
    reached = np.array(list(allocate(problem, "las_water_filling").throughputs.values()))
    rows = other.throughput_rows()
    scale = 1.0 / reached
    most, _ = other.maximise(scale @ rows, floor=reached * (1 - 1e-7))
    assert most <= len(reached) * (1 + 1e-5)


@pytest.mark.parametrize("policy", SENSE)
@drawn
@given(seed=seeds)
@pytest.mark.slow
def test_colocation_is_never_worse(seed, policy, draw):
    apart = allocate(draw(seed, entities=ENTITIES), policy).certificate.objective
    together = draw(seed, entities=ENTITIES, space_sharing=True)
    together = allocate(together, policy).certificate.objective
    assert SENSE[policy] * (together - apart) >= -1e-9 * abs(apart)


@pytest.mark.parametrize("policy", ["makespan", "max_throughput", "min_cost", "fifo"])
@drawn
@given(seed=seeds)
def test_more_devices_never_hurt(seed, policy, draw):
    """(The fairness policies' objectives are relative to the pool itself.)"""
    small = draw(seed)
    large = draw(seed)
    object.__setattr__(large, "num_devices", {k: 2 * v for k, v in small.num_devices.items()})
    before, after = (allocate(p, policy).certificate.objective for p in (small, large))
    assert SENSE[policy] * (after - before) >= -1e-9 * abs(before)


@pytest.mark.parametrize("space_sharing", [False, True])
@pytest.mark.parametrize("policy", ["las", "makespan", "hierarchical", "min_cost"])
def test_the_same_question_gets_the_same_answer_to_the_last_digit(policy, space_sharing, draw):
    answers = [
        files.to_json(
            allocate(draw(7, entities=ENTITIES, space_sharing=space_sharing, num_jobs=20), policy)
        )
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert files.from_json(answers[0], Allocation).policy == policy


@drawn
@given(seed=seeds)
def test_equal_jobs_get_equal_shares(seed, draw):
    problem = draw(seed, num_jobs=20)
    found = allocate(problem, "las")
    shares = {}
    for job in problem.jobs.jobs:
        kind = (job.model, job.scale_factor)
        assert shares.setdefault(kind, found.x[job.id]) == found.x[job.id]


def test_a_homogeneous_pool_gives_time_in_proportion_to_weight(draw):
    """With one type LAS is the classical policy (5.4.4)."""
    problem = draw(3, num_types=1, num_models=1, num_jobs=30)
    found = allocate(problem, "las_weighted")
    scale = problem.jobs.jobs[0].scale_factor
    times = {job.id: sum(found.x[job.id].values()) for job in problem.jobs.jobs}
    lightest = min(times.values())
    total = sum(job.priority_weight for job in problem.jobs.jobs)
    assert lightest == pytest.approx(problem.num_devices["type0"] / scale / total, rel=1e-8)


def test_every_policy_is_described_and_solves(draw):
    problem = draw(5, entities=ENTITIES, budget_dollars=1e6, slos=False)
    assert len(all_policies()) >= 15
    for name, policy in all_policies().items():
        assert policy.title
        assert policy.unit
        if not name.endswith("_slo"):
            assert allocate(problem, name).certificate.termination == "optimal"


@pytest.mark.parametrize("heterogeneity", ["aware", "agnostic"])
@pytest.mark.parametrize("policy", sorted(set(all_policies()) - {"makespan_budget"}))
def test_rates_and_weights_eighteen_orders_apart(policy, heterogeneity):
    """Units are the user's own: a weight of 1e12, rates from 1e-9 to 1e9, nothing overflows."""
    rates = {"a": {"V100": 4e-9, "K80": 1e-9}, "b": {"V100": 1.2e9, "K80": 4e8},
             "c": {"V100": 100.0, "K80": 0.0}}  # fmt: skip
    problem = AllocationProblem(
        jobs=Jobs(
            jobs=(
                Job(id="a", model="a", steps=100.0, priority_weight=1e12, entity="x"),
                Job(id="b", model="b", steps=100.0, entity="x"),
                Job(id="c", model="c", steps=1e15, entity="y"),
            ),
            entities=(Entity(name="x", policy="fifo"), Entity(name="y")),
        ),
        throughputs=Throughputs(
            models=tuple(ModelThroughput(model=m, steps_per_second=r) for m, r in rates.items())
        ),
        num_devices={"V100": 1, "K80": 1},
        dollars_per_hour={"V100": 2.0, "K80": 1.0},
        heterogeneity=heterogeneity,
    )
    found = allocate(problem, policy)
    assert check(found, problem) == []
    assert found.certificate.termination == "optimal"
