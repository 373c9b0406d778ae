"""Every policy's claim is judged: a worse allocation cannot be passed off as the optimum."""

import dataclasses

import pytest

from hetflow.planning.checks.allocation import check, effective_throughputs
from hetflow.planning.checks.allocation_policies import Pool
from hetflow.planning.checks.judges import JUDGES, objective_of
from hetflow.schema.errors import ProblemError
from hetflow.schema.jobs import (
    AllocationProblem,
    Entity,
    Job,
    Jobs,
    ModelThroughput,
    PairThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import all_policies, allocate

RATES = {
    "a": {"V100": 40.0, "K80": 10.0}, "b": {"V100": 12.0, "K80": 4.0},
    "c": {"V100": 100.0, "K80": 50.0},
}  # fmt: skip
NO_PAIRS = ("min_cost_ratio", "min_cost_per_job", "min_cost_per_job_slo")


def problem(**changes):
    entities = (Entity(name="x"), Entity(name="y", weight=2.0, policy="fifo"))
    jobs = tuple(
        Job(id=f"j{i}", model="abc"[i % 3], steps=100.0 * (i + 1), entity="xy"[i % 2],
            slo_seconds=(60.0, 200.0, None)[i % 3], priority_weight=1.0 + i % 2,
            elapsed_seconds=5.0 * i, isolated_seconds=3.0)
        for i in range(6)
    )  # fmt: skip
    pairs = tuple(
        PairThroughput(
            models=(a, b),
            steps_per_second={t: (0.7 * RATES[a][t], 0.6 * RATES[b][t]) for t in RATES[a]},
        )
        for a, b in ("ab", "ac", "bc")
    )
    models = tuple(ModelThroughput(model=m, steps_per_second=r) for m, r in RATES.items())
    settings = {
        "jobs": Jobs(jobs=jobs, entities=entities),
        "throughputs": Throughputs(models=models, pairs=pairs),
        "num_devices": {"V100": 2, "K80": 2},
        "dollars_per_hour": {"V100": 2.0, "K80": 0.5},
        "budget_dollars": 0.05,
    }
    return AllocationProblem(**{**settings, **changes})


def restated(allocation, asked, x, **claims):
    """The allocation with other time fractions, its figures stated truly but for ``claims``."""
    pool = Pool(asked)
    seen = pool.flat() if allocation.heterogeneity == "agnostic" else pool
    moved = dataclasses.replace(allocation, x=x, pairs=())
    moved = dataclasses.replace(moved, throughputs=effective_throughputs(moved, pool))
    value = objective_of(moved, seen, effective_throughputs(moved, seen))
    told = {"objective": value, "bound": value, "gap": 0.0, **claims}
    return dataclasses.replace(
        moved, certificate=dataclasses.replace(allocation.certificate, **told)
    )


def halfway(allocation):
    """Half the allocation, half 1/n of every type for each job: feasible, and never optimal."""
    share = {"V100": 1 / 6, "K80": 1 / 6}
    return {
        name: {c: 0.99 * (share[c] + 0.5 * row.get(c, 0.0)) for c in share}
        for name, row in allocation.x.items()
    }


@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("space_sharing", [False, True])
@pytest.mark.parametrize("policy", sorted(JUDGES.names()))
def test_a_worse_allocation_is_not_taken_for_the_optimum(policy, space_sharing, agnostic):
    asked = problem(space_sharing=space_sharing, heterogeneity="agnostic" if agnostic else "aware")
    if space_sharing and policy in NO_PAIRS:
        with pytest.raises(ProblemError, match="does not weigh pairs"):
            allocate(asked, policy)
        return
    found = allocate(asked, policy)
    assert check(found, asked) == []
    worse = restated(found, asked, halfway(found))
    faults = check(worse, asked)
    assert any("prove" in fault or "nothing shows" in fault for fault in faults), faults


@pytest.mark.parametrize("policy", sorted(JUDGES.names()))
@pytest.mark.slow
def test_the_claim_must_be_whole(policy):
    asked = problem()
    found = allocate(asked, policy)
    certificate = found.certificate
    other = {"max": "min", "min": "max"}[JUDGES.get(policy).sense]
    for change, fault in (
        ({"bound": None, "gap": None}, "without a bound"),
        ({"gap": 0.1}, "a gap of 0.1"),
        ({"sense": other}, f"not a {other}"),
    ):
        claim = dataclasses.replace(certificate, **change)
        faults = check(dataclasses.replace(found, certificate=claim), asked)
        assert any(fault in line for line in faults), faults


def test_the_checker_knows_every_policy():
    assert set(JUDGES.names()) == set(all_policies())
    assert {name: policy.sense for name, policy in all_policies().items()} == {
        name: JUDGES.get(name).sense for name in JUDGES.names()
    }


def test_a_budget_that_is_passed_is_seen():
    asked = problem()
    found = allocate(asked, "makespan_budget")
    tighter = problem(budget_dollars=0.04)
    assert any("above 0.04 (6.4.3)" in fault for fault in check(found, tighter))
    assert any("has none" in fault for fault in check(found, problem(budget_dollars=None)))


def test_dollars_need_prices():
    asked = problem()
    found = allocate(asked, "min_cost_ratio")
    faults = check(found, problem(dollars_per_hour={"V100": 2.0}))
    assert faults == ["min_cost_ratio counts dollars, and 'K80' has no price"]


def test_a_policy_of_ones_own_is_held_to_the_constraints():
    asked = problem()
    own = dataclasses.replace(allocate(asked, "las"), policy="my_own")
    assert check(own, asked) == []
    crowded = {name: {"V100": 1.0} for name in own.x}
    assert any("(5.3)" in fault for fault in check(dataclasses.replace(own, x=crowded), asked))
