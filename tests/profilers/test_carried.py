"""Busy costs between the sizes that were rehearsed: a ratio that is checked."""

from collections.abc import Callable, Sequence

import pytest

from hetflow.profilers.loop_costs import (
    Carried,
    LoopCosts,
    LoopPoint,
    a_few,
    every_second,
    measured_and_carried,
)
from hetflow.profilers.timing import RepeatTiming

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def costs(seconds: dict[int, float], spread: float = 0.0, fits: int | None = None) -> LoopCosts:
    """What rehearsals of some sizes give; those from ``fits`` on do not fit."""
    points = tuple(
        LoopPoint(
            batch_size=size,
            timing=RepeatTiming(
                median_seconds=whole,
                low_seconds=whole * (1 - spread),
                high_seconds=whole * (1 + spread),
                spread=spread,
                repeats=10,
            ),
            load_seconds=size / 10,
        )
        for size, whole in seconds.items()
        if fits is None or size < fits
    )
    missing = [size for size in seconds if fits is not None and size >= fits]
    return LoopCosts(
        points=points,
        virtual_node_seconds=0.0,
        fixed_seconds=0.001,
        update=points[0].timing,
        checks=(),
        num_rounds=2,
        tolerance=0.02,
        out_of_memory_batch_size=min(missing, default=None),
    )


class Host:
    """Passes beside others take ``ratio`` times as long as alone."""

    def __init__(
        self, ratio: Callable[[int], float], spread: float = 0.0, fits: int | None = None
    ) -> None:
        self.ratio, self.spread, self.fits = ratio, spread, fits
        self.asked: list[tuple[int, ...]] = []

    def rehearse(self, sizes: Sequence[int]) -> LoopCosts:
        self.asked.append(tuple(sizes))
        busy = {size: 0.001 * size * self.ratio(size) for size in sizes}
        return costs(busy, self.spread, self.fits)

    def measured(self) -> Carried:
        alone = costs({size: 0.001 * size for size in SIZES}, self.spread)
        own = {point.batch_size: point.timing for point in alone.points}
        return measured_and_carried(own, a_few(dict.fromkeys(SIZES, 0.01)), self.rehearse)


def test_a_few_sizes_over_the_whole_range_are_rehearsed() -> None:
    assert a_few(dict.fromkeys(SIZES, 0.01)) == (1, 3, 6, 16, 32, 64)
    assert a_few(dict.fromkeys(SIZES[:6], 9.0)) == SIZES[:6]
    grown = {size: 0.03 * size for size in SIZES}  # from 24 on longer than half a second
    assert a_few(grown) == (1, 2, 4, 6, 12, 16)
    assert a_few(dict.fromkeys(SIZES, 9.0)) == (1,)


def test_of_sizes_with_long_passes_every_second_is_rehearsed() -> None:
    assert every_second(dict.fromkeys(SIZES, 0.02)) == SIZES
    grown = {size: 0.002 * size for size in SIZES}  # from 16 on 30 ms and more
    assert every_second(grown) == (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
    assert every_second({8: 1.0, 16: 2.0}) == (8, 16)


def test_sizes_between_take_the_ratio_of_their_neighbours() -> None:
    host = Host(lambda size: 1.2 if size < 64 else 1.25)
    found = host.measured()
    assert host.asked == [(1, 3, 6, 16, 32, 64)]
    assert found.sizes == (2, 4, 8, 12, 24, 48)
    steps = {point.batch_size: point.step_seconds for point in found.costs.points}
    assert list(steps) == list(SIZES)
    assert steps[12] == pytest.approx(0.012 * 1.2)
    assert 0.048 * 1.2 < steps[48] < 0.048 * 1.25
    assert [p.load_seconds for p in found.costs.points] == pytest.approx([s / 10 for s in SIZES])


def test_a_size_to_either_side_of_an_uneven_ratio_is_measured() -> None:
    host = Host(lambda size: 1.6 if size in (12, 16, 24) else 1.1)
    found = host.measured()
    assert host.asked[0] == (1, 3, 6, 16, 32, 64)
    assert set(host.asked[1]) >= {12, 24}
    steps = {point.batch_size: point.step_seconds for point in found.costs.points}
    assert steps[12] == pytest.approx(0.012 * 1.6)
    assert steps[24] == pytest.approx(0.024 * 1.6)
    assert found.costs.num_rounds == 4


def test_what_noise_explains_is_not_measured_again() -> None:
    host = Host(lambda size: 1.3 if size == 16 else 1.1, spread=0.05)
    found = host.measured()
    assert len(host.asked) == 1
    assert found.error is not None
    assert found.error > 0
    carried = next(point for point in found.costs.points if point.batch_size == 12)
    assert carried.error is not None
    assert carried.error > 0.05  # wider than what it was carried from


def test_sizes_that_do_not_fit_beside_others_are_left_out() -> None:
    host = Host(lambda size: 1.1, fits=48)
    found = host.measured()
    assert host.asked[1] == (32, 48)
    assert found.costs.out_of_memory_batch_size == 48
    assert [point.batch_size for point in found.costs.points] == [s for s in SIZES if s < 48]


def test_the_error_is_of_the_sizes_around_the_carried_ones() -> None:
    """Passes of a few milliseconds by themselves tell nothing: their ratios jump."""
    own = {size: costs({size: 0.001 * size}).points[0].timing for size in (1, 2, 3, 4, 8, 12, 16)}
    host = Host(lambda size: {2: 2.0, 3: 0.5}.get(size, 1.0))
    found = measured_and_carried(own, (1, 2, 3, 4, 8, 16), host.rehearse)
    assert host.asked == [(1, 2, 3, 4, 8, 16)]
    assert found.sizes == (12,)
    assert found.error == pytest.approx(0.0)
