"""Flat LAS: the level of the interior point method, and no better centre of the optimal face."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.solvers.allocation.engine import solve_alone
from hetflow.solvers.allocation.las import centre
from hetflow.solvers.allocation.program import FractionProgram
from hetflow.tests.profiles import examples


@st.composite
def _problems(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    types, classes = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    capacity = rng.choice([4.0, 8.0, 20.0, 36.0], types)
    capacity[0] = max(capacity[0], 8.0)
    scales = rng.choice([1.0, 1.0, 2.0, 4.0, 8.0], classes)
    runs = (rng.random((classes, types)) < 0.8) & (scales[:, None] <= capacity)
    runs[:, 0] = True
    counts = rng.integers(1, draw(st.sampled_from([3, 10, 60])), classes).astype(float)
    weights = rng.choice([1.0, 1.0, 2.0, 0.5], classes)
    return counts, scales, runs, weights / scales, capacity


def logarithms(x, at, problem, z):
    """The sum of logarithms of the slacks that are positive at ``at``, of ``x``."""
    counts, scales, _, levels, capacity = problem

    def slacks(y):
        total = y.sum(axis=1)
        return y, 1.0 - total, total - levels * z, capacity - (counts * scales) @ y

    weights = (np.repeat(counts[:, None], len(capacity), axis=1), counts, counts, np.ones(1))
    value = 0.0
    for here, there, weight in zip(slacks(x), slacks(at), weights, strict=True):
        kept = there > 1e-6
        value += (
            np.log(np.maximum(here[kept], 1e-300)) * np.broadcast_to(weight, here.shape)[kept]
        ).sum()
    return value


@settings(max_examples=examples(150))
@given(problem=_problems(), seed=st.integers(0, 1000))
def test_the_centre_is_optimal_and_central(problem: tuple[np.ndarray, ...], seed: int) -> None:
    counts, scales, runs, levels, capacity = problem
    found = centre(
        counts.tolist(), scales.tolist(), runs.tolist(), levels.tolist(), capacity.tolist()
    )
    assert found is not None
    x = np.array(found)
    assert (x >= 0).all()
    assert (x[~runs] == 0).all()
    assert (x.sum(axis=1) <= 1 + 1e-9).all()
    assert ((counts * scales) @ x <= capacity * (1 + 1e-9)).all()
    program = FractionProgram(
        count=counts, rate=runs.astype(float), usage=np.repeat(scales[:, None], len(capacity), 1),
        gain=np.zeros(runs.shape), resources=np.eye(len(capacity)), capacity=capacity,
        level=levels, floor=np.zeros(len(counts)), demands=np.ones(len(counts), dtype=bool),
        level_weight=1.0, level_capacity=np.zeros(len(capacity)),
    )  # fmt: skip
    other = solve_alone(program)
    z = (x.sum(axis=1) / levels).min()
    assert z >= other.z * (1 - 1e-8)
    best = logarithms(x, x, problem, z)
    for part in (1e-3, 0.1, 0.9):
        assert logarithms(x + part * (other.x - x), x, problem, z) <= best + 1e-6


def test_equal_classes_are_one_class_of_all_their_jobs() -> None:
    runs, capacity = [[True, True, False], [True, True, True]], [4.0, 3.0, 9.0]
    merged = centre([3.0, 2.0], [2.0, 1.0], runs, [0.5, 1.0], capacity)
    apart = centre(
        [1.0] * 5, [2.0] * 3 + [1.0] * 2, [runs[0]] * 3 + [runs[1]] * 2, [0.5] * 3 + [1.0] * 2,
        capacity,
    )  # fmt: skip
    assert merged is not None
    assert apart is not None
    np.testing.assert_allclose(apart, [merged[0]] * 3 + [merged[1]] * 2, atol=1e-9)


def test_a_free_pool_is_shared_in_the_middle() -> None:
    """One job that must run all the time, one that may run from half to all: 1/x = s l + 1/(1-t)
    - 1/(t - 1/2) on either of two equal types, so t solves 2/t = 1/(1-t) - 1/(t-1/2) + small."""
    found = centre([1.0, 1.0], [1.0, 2.0], [[True, True]] * 2, [1.0, 0.5], [1e6, 1e6])
    assert found is not None
    t = sum(found[1])
    assert abs(2.0 / t - 1.0 / (1.0 - t) + 1.0 / (t - 0.5)) < 1e-4
    assert abs(sum(found[0]) - 1.0) < 1e-9


def test_a_start_on_the_edge_of_the_face_is_left() -> None:
    """The last centre had every class at its least time; one device's worth of jobs has gone."""
    counts, scales = [21.0, 3.0, 7.0, 1.0, 3.0], [1.0, 2.0, 4.0, 8.0, 8.0]
    runs = [(True, True, True)] * 3 + [(True, True, False), (True, True, True)]
    levels, capacity = [1.0 / scale for scale in scales], [12.0, 12.0, 12.0]
    most, some, few = 0.3285714285714289, 0.1642857142857145, 0.08214285714285721
    start = [
        [most, most, 0.34285714285714214],
        [some, some, 0.17142857142857112],
        [few, 0.08214285714285723, 0.08571428571428552],
        [0.062499999999999986, 0.062499999999999986, 0.0],
        [0.04107142857142862, 0.04107142857142862, 0.04285714285714277],
    ]
    found = centre(counts, scales, runs, levels, capacity, start)
    fresh = centre(counts, scales, runs, levels, capacity)
    assert found is not None
    assert fresh is not None
    assert np.array(found) == pytest.approx(np.array(fresh), abs=1e-9)
    assert sum(found[0]) == pytest.approx(1.0)
