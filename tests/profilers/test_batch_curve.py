"""Which sizes are measured and what ends a curve, with a made-up device."""

import itertools
from collections.abc import Callable

import pytest

from hetflow.profilers.batch_curve import (
    Curve,
    CurveLimits,
    SizeResult,
    growing_sizes,
    measure_curve,
    parse_sizes,
)
from hetflow.profilers.timing import RepeatTiming
from hetflow.schema.errors import ProblemError, TargetError


def device(
    seconds: Callable[[int], float], memory: int = 1 << 30
) -> Callable[[int], SizeResult | None]:
    def measure(size: int) -> SizeResult | None:
        if size > memory:
            return None
        return SizeResult(
            batch_size=size,
            timing=RepeatTiming.of([seconds(size)] * 6),
            wall_seconds=seconds(size),
            peak_memory_bytes=size,
        )

    return measure


def curve_of(
    measure: Callable[[int], SizeResult | None], limits: CurveLimits, tick: float = 0.0
) -> Curve:
    now = itertools.count(0.0, tick)
    return measure_curve(measure, limits, lambda: next(now))


def sizes_of(curve: Curve) -> list[int]:
    return [result.batch_size for result in curve.results]


def test_sizes_are_powers_of_two_and_their_midpoints() -> None:
    first = list(itertools.islice(growing_sizes(), 15))
    assert first == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]
    assert {48, 192, 768} < set(growing_sizes())  # the paper's own examples (5.1.1)
    assert next(growing_sizes(5)) == 6


def test_a_curve_grows_until_memory_ends_and_records_where() -> None:
    curve = curve_of(device(lambda size: 0.001 * size, memory=40), CurveLimits())
    assert sizes_of(curve)[-1] == 32
    assert curve.out_of_memory_batch_size == 48
    assert curve.stopped == "out of memory"


def test_a_model_that_does_not_fit_at_all_is_one_clear_error() -> None:
    with pytest.raises(TargetError, match="does not fit the device's memory at batch size 1"):
        curve_of(device(lambda size: 1.0, memory=0), CurveLimits())


def test_a_curve_ends_when_throughput_has_long_been_flat() -> None:
    limits = CurveLimits(pass_limit_seconds=1e9, budget_seconds=1e9)
    curve = curve_of(device(lambda size: 0.05 + 0.05 * size), limits)
    rates = [result.batch_size / result.timing.median_seconds for result in curve.results]
    assert curve.stopped == "throughput no longer grows"
    assert max(rates) < 1.05 * rates[-7]


def test_one_lucky_measurement_does_not_prolong_a_flat_curve() -> None:
    limits = CurveLimits(pass_limit_seconds=1e9, budget_seconds=1e9)
    steady = curve_of(device(lambda size: 0.05 + 0.05 * size), limits)
    lucky = sizes_of(steady)[-1]
    curve = curve_of(
        device(lambda size: (0.05 + 0.05 * size) * (0.9 if size == lucky else 1.0)), limits
    )
    assert sizes_of(curve) == sizes_of(steady)


def test_a_gpus_curve_is_not_ended_by_flatness() -> None:
    limits = CurveLimits(stop_when_flat=False, pass_limit_seconds=1e9, budget_seconds=1e9)
    curve = curve_of(device(lambda size: 0.2 * size, memory=1000), limits)
    assert curve.out_of_memory_batch_size == 1024


def test_tiny_passes_are_not_called_flat() -> None:
    limits = CurveLimits(largest=64)
    curve = curve_of(device(lambda size: 1e-6 * size), limits)
    assert sizes_of(curve)[-1] == 64
    assert curve.stopped == "all sizes asked for were measured"


def test_a_pass_that_would_take_too_long_is_not_started() -> None:
    curve = curve_of(device(lambda size: 1.0 * size), CurveLimits(pass_limit_seconds=3.5))
    assert sizes_of(curve) == [1, 2, 3]
    assert curve.stopped == "a pass would exceed the time limit"


def test_the_budget_ends_a_curve() -> None:
    curve = curve_of(device(lambda size: 0.01), CurveLimits(budget_seconds=50.0), tick=10.0)
    assert curve.stopped == "the time budget is spent"
    assert len(curve.results) == 4


def test_sizes_asked_for_are_all_measured_whatever_they_take() -> None:
    limits = parse_sizes("100,7", CurveLimits(pass_limit_seconds=0.1, budget_seconds=0.1))
    curve = curve_of(device(lambda size: 5.0 * size), limits, tick=10.0)
    assert sizes_of(curve) == [7, 100]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", (8,)),
        ("32, 8,16", (8, 16, 32)),
        ("8-32", (8, 12, 16, 24, 32)),
        ("5-10", (5, 6, 8, 10)),
        ("7-7", (7,)),
    ],
)
def test_lists_and_ranges(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text, CurveLimits()).sizes == sizes


def test_an_open_range_grows_from_its_start() -> None:
    limits = parse_sizes("6-", CurveLimits())
    assert limits.sizes is None
    assert sizes_of(curve_of(device(lambda size: 1e-9, memory=20), limits)) == [6, 8, 12, 16]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "'0' is not a whole number from 1"),
        ("-4", "'-4' is not"),
        ("8,,9", "'' is not"),
        ("8,x", "'x' is not"),
        ("1.5", "'1.5' is not"),
        ("99999999", "is not a whole number from 1"),
        ("8,8", "appears twice"),
        ("9-3", "the range is empty; write 3-9"),
    ],
)
def test_bad_sizes_are_one_line(text: str, said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        parse_sizes(text, CurveLimits())


def test_a_largest_size_below_all_others_is_refused() -> None:
    with pytest.raises(ProblemError, match="no batch size to measure is <= 4"):
        curve_of(device(lambda size: 1.0), CurveLimits(sizes=(8,), largest=4))
