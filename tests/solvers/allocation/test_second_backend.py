"""On drawn problems every optimum is confirmed by scipy's HiGHS on explicit rows, and its bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.checks.allocation import check
from hetflow.schema.errors import InfeasibleError
from hetflow.solvers.allocation import allocate, instance_of

seeds = st.integers(0, 10_000)
drawn = settings(max_examples=15, deadline=None, derandomize=True)
TOLERANCE = 1e-7


def worth_cost(oracle, rows, worth):
    """The oracle's cost vector where a step of job m on type c is worth ``worth``[m, c]."""
    types = oracle.types
    return np.array([
        sum(worth[m, types.index(name)] * rate for m, rate in rates.items())
        for rates, name in zip(oracle.columns, oracle.where, strict=True)
    ])  # fmt: skip


def confirmed(found, value):
    assert found.certificate.objective == pytest.approx(value, rel=TOLERANCE)
    assert found.certificate.bound == pytest.approx(value, rel=TOLERANCE)


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
def test_max_min_policies(seed, space_sharing, draw, oracle):
    problem = draw(seed, space_sharing=space_sharing)
    instance, other = instance_of(problem), oracle(problem)
    fair = instance.equal / instance.scale
    for policy, level in (("las", fair), ("las_weighted", fair * instance.weight)):
        found = allocate(problem, policy)
        assert check(found, problem) == []
        confirmed(found, other.max_min(level)[0])
    found = allocate(problem, "makespan")
    assert check(found, problem) == []
    confirmed(found, 1.0 / other.max_min(instance.steps)[0])


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
def test_total_policies(seed, space_sharing, draw, oracle):
    problem = draw(seed, space_sharing=space_sharing)
    instance, other = instance_of(problem), oracle(problem)
    rows, one = other.throughput_rows(), np.ones_like(instance.rate)
    best = instance.rate.max(axis=1)[:, None]
    order = (len(one) - np.arange(len(one)))[:, None]
    heaviest = np.empty(len(one))
    heaviest[np.argsort(-instance.weight, kind="stable")] = order[:, 0]
    worths = {
        "max_throughput": one,
        "max_normalised_throughput": one / best,
        "fifo": order / best * one,
        "min_cost": one / instance.dollars,
        "static_priority": heaviest[:, None] / best * one,
    }
    for policy, worth in worths.items():
        found = allocate(problem, policy)
        assert check(found, problem) == []
        confirmed(found, other.maximise(worth_cost(other, rows, worth))[0])


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
def test_cost_policies_under_slos(seed, space_sharing, draw, oracle):
    problem = draw(seed, slos=True, space_sharing=space_sharing)
    instance, other = instance_of(problem), oracle(problem)
    floor = instance.steps / instance.slo_seconds
    spent = -np.array([
        instance.dollars[other.types.index(name)] * instance.scale[next(iter(rates))]
        for rates, name in zip(other.columns, other.where, strict=True)
    ])  # fmt: skip
    cheapest = other.maximise(spent, floor=floor)
    if cheapest is None:
        with pytest.raises(InfeasibleError, match="SLO"):
            allocate(problem, "min_cost_slo")
        return
    if not floor.any():
        return
    found = allocate(problem, "min_dollars_slo")
    assert check(found, problem) == []
    confirmed(found, -cheapest[0])
    worth = np.ones_like(instance.rate) / instance.dollars
    found = allocate(problem, "min_cost_slo")
    assert check(found, problem) == []
    confirmed(found, other.maximise(worth_cost(other, None, worth), floor=floor)[0])
    found = allocate(problem, "min_cost_ratio_slo")
    assert check(found, problem) == []
    confirmed(found, charnes_cooper(instance, other, spent, floor))


def charnes_cooper(instance, other, spent, floor):
    """max N.x / D.x as one program in y = t x, t: the classical transformation."""
    from scipy.optimize import linprog

    worth = np.ones_like(instance.rate) / instance.rate.max(axis=1)[:, None]
    earned = worth_cost(other, None, worth)
    limits, room = other._limits()
    rows = other.throughput_rows()
    unit = rows.max(axis=1)
    above = np.vstack((
        np.hstack((limits, -room[:, None])),
        np.hstack((-rows, floor[:, None])) / unit[:, None],
    ))  # fmt: skip
    found = linprog(
        -np.append(earned, 0.0),
        A_ub=above,
        b_ub=np.zeros(len(above)),
        A_eq=[np.append(-spent, 0.0)],
        b_eq=[1.0],
        method="highs",
    )
    return -found.fun


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
def test_finish_time_fairness_by_bisection(seed, space_sharing, draw, oracle):
    problem = draw(seed, space_sharing=space_sharing)
    instance, other = instance_of(problem), oracle(problem)
    alone = instance.isolated_seconds + instance.steps / instance.isolated
    low, high = float((instance.elapsed_seconds / alone).max()), 1e3
    for _ in range(60):
        rho = 0.5 * (low + high)
        needed = instance.steps / (rho * alone - instance.elapsed_seconds)
        if other.max_min(needed)[0] >= 1:
            high = rho
        else:
            low = rho
    found = allocate(problem, "finish_time_fairness")
    assert check(found, problem) == []
    confirmed(found, high)


@pytest.mark.parametrize(("space_sharing", "part"), [(False, 1.2), (True, 0.9)])
@settings(drawn, max_examples=8)
@given(seed=seeds)
def test_makespan_budget_by_explicit_search(seed, part, space_sharing, draw, oracle):
    """Part of what the jobs cost alone on their cheapest types; in pairs less may do."""
    problem = draw(seed, space_sharing=space_sharing)
    instance, other = instance_of(problem), oracle(problem)
    cost = instance.usage * instance.dollars / 3600
    with np.errstate(divide="ignore"):
        each = np.where(instance.rate > 0, cost / instance.rate, np.inf).min(axis=1)
    budget = part * float(each @ instance.steps)
    spent = -np.array([
        cost[next(iter(rates)), other.types.index(name)]
        for rates, name in zip(other.columns, other.where, strict=True)
    ])  # fmt: skip
    rows = other.throughput_rows()
    pace = float((instance.steps / np.where(rows > 0, rows, np.inf).min(axis=1)).max())
    other.spare = 1e3
    least = -other.maximise(spent, floor=instance.steps / pace)[0] * pace
    other.spare = 1.0
    problem = draw(seed, budget_dollars=budget, space_sharing=space_sharing)
    if least > budget:
        with pytest.raises(InfeasibleError, match=f"cost {least:.4g}"[:-1]):
            allocate(problem, "makespan_budget")
        return
    low, high = 1.0 / other.max_min(instance.steps)[0], 100 * pace
    for _ in range(45):
        middle = np.sqrt(low * high)
        cheapest = other.maximise(spent, floor=instance.steps / middle)
        if cheapest is not None and -cheapest[0] * middle <= budget:
            high = middle
        else:
            low = middle
    found = allocate(problem, "makespan_budget")
    assert check(found, problem) == []
    assert found.certificate.objective == pytest.approx(high, rel=1e-6)
    assert found.certificate.bound == pytest.approx(high, rel=1e-6)
