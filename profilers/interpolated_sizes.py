"""Rehearse some sizes, and carry the others between them by a ratio that is checked.

Two ratios change little from one batch size to the next. One is a pass's time in the loop that
trains over its time by itself, the other its time beside a host's busy devices over its time alone.
So each is measured at some sizes over the whole range, and a size between takes its own cheap time
(of a few passes by themselves; of the loop alone) times the ratio between its neighbours. Each
measured size is also predicted from those around it as if it had not been measured: where that is
further off than noise explains, a size to either side is measured too. What it is off by widens the
carried intervals.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .loop_costs import LoopCosts, LoopPoint
from .timing import RepeatTiming

_MOST_BUSY = 6
_SHORT_SECONDS = 0.03  # a pass
_LONG_SECONDS = 0.5  # a pass: a busy host's ratio is carried to larger sizes from the largest below
# Of a ratio. Without it the sizes around are twice as far apart, which makes a smooth curve's error
# four times as large: carried sizes are then off by a quarter of this.
_OFF = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Costs at all sizes.

    Attributes:
        costs: Measured and carried points.
        sizes: Those that were carried.
        error: How far measured ratios were from what their neighbours gave, relative, the median;
            None where that could not be told.
    """

    costs: LoopCosts
    sizes: tuple[int, ...] = ()
    error: float | None = None


def every_second(pass_seconds: Mapping[int, float]) -> tuple[int, ...]:
    """All sizes whose passes are short; of the others the first, every second and the last.

    Short passes cost little, and a few of them by themselves tell no time to go by.
    """
    sizes = sorted(pass_seconds)
    dear = [size for size in sizes if pass_seconds[size] >= _SHORT_SECONDS]
    left_out = set(dear[1:-1:2])
    return tuple(size for size in sizes if size not in left_out)


def a_few(pass_seconds: Mapping[int, float]) -> tuple[int, ...]:
    """A few sizes over the whole range: the smallest, the largest that is not long, and between.

    Sizes grow by factors, so that even steps through their list are even in what they change.
    """
    sizes = sorted(pass_seconds)
    if len(sizes) <= _MOST_BUSY:
        return tuple(sizes)
    short = [size for size in sizes if pass_seconds[size] < _LONG_SECONDS] or sizes[:1]
    last, steps = len(short) - 1, _MOST_BUSY - 1
    places = {round(number * last / steps) for number in range(_MOST_BUSY)}
    return tuple(short[place] for place in sorted(places))


def measured_and_carried(
    own: Mapping[int, RepeatTiming],
    chosen: Sequence[int],
    rehearse: Callable[[Sequence[int]], LoopCosts],
) -> Carried:
    """Rehearse the chosen sizes, more where their ratio is uneven, and carry the rest.

    Args:
        own: [sizes] what each takes by itself.
        chosen: The sizes to rehearse first, ascending.
        rehearse: Measures some sizes.

    Raises:
        Whatever ``rehearse`` does.
    """
    costs = rehearse(chosen)
    sizes = sorted(own)
    more = _around(_off(_ratios(own, costs), own, costs), _sizes(costs), sizes)
    more += _doubtful(costs, sizes)
    if more:
        costs = _joined(costs, rehearse(sorted({*more})))
    limit = costs.out_of_memory_batch_size
    ratios = _ratios(own, costs)
    known = {point.batch_size: point for point in costs.points}
    error = _error(ratios, [size for size in sizes if size not in known])
    loads = {size: point.load_seconds / size for size, point in known.items()}
    points = tuple(
        known.get(size)
        or LoopPoint(
            batch_size=size,
            timing=_times(own[size], _between(ratios, size), error or 0.0),
            load_seconds=size * _between(loads, size),
        )
        for size in sizes
        if limit is None or size < limit
    )
    carried = tuple(point.batch_size for point in points if point.batch_size not in known)
    return Carried(costs=replace(costs, points=points), sizes=carried, error=error)


def _sizes(costs: LoopCosts) -> list[int]:
    return [point.batch_size for point in costs.points]


def _joined(costs: LoopCosts, more: LoopCosts) -> LoopCosts:
    """Both's points, below what either had no memory for; all else of the first."""
    limits = [c.out_of_memory_batch_size for c in (costs, more)]
    limit = min((size for size in limits if size is not None), default=None)
    points = {p.batch_size: p for p in (*costs.points, *more.points)}
    return replace(
        costs,
        points=tuple(points[size] for size in sorted(points) if limit is None or size < limit),
        num_rounds=costs.num_rounds + more.num_rounds,
        out_of_memory_batch_size=limit,
    )


def _ratios(own: Mapping[int, RepeatTiming], costs: LoopCosts) -> dict[int, float]:
    """[sizes] the rehearsed pass over its own time."""
    return {p.batch_size: p.step_seconds / own[p.batch_size].median_seconds for p in costs.points}


def _between(values: Mapping[int, float], size: int) -> float:
    """Linear over the logarithm of the size between its neighbours; the nearest outside."""
    low = max((known for known in values if known <= size), default=min(values))
    high = min((known for known in values if known >= size), default=max(values))
    if low == high:
        return values[low]
    share = math.log(size / low) / math.log(high / low)
    return values[low] + share * (values[high] - values[low])


def _left_out(ratios: Mapping[int, float]) -> dict[int, float]:
    """[sizes but the first and last] how far each ratio is from what the others give, relative."""
    inner = sorted(ratios)[1:-1]
    return {
        size: abs(_between({s: r for s, r in ratios.items() if s != size}, size) / ratios[size] - 1)
        for size in inner
    }


def _error(ratios: Mapping[int, float], carried: Sequence[int]) -> float | None:
    """The median of how far those ratios are off between whose neighbours sizes are carried."""
    order = sorted(ratios)
    near = [size for size in order[1:-1] if _around([size], order, carried)]
    found = _left_out(ratios)
    return statistics.median(found[size] for size in near) if near else None


def _off(
    ratios: Mapping[int, float], own: Mapping[int, RepeatTiming], costs: LoopCosts
) -> list[int]:
    """Sizes whose ratio their neighbours do not give, by more than noise explains."""
    spread = {
        point.batch_size: (point.error or 0.0) + (own[point.batch_size].error or 0.0)
        for point in costs.points
    }
    order = sorted(ratios)
    return [
        size
        for size, off in _left_out(ratios).items()
        if off > max(_OFF, sum(spread[s] for s in _with_neighbours(order, size)))
    ]


def _with_neighbours(order: Sequence[int], size: int) -> Sequence[int]:
    place = order.index(size)
    return order[place - 1 : place + 2]


def _around(off: Sequence[int], measured: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The middle of the sizes that were not measured to either side of those that are off."""
    found = []
    for size in off:
        below, _, above = _with_neighbours(measured, size)
        for low, high in ((below, size), (size, above)):
            between = [other for other in sizes if low < other < high and other not in measured]
            found += between[len(between) // 2 :][:1]
    return found


def _doubtful(costs: LoopCosts, sizes: Sequence[int]) -> list[int]:
    """Sizes that nobody has tried, between the largest that fitted and the first that did not.

    The former is among them, so that one of them fits.
    """
    limit, last = costs.out_of_memory_batch_size, costs.points[-1].batch_size
    between = [size for size in sizes if limit is not None and last < size < limit]
    return [last, *between] if between else []


def _times(timing: RepeatTiming, ratio: float, error: float) -> RepeatTiming:
    return replace(
        timing,
        median_seconds=timing.median_seconds * ratio,
        low_seconds=timing.low_seconds * ratio * (1 - min(error, 1.0)),
        high_seconds=timing.high_seconds * ratio * (1 + error),
    )
