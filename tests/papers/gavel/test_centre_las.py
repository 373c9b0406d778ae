"""The centre of LAS's optimal face: optimal, central."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.papers.gavel.centre_las import Face, centre, optimal_face
from hetflow.solvers.allocation.engine import solve_alone
from hetflow.solvers.allocation.las import WarmMaxMin
from hetflow.solvers.allocation.program import FractionProgram
from hetflow.tests.profiles import examples


@st.composite
def _problems(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    types, classes = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    capacity = rng.choice([8.0, 20.0, 36.0], types)
    scales = rng.choice([1.0, 1.0, 2.0, 4.0, 8.0], classes)
    rate = 10.0 ** rng.uniform(-1, 1, (classes, types)) * (rng.random((classes, types)) < 0.9)
    rate[:, 0] += (rate == 0).all(axis=1)
    counts = rng.integers(1, draw(st.sampled_from([2, 5, 40])), classes).astype(float)
    weights = rng.uniform(0.5, 2.0, classes)  # ties leave prices a choice
    return counts, scales, rate, weights * (rate @ capacity) / scales, capacity


def logarithms(x, at, problem, z):
    """The sum of logarithms of the slacks that are positive at ``at``, of ``x``."""
    counts, scales, rate, levels, capacity = problem

    def slacks(y):
        beyond = ((rate * y).sum(axis=1) - levels * z) / rate.max(axis=1)
        return y, 1.0 - y.sum(axis=1), beyond, 1.0 - (counts * scales) @ y / capacity

    weights = (np.repeat(counts[:, None], len(capacity), axis=1), counts, counts, np.ones(1))
    value = 0.0
    for here, there, weight in zip(slacks(x), slacks(at), weights, strict=True):
        kept = there > 1e-7
        value += (
            np.log(np.maximum(here[kept], 1e-300)) * np.broadcast_to(weight, here.shape)[kept]
        ).sum()
    return value


@settings(max_examples=examples(120))
@given(problem=_problems())
def test_the_centre_is_optimal_and_central(problem: tuple[np.ndarray, ...]) -> None:
    counts, scales, rate, levels, capacity = problem
    warm = WarmMaxMin(capacity)
    for row, scale, level in zip(rate, scales, levels, strict=True):
        warm.add_class(row, float(scale), float(level))
    present = np.arange(len(counts))
    warm.set_counts(present, counts.astype(np.int64))
    best, _ = warm.solve(with_prices=True)
    face = optimal_face(warm, present, counts)
    found = centre(face, np.full_like(face.rate, 0.1))
    assert found is not None
    x = found.T
    assert (x >= 0).all()
    assert (x[rate == 0] == 0).all()
    assert (x.sum(axis=1) <= 1 + 1e-8).all()
    assert ((counts * scales) @ x <= capacity * (1 + 1e-8)).all()
    z = ((rate * x).sum(axis=1) / levels).min()
    program = FractionProgram(
        count=counts, rate=rate, usage=np.repeat(scales[:, None], len(capacity), 1),
        gain=np.zeros(rate.shape), resources=np.eye(len(capacity)), capacity=capacity,
        level=levels, floor=np.zeros(len(counts)), demands=np.ones(len(counts), dtype=bool),
        level_weight=1.0, level_capacity=np.zeros_like(capacity),
    )  # fmt: skip
    other = solve_alone(program)
    assert z == pytest.approx(best, rel=1e-7)
    assert z >= other.z * (1 - 1e-7)
    value = logarithms(x, x, problem, z)
    for part in (1e-3, 0.1, 0.9):
        assert logarithms(x + part * (other.x - x), x, problem, z) <= value + 1e-5


def test_two_jobs_on_two_equal_types_by_hand() -> None:
    """The slower job has all its time on its one type; the other has x on both: by symmetry and
    1/x = s/(C - s x) + 1/(1 - 2x) - r/(2 r x - p z) on each, the pool being large."""
    face = Face(
        count=np.ones(2), scale=np.ones(2), level=np.array([1.0, 0.5]),
        rate=np.array([[1.0, 1.0], [0.0, 1.0]]), capacity=np.array([1e9, 1e9]),
        busy=np.array([True, False]), bound=np.array([True, False]), full=np.zeros(2, dtype=bool),
        asks=np.array([False, True]), z=1.0, fixed=True,
    )  # fmt: skip
    found = centre(face, np.full((2, 2), 0.3))
    assert found is not None
    assert found[0, 0] == pytest.approx(1.0)
    x = found[0, 1]
    assert found[1, 1] == pytest.approx(x)
    assert 1 / x == pytest.approx(1 / (1 - 2 * x) - 1 / (2 * x - 0.5), rel=1e-6)
