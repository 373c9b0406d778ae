"""Warm LAS over classes equals a cold solve after every arrival and departure."""

import numpy as np
import pytest

from hetflow.schema.errors import ProblemError
from hetflow.solvers.allocation import make_instance, policy_named, solve
from hetflow.solvers.allocation.las import WarmMaxMin


def test_warm_answers_equal_cold_ones():
    rng = np.random.default_rng(1)
    capacity = np.array([8.0, 6.0, 4.0])
    rates = rng.uniform(1, 10, (5, 3))
    rates[1, 0] = 0.0
    scales = np.array([1.0, 2.0, 1.0, 4.0, 1.0])
    warm = WarmMaxMin(capacity)
    equal = rates @ capacity / capacity.sum()
    for rate, scale, level in zip(rates, scales, equal / scales, strict=True):
        warm.add_class(rate, float(scale), float(level))
    counts = np.zeros(5, dtype=int)
    for _ in range(40):
        changed = int(rng.integers(5))
        counts[changed] = max(0, counts[changed] + int(rng.choice([1, 1, -1])))
        warm.set_counts(np.array([changed]), counts[[changed]])
        if not counts.any():
            continue
        objective, times = warm.solve()
        kind = np.repeat(np.arange(5), counts)
        jobs = make_instance(rate=rates[kind], scale=scales[kind], capacity=capacity, columns="abc")
        assert objective == pytest.approx(solve(jobs, policy_named("las")).objective, rel=1e-7)
        assert (times.sum(axis=1) <= counts + 1e-7).all()
        assert (scales @ times <= capacity + 1e-6).all()
        present = counts > 0
        reached = (rates * times).sum(axis=1)[present] / counts[present]
        assert (reached / (equal / scales)[present]).min() == pytest.approx(objective, rel=1e-6)


def test_a_class_that_runs_nowhere_is_refused():
    with pytest.raises(ProblemError, match="runs on no device type"):
        WarmMaxMin(np.array([2.0])).add_class(np.array([1.0]), 4.0, 1.0)
