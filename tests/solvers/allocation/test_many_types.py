"""Many device types: columns join when they pay, and a limit of time ends with what is proved."""

import json

import numpy as np
import pytest

import hetflow
from hetflow.planning.allocate import allocation_problem
from hetflow.planning.checks.allocation import check
from hetflow.planning.inputs import pool_of
from hetflow.schema.errors import TooLittleTimeError
from hetflow.schema.jobs import Job, Jobs, ModelThroughput, Throughputs
from hetflow.solvers.allocation import allocate, policy
from hetflow.solvers.allocation import program as programs
from hetflow.solvers.allocation.engine import solve_alone
from hetflow.solvers.allocation.program import FractionProgram
from hetflow.solvers.allocation.water_filling.bottlenecks import least_cost


def tables(jobs: int, types: int) -> tuple[Jobs, Throughputs]:
    """Jobs of unlike models with 1 to 8 steps per second on each type."""
    draw = np.random.default_rng(0)
    names = [f"t{k}" for k in range(types)]
    rows = [
        ModelThroughput(
            model=f"m{i}",
            steps_per_second=dict(zip(names, draw.uniform(1, 8, types).tolist(), strict=True)),
        )
        for i in range(jobs)
    ]
    return (
        Jobs(jobs=tuple(Job(id=f"j{i}", model=f"m{i}", steps=1e4) for i in range(jobs))),
        Throughputs(models=tuple(rows)),
    )


def pool(types: int, devices: int) -> str:
    return ",".join(f"{devices}xt{k}" for k in range(types))


def program(jobs: int, types: int, devices: float) -> FractionProgram:
    draw = np.random.default_rng(1)
    return FractionProgram(
        count=draw.integers(1, 4, jobs).astype(float),
        rate=draw.uniform(1, 8, (jobs, types)) * (draw.random((jobs, types)) > 0.2),
        usage=np.repeat(draw.choice([1.0, 2.0], jobs)[:, None], types, axis=1),
        gain=np.zeros((jobs, types)),
        resources=np.eye(types),
        capacity=np.full(types, devices),
        level=draw.uniform(1, 8, jobs),
        floor=np.zeros(jobs),
        demands=np.ones(jobs, dtype=bool),
        level_weight=1.0,
        level_capacity=np.zeros(types),
    )


@pytest.mark.parametrize("devices", [1.0, 40.0])
def test_columns_that_join_end_at_the_optimum_of_all(devices, monkeypatch):
    asked = program(60, 30, devices)
    usual = solve_alone(asked)
    monkeypatch.setattr(programs, "FEW", 100)
    slowest = np.where(asked.rate > 0, asked.rate, np.inf).argmin(axis=1)
    bad = np.zeros(asked.rate.shape, dtype=bool)
    bad[np.arange(60), slowest] = True
    for likely in (None, bad, programs.likely_columns(asked, usual)):
        found = programs.solve_by_simplex(asked, likely)
        assert found.z == pytest.approx(usual.z, rel=1e-8)
        assert found.gap < 1e-8


def test_least_cost_is_the_hull_of_all_ways():
    draw = np.random.default_rng(2)
    rate = draw.integers(0, 6, (200, 7)).astype(float)
    rent = draw.integers(0, 4, (200, 7)).astype(float)
    wanted = draw.choice([0.0, 0.5, 1.0, 2.5, 5.0], 200)
    found = least_cost(rate, rent, wanted)
    for row in range(200):
        ways = [(0.0, 0.0), *((r, p) for r, p in zip(rate[row], rent[row], strict=True) if r)]
        costs = [
            p + (wanted[row] - r) / (f - r) * (q - p) if f > r else p
            for r, p in ways
            for f, q in ways
            if r <= wanted[row] <= f and (f > r or r == wanted[row])
        ]
        assert found[row] == pytest.approx(min(costs, default=np.inf), abs=1e-12)


def test_many_types_are_filled_and_proved():
    jobs, rates = tables(90, 60)
    problem = allocation_problem(jobs, rates, pool_of(pool(60, 1)))
    found = allocate(problem, "las")
    assert check(found, problem) == []
    assert (found.fill, found.certificate.termination) == ("lexicographic", "optimal")


def test_filling_ends_by_itself_and_goes_on_under_a_limit(monkeypatch):
    """2,000 jobs on 200 types had their optimum in 4 s, and were filled for minutes."""
    jobs, rates = tables(40, 12)
    problem = allocation_problem(jobs, rates, pool_of(pool(12, 4)))
    monkeypatch.setattr(policy, "MOST_WORK", 2.0 * 40 * 12)
    found = allocate(problem, "las")
    assert check(found, problem) == []
    assert (found.fill, found.certificate.termination) == (None, "optimal")
    assert "more work than is done without a time limit" in found.idle_reason
    assert allocate(problem, "las", should_stop=lambda: False).fill == "lexicographic"


@pytest.mark.parametrize("policy", ["las", "makespan", "finish_time_fairness", "max_throughput"])
@pytest.mark.parametrize("asked", [1, 4, 25])
def test_a_limit_ends_with_the_best_that_is_proved(policy, asked):
    jobs, rates = tables(40, 12)
    problem = allocation_problem(jobs, rates, pool_of(pool(12, 2)))
    left = iter(range(asked))
    found = allocate(problem, policy, should_stop=lambda: next(left, None) is None)
    best = allocate(problem, policy).certificate
    assert check(found, problem) == []
    stated = found.certificate
    assert stated.bound is not None
    low, high = sorted((stated.objective, stated.bound))
    assert low * (1 - 1e-9) <= best.objective <= high * (1 + 1e-9)


def test_a_limit_that_is_too_short_is_said(capfd):
    jobs, rates = tables(20, 4)
    with pytest.raises(TooLittleTimeError, match="time-limit|time_limit"):
        hetflow.allocate(
            jobs, rates, pool(4, 2), policy="las_water_filling", time_limit_seconds=1e-9
        )
    found = hetflow.allocate(jobs, rates, pool(4, 2), time_limit_seconds=1e-9)
    assert found.certificate.termination == "feasible"
    assert json.dumps(capfd.readouterr().err) == '""'
