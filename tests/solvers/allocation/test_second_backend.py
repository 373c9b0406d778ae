"""On drawn problems every optimum is confirmed by scipy's HiGHS on explicit rows, and its bound."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hetflow.planning.checks.allocation import check
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.jobs import Throughputs
from hetflow.solvers.allocation import all_policies, allocate, instance_of
from hetflow.tests.profiles import examples

seeds = st.integers(0, 10_000)
drawn = settings(max_examples=examples(10))
TOLERANCE = 1e-7


def worth_cost(oracle, rows, worth):
    """The oracle's cost vector where a step of job m on type c is worth ``worth``[m, c]."""
    types = oracle.types
    return np.array([
        sum(worth[m, types.index(name)] * rate for m, rate in rates.items())
        for rates, name in zip(oracle.columns, oracle.where, strict=True)
    ])  # fmt: skip


def confirm(problem, policy, value):
    """What hetflow finds passes its check, and both its value and its bound are this one."""
    found = allocate(problem, policy)
    assert check(found, problem) == []
    assert found.certificate.objective == pytest.approx(value, rel=TOLERANCE)
    assert found.certificate.bound == pytest.approx(value, rel=TOLERANCE)
    return found


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
def test_max_min_policies(seed, space_sharing, draw, oracle):
    problem = draw(seed, space_sharing=space_sharing)
    instance, other = instance_of(problem), oracle(problem)
    fair = instance.equal / instance.scale
    for policy, level in (("las", fair), ("las_weighted", fair * instance.weight)):
        confirm(problem, policy, other.max_min(level)[0])
    confirm(problem, "makespan", 1.0 / other.max_min(instance.steps)[0])


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
        confirm(problem, policy, other.maximise(worth_cost(other, rows, worth))[0])


@pytest.mark.parametrize("space_sharing", [False, True])
@drawn
@given(seed=seeds)
def test_shortest_job_first(seed, space_sharing, draw, oracle):
    """The shortest job at its best; and so the others' weighted sum is the most there can be."""
    problem = draw(seed, space_sharing=space_sharing)
    instance, other = instance_of(problem), oracle(problem)
    best = instance.rate.max(axis=1)
    order = np.argsort(instance.steps / best, kind="stable")
    floor = np.zeros_like(best)
    floor[order[0]] = best[order[0]] * (1 - 1e-9)
    place = np.empty_like(best)
    place[order] = len(order) - np.arange(len(order))
    worth = (place / best)[:, None] * np.ones_like(instance.rate)
    found = confirm(problem, "sjf", float((instance.steps / best).min()))
    cost = worth_cost(other, None, worth)
    earned = sum(place[m] / best[m] * each for m, each in enumerate(found.throughputs.values()))
    assert earned == pytest.approx(other.maximise(cost, floor=floor)[0], rel=1e-6)


@drawn
@given(seed=seeds)
def test_cost_policies_without_slos(seed, draw, oracle):
    """The ratio of totals by Charnes and Cooper; the sum of ratios job by job."""
    problem = draw(seed)
    instance, other = instance_of(problem), oracle(problem)
    spent = -np.array([
        instance.dollars[other.types.index(name)] * instance.scale[next(iter(rates))]
        for rates, name in zip(other.columns, other.where, strict=True)
    ])  # fmt: skip
    no_floor = np.zeros(instance.num_jobs)
    confirm(problem, "min_cost_ratio", charnes_cooper(instance, other, spent, no_floor))
    rows = other.throughput_rows()
    value = 0.0
    for m in range(instance.num_jobs):
        kept = [i for i, rates in enumerate(other.columns) if list(rates) == [m]]
        value += max(rows[m, i] / -spent[i] for i in kept)
    confirm(problem, "min_cost_per_job", value)


def as_an_agnostic_eye_sees_it(problem):
    """The same problem with throughput(m, X^equal) on every type that runs the job (5.3.1)."""
    total = sum(problem.num_devices.values())
    models = []
    for entry in problem.throughputs.models:
        fits = [
            name for name, rate in entry.steps_per_second.items()
            if rate > 0 and entry.scale_factor <= problem.num_devices[name]
        ]  # fmt: skip
        level = sum(entry.steps_per_second[t] * problem.num_devices[t] / total for t in fits)
        models.append(dataclasses.replace(entry, steps_per_second=dict.fromkeys(fits, level)))
    table = Throughputs(models=tuple(models))
    return dataclasses.replace(problem, throughputs=table, heterogeneity="aware")


@drawn
@given(seed=seeds)
def test_agnostic_policies_are_the_same_ones_on_a_flat_matrix(seed, draw, oracle):
    problem = draw(seed, heterogeneity="agnostic")
    instance, other = instance_of(problem), oracle(as_an_agnostic_eye_sees_it(problem))
    equal, one = instance.equal, np.ones_like(instance.rate)
    order = (len(one) - np.arange(len(one)))[:, None]
    for policy, level in (
        ("las", equal / instance.scale),
        ("las_weighted", equal / instance.scale * instance.weight),
        ("las_water_filling", equal / instance.scale * instance.weight),
    ):
        confirm(problem, policy, other.max_min(level)[0])
    confirm(problem, "makespan", 1.0 / other.max_min(instance.steps)[0])
    for policy, worth in (
        ("max_throughput", one), ("fifo", order / equal[:, None] * one),
        ("max_normalised_throughput", one / equal[:, None]), ("min_cost", one / instance.dollars),
    ):  # fmt: skip
        confirm(problem, policy, other.maximise(worth_cost(other, None, worth))[0])


@drawn
@given(seed=seeds)
def test_mixed_placement_is_the_problem_with_twice_the_types(seed, draw):
    """Consolidated and unconsolidated devices as columns, the former limited, row by row."""
    drawn_problem = draw(seed)
    rng = np.random.default_rng(seed)
    models = tuple(
        dataclasses.replace(
            entry,
            unconsolidated_steps_per_second={
                t: float(rng.uniform(0.3, 1.0)) * rate for t, rate in entry.steps_per_second.items()
            },
        )
        for entry in drawn_problem.throughputs.models
    )
    limits = {t: int(rng.integers(1, n + 1)) for t, n in drawn_problem.num_devices.items()}
    problem = dataclasses.replace(
        drawn_problem, throughputs=Throughputs(models=models), placement="mixed",
        consolidated_devices=limits,
    )  # fmt: skip
    columns, rows = placed_columns(problem), instance_of(problem)
    jobs, types = problem.jobs.jobs, list(problem.num_devices)
    for policy, level in (("las", rows.equal / rows.scale), ("makespan", rows.steps)):
        number = len(columns)
        above, room = [], []
        for m in range(len(jobs)):
            above.append([float(c[0] == m) for c in columns] + [0.0])
            room.append(1.0)
        for t in types:
            held = [jobs[m].scale_factor * (name == t) for m, name, _, _ in columns]
            close = [h * c[2] for h, c in zip(held, columns, strict=True)]
            above += [[*held, 0.0], [*close, 0.0]]
            room += [problem.num_devices[t], limits[t]]
        for m in range(len(jobs)):
            rates = [-c[3] * (c[0] == m) / level[m] for c in columns]
            above.append([*rates, 1.0])
            room.append(0.0)
        best = linprog([0.0] * number + [-1.0], A_ub=above, b_ub=room, method="highs")
        confirm(problem, policy, -best.fun if policy == "las" else 1.0 / -best.fun)


def placed_columns(problem):
    """(job, type, whether consolidated, rate) of all that a job may hold."""
    table = {(e.model, e.scale_factor): e for e in problem.throughputs.models}
    found = []
    for m, job in enumerate(problem.jobs.jobs):
        entry = table[job.model, job.scale_factor]
        for name, number in problem.num_devices.items():
            rate = entry.steps_per_second.get(name, 0.0)
            apart = entry.unconsolidated_steps_per_second[name] if job.scale_factor > 1 else rate
            if job.scale_factor <= min(number, problem.consolidated_devices[name]) and rate > 0:
                found.append((m, name, True, rate))
            if job.scale_factor <= number and apart > 0:
                found.append((m, name, False, apart))
    return found


def test_no_policy_goes_unconfirmed():
    """Each is in a test here; water filling and sums of ratios are in files of their own."""
    here = Path(__file__)
    elsewhere = (
        here.parent / "water_filling" / "test_water.py",
        here.parent / "test_sum_of_ratios.py",
    )
    text = "".join(path.read_text() for path in (here, *elsewhere))
    assert [name for name in all_policies() if f'"{name}"' not in text] == []


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
    confirm(problem, "min_dollars_slo", -cheapest[0])
    worth = np.ones_like(instance.rate) / instance.dollars
    confirm(problem, "min_cost_slo", other.maximise(worth_cost(other, None, worth), floor=floor)[0])
    confirm(problem, "min_cost_ratio_slo", charnes_cooper(instance, other, spent, floor))


def charnes_cooper(instance, other, spent, floor):
    """max N.x / D.x as one program in y = t x, t: the classical transformation."""
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
    confirm(problem, "finish_time_fairness", high)


@pytest.mark.parametrize(("space_sharing", "part"), [(False, 1.2), (True, 0.9)])
@settings(drawn, max_examples=examples(8))
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
