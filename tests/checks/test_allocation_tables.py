"""The judge's tables over all jobs equal the definitions, computed one job at a time."""

from math import inf

import numpy as np
import pytest

from hetflow.planning.checks.allocation import idle_devices, least_cost, usable_devices
from hetflow.planning.checks.allocation_policies import Pool
from hetflow.schema.jobs import (
    Allocation,
    AllocationProblem,
    Certificate,
    Job,
    Jobs,
    ModelThroughput,
    PairShare,
    PairThroughput,
    Throughputs,
)

TYPES = ("V100", "P100", "K80")


def drawn(seed):
    """A pool of unlike jobs, and time fractions (with a pair) that leave devices idle."""
    rng = np.random.default_rng(seed)
    jobs = tuple(
        Job(id=f"j{i}", model="abc"[i % 3], steps=100.0, scale_factor=(1, 1, 2)[i % 3])
        for i in range(6)
    )
    models = tuple(
        ModelThroughput(
            model=model,
            scale_factor=scale,
            steps_per_second={t: float(rng.integers(0, 5)) for t in TYPES} | {"V100": 2.0},
        )
        for model, scale in (("a", 1), ("b", 1), ("c", 2))
    )
    rates = {"V100": (1.0, 1.5)}
    problem = AllocationProblem(
        jobs=Jobs(jobs=jobs),
        throughputs=Throughputs(
            models=models, pairs=(PairThroughput(models=("a", "b"), steps_per_second=rates),)
        ),
        num_devices={"V100": 3, "P100": 2, "K80": 4},
        space_sharing=True,
    )
    x = {job.id: {t: float(rng.uniform(0.0, 0.3)) for t in TYPES} for job in jobs}
    certificate = Certificate(
        termination="feasible", sense="max", objective=1.0, bound=None, gap=None, method="drawn"
    )
    found = Allocation(
        policy="las", x=x, throughputs={}, certificate=certificate,
        pairs=(PairShare(jobs=("j0", "j1"), shares={"V100": 0.1}),),
    )  # fmt: skip
    return found, Pool(problem)


def usable_by_definition(allocation, pool, idle):
    answer = {}
    for device in pool.problem.num_devices:
        wanted = 0.0
        for name in pool.jobs:
            most = 0.0
            for column in pool.columns:
                held = pool.holds(name, column)
                moved = movable_by_definition(allocation, pool, name, column)
                if device in held and moved > 1e-5:
                    room = min(idle[r] / number for r, number in held.items())
                    most = max(most, held[device] * min(moved, room))
            wanted += most
        answer[device] = min(idle[device], wanted)
    return answer


def movable_by_definition(allocation, pool, name, column):
    rate = pool.rate(name, column)
    if rate <= 1e-6 * max(pool.rate(name, c) for c in pool.columns):
        return 0.0
    own = allocation.x[name]
    slower = sum(time for c, time in own.items() if pool.rate(name, c) < rate)
    spent = sum(own.values())
    for pair in allocation.pairs:
        if name in pair.jobs:
            other = pair.jobs[1 - pair.jobs.index(name)]
            for c, time in pair.shares.items():
                spent += time
                mine, beside = pool.pair_rates((name, other), c)
                if mine < rate and pool.rate(other, c) >= beside:
                    slower += time
    return slower + max(0.0, 1.0 - spent)


@pytest.mark.parametrize("seed", range(8))
def test_usable_idle_devices_follow_the_definition(seed):
    allocation, pool = drawn(seed)
    for seen in (pool, pool.flat()):
        idle = idle_devices(allocation, seen)
        assert usable_devices(allocation, seen, idle) == pytest.approx(
            usable_by_definition(allocation, seen, idle), rel=1e-12
        )


def least_by_definition(rates, rents, throughput):
    points = [(0.0, 0.0), *zip(rates, rents, strict=True)]
    least = inf
    for slow, low in points:
        for fast, high in points:
            if slow <= throughput <= fast:
                part = (throughput - slow) / (fast - slow) if fast > slow else 0.0
                least = min(least, low + part * (high - low))
    return least


def test_least_costs_follow_the_definition():
    rng = np.random.default_rng(0)
    rates = rng.integers(0, 5, (200, 4)).astype(float)
    rents = rng.integers(0, 4, (200, 4)).astype(float)
    throughput = np.where(rng.random(200) < 0.3, rates.max(axis=1), rng.uniform(0, 5, 200))
    expected = [least_by_definition(*row) for row in zip(rates, rents, throughput, strict=True)]
    assert least_cost(rates, rents, throughput) == pytest.approx(expected, rel=1e-12)
    assert np.isinf(expected).any()
    assert np.isfinite(expected).any()
