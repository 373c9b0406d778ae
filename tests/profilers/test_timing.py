"""Repeats: the distribution-free interval and the rule that stops."""

import itertools
import random
import statistics
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.profilers.timing import RepeatPolicy, RepeatTiming, repeat
from hetflow.runtime.measurements import median_interval

SAMPLES = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("number", "ranks"),
    # Order statistics of the classic sign-test table (95 %): n -> k-th from either end.
    [(5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (20, (6, 15)), (25, (8, 18))],
)
def test_the_interval_is_the_sign_tests(number: int, ranks: tuple[int, int] | None) -> None:
    samples = [float(value) for value in range(1, number + 1)]
    random.Random(0).shuffle(samples)
    assert median_interval(samples) == ranks


@given(st.integers(6, 400))
def test_the_ranks_are_those_of_the_binomial_law(number: int) -> None:
    interval = median_interval([float(value) for value in range(1, number + 1)])
    assert interval is not None
    rank, all_ways = int(interval[0]), 2**number
    assert interval[1] == number + 1 - rank
    outside = 2 * sum(comb(number, below) for below in range(rank))
    assert 20 * outside <= all_ways < 20 * (outside + 2 * comb(number, rank))


def test_many_steps_have_an_interval_too() -> None:
    interval = median_interval([float(value) for value in range(20_000)])
    assert interval is not None
    assert interval[1] - interval[0] == pytest.approx(1.96 * 20_000**0.5, rel=0.01)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    trials = 2000
    hits = 0
    for _ in range(trials):
        interval = median_interval([draw.lognormvariate(0, 1) for _ in range(15)])
        assert interval is not None
        hits += interval[0] <= 1.0 <= interval[1]  # a log-normal's median is 1
    assert hits / trials > 0.95


@given(SAMPLES)
def test_the_median_lies_in_its_interval(samples: list[float]) -> None:
    timing = RepeatTiming.of(samples)
    assert timing.low_seconds <= timing.median_seconds <= timing.high_seconds
    assert timing.median_seconds == statistics.median(samples)
    assert timing.repeats == len(samples)
    assert timing.spread >= 0


def samples_taken(values: itertools.cycle, policy: RepeatPolicy, step: float = 0.0) -> int:
    now = itertools.count(0.0, step)
    return len(repeat(lambda: next(values), policy, lambda: next(now)))


def test_steady_times_need_few_repeats_and_noisy_ones_more() -> None:
    policy = RepeatPolicy(max_repeats=100, tolerance=0.05)
    steady = samples_taken(itertools.cycle([1.0]), policy)
    noisy = samples_taken(itertools.cycle([1.0, 1.1, 0.9, 1.02, 1.0, 0.99, 1.01, 1.2]), policy)
    assert steady == 6  # the fewest that can give 95 %
    assert steady < noisy < 100


def test_hopeless_noise_ends_at_the_most_repeats() -> None:
    policy = RepeatPolicy(max_repeats=30, tolerance=0.01)
    assert samples_taken(itertools.cycle([1.0, 2.0]), policy) == 30


def test_the_budget_ends_it_but_not_before_the_fewest_repeats() -> None:
    policy = RepeatPolicy(min_repeats=3, tolerance=0.0, budget_seconds=5.0)
    assert samples_taken(itertools.cycle([1.0, 2.0]), policy, step=100.0) == 3
    assert 3 < samples_taken(itertools.cycle([1.0, 2.0]), policy, step=1.0) < 10
