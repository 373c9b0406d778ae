"""The interior point method compiled and in numpy: the same digits, whatever comes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.solvers.allocation import interior
from hetflow.solvers.allocation.engine import ACCEPTED_GAP
from hetflow.solvers.allocation.interior import Walk, solve
from hetflow.solvers.allocation.program import FractionProgram, Solution
from hetflow.tests.profiles import examples

compiled = pytest.importorskip(
    "hetflow.solvers.allocation.interior_compiled", reason="numba is not installed"
)

pytestmark = pytest.mark.slow  # compiling takes 20 CPU s


def _program(seed: int, jobs: int, types: int, *, holes: float, idle: float) -> FractionProgram:
    draw = np.random.default_rng(seed)
    rate = draw.uniform(0.1, 10.0, size=(jobs, types)) * (draw.random((jobs, types)) >= holes)
    rate[:, 0] = np.maximum(rate[:, 0], 0.1)
    scale = draw.choice([1.0, 2.0, 4.0], size=jobs)
    level = draw.uniform(1.0, 1e6, size=jobs) * (draw.random(jobs) >= idle)
    level[0] = 1.0
    return FractionProgram(
        count=np.ones(jobs),
        rate=rate,
        usage=np.repeat(scale[:, None], types, axis=1),
        gain=np.zeros((jobs, types)),
        resources=np.eye(types),
        capacity=draw.integers(4, 40, size=types).astype(float),
        level=level,
        floor=np.zeros(jobs),
        demands=level > 0,
        level_weight=1.0,
        level_capacity=np.zeros(types),
    )


def _solved(program: FractionProgram, walk: Walk) -> Solution | None:
    found = solve(program, walk=walk)
    return found if found is not None and found.gap < ACCEPTED_GAP else None


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**20),
    jobs=st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 300, 700])),
    types=st.integers(1, 9),
    holes=st.sampled_from([0.0, 0.3]),
    idle=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_same_digits(seed: int, jobs: int, types: int, holes: float, idle: float) -> None:
    program = _program(seed, jobs, types, holes=holes, idle=idle)
    fast, plain = _solved(program, compiled.walk), _solved(program, interior.walk)
    if plain is None or fast is None:
        assert fast is plain
        return
    assert np.array_equal(fast.x, plain.x)
    assert np.array_equal(fast.job_prices, plain.job_prices)
    assert (fast.z, fast.bound, fast.gap) == (plain.z, plain.bound, plain.gap)
    assert fast.method == plain.method  # which counts the steps


def test_most_steps_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the simulator's kind seldom go back to numpy."""
    slow = list[int]()
    monkeypatch.setattr(
        interior, "_advance",
        lambda p, at, advance=interior._advance: (slow.append(1), advance(p, at))[1],
    )  # fmt: skip
    steps = 0
    for seed in range(20):
        found = solve(_program(seed, 60, 3, holes=0.2, idle=0.0), walk=compiled.walk)
        steps += int(found.method.split()[-2])
    assert len(slow) < 0.2 * steps


def test_sums_are_added_as_numpy_adds() -> None:
    draw = np.random.default_rng(0)
    for number in [*range(1, 300), 1000, 4097]:
        values = draw.normal(size=number) * 10.0 ** draw.integers(-5, 5, size=number)
        assert compiled.summed(values, number) == np.add.reduce(values)


def test_small_equations_without_an_answer_are_told() -> None:
    assert not interior.eliminate([[1.0, 2.0], [2.0, 4.0]], [1.0, 1.0])
    right = [5.0, 6.0]
    assert interior.eliminate([[0.0, 2.0], [3.0, 4.0]], right)
    assert right == pytest.approx([-4 / 3, 2.5])
