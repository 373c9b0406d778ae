"""What a step costs, part by part, from rehearsals of all sizes in turns.

Sizes take turns over several rounds, in another order each time, so that a drift of the machine
affects all of them. A rehearsal's first step is dropped. The first pass of a step runs with cold
caches: the time that it takes longer counts for the step (``fixed_seconds``). The later passes give
the cost of one more virtual node (``step_seconds``). Rounds go on until the median's interval of
each size is narrow, or the budget ends.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from ..runtime.measurements import FEWEST_FOR_AN_INTERVAL, StepTimes
from ..schema.errors import TargetError
from ..schema.options import told
from .batch_curve import TOO_LARGE
from .timing import RepeatTiming

_NUM_NODES, _NUM_LONG_NODES = 3, 2
_LONG_SECONDS = 0.3  # a pass; caches are then no matter, and a step of three is dear
_REHEARSAL_SECONDS = 0.08
_MOST_STEPS = 25
_EMPTY_NODES, _EMPTY_STEPS = 6, 8
_CHECKED_NODES = (1, 6)
_HALVINGS = 40
_CHECK_SHARE = 0.2  # of the budget, at most, for one check


class Rehearse(Protocol):
    """Trains steps in the runtime's loop."""

    def __call__(
        self, sizes: Sequence[int], *, num_steps: int, is_empty: bool = False
    ) -> Sequence[Sequence[StepTimes]]:
        """Train with virtual nodes of these sizes; every step of each worker.

        Raises:
            MemoryError: They do not fit.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPolicy:
    """When to stop.

    Attributes:
        tolerance: Half the width of the median's 95 % interval, relative to the median.
        most_passes: Of one size: its part of the budget in passes.
        most_seconds: Of one size: its part of the budget, at most.
        least_seconds: Of one size: its part of the budget, at least.
        most_samples: Of one size: passes to time at most; None for no limit.
        least_total_seconds: Of all sizes together: a few get more than their parts.
        most_total_seconds: Of all sizes together, where nobody has stated them; None for no limit.
        carries: Whether some sizes may be carried between those that are rehearsed (``carried``).
    """

    tolerance: float = 0.02
    most_passes: int = 60
    most_seconds: float = 4.0
    least_seconds: float = 0.2
    most_samples: int | None = None
    least_total_seconds: float = 0.0
    most_total_seconds: float | None = 4.0
    carries: bool = True

    @classmethod
    def quick(cls) -> "LoopPolicy":
        """Within a minute for a handful of sizes."""
        return cls(
            tolerance=0.05,
            most_passes=30,
            most_seconds=1.0,
            least_seconds=0.2,
            most_total_seconds=None,
        )

    @classmethod
    def thorough(cls) -> "LoopPolicy":
        """Precision for a quiet machine: as narrow as it allows."""
        return cls(
            tolerance=0.01,
            most_passes=600,
            most_seconds=40.0,
            least_seconds=2.0,
            most_total_seconds=None,
            carries=False,
        )

    def parts(self, pass_seconds: Sequence[float], visit_seconds: Sequence[float]) -> list[float]:
        """[sizes] seconds of the budget, for sizes whose passes and visits take so long.

        Every size has room for a visit. Where all together would take too long, the parts of those
        that have most are cut to one length. Where they take less than the least, all are longer.
        """
        parts = self._own_parts(pass_seconds, visit_seconds)
        longer = max(1.0, self.least_total_seconds / max(sum(parts), 1e-9))
        return [part * longer for part in parts]

    def _own_parts(
        self, pass_seconds: Sequence[float], visit_seconds: Sequence[float]
    ) -> list[float]:
        least = [max(self.least_seconds, visit) for visit in visit_seconds]
        wanted = [self.most_passes * seconds for seconds in pass_seconds]

        def cut(most: float) -> list[float]:
            return [max(low, min(most, want)) for low, want in zip(least, wanted, strict=True)]

        limit = self.most_total_seconds
        if limit is None or sum(cut(self.most_seconds)) <= limit:
            return cut(self.most_seconds)
        # The sum rises with the length that parts are cut to. It may stay above the limit at 0:
        # every size keeps its least.
        low, high = 0.0, self.most_seconds
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(cut(middle)) <= limit else (low, middle)
        return cut(low)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPoint:
    """One size."""

    batch_size: int
    timing: RepeatTiming
    load_seconds: float

    @property
    def error(self) -> float | None:
        """Half the relative width of the interval; None below two samples."""
        return self.timing.error

    @property
    def step_seconds(self) -> float:
        """What one more virtual node costs."""
        return self.timing.median_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """A whole step of ``num_nodes`` virtual nodes: measured, and put together from its parts."""

    batch_size: int
    num_nodes: int
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCosts:
    """What rehearsals gave. ``out_of_memory_batch_size`` is the first size that did not fit."""

    points: tuple[LoopPoint, ...]
    virtual_node_seconds: float
    fixed_seconds: float
    update: RepeatTiming
    checks: tuple[CheckedStep, ...]
    num_rounds: int
    tolerance: float
    out_of_memory_batch_size: int | None = None

    @property
    def step_error(self) -> float | None:
        """Root mean square of the checked steps' errors; None where none was affordable."""
        if not self.checks:
            return None
        return math.sqrt(statistics.fmean(check.error**2 for check in self.checks))

    def pass_seconds(self, batch_size: int) -> float | None:
        """A pass without loading and the runtime's part; None for a size that was not rehearsed."""
        for point in self.points:
            if point.batch_size == batch_size:
                of_runtime = point.load_seconds + self.virtual_node_seconds
                return max(0.0, point.step_seconds - of_runtime)
        return None

    @property
    def wide(self) -> tuple[int, ...]:
        """The sizes whose interval is not as narrow as was asked for, or of too few passes."""
        return tuple(
            point.batch_size
            for point in self.points
            if point.timing.repeats < FEWEST_FOR_AN_INTERVAL
            or point.error is None
            or point.error > self.tolerance
        )


@dataclass(slots=True)
class _Size:
    batch_size: int
    pass_seconds: float
    is_of_script: bool
    nodes: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    seconds_left: float = 0.0  # of its part of the budget

    @property
    def is_long(self) -> bool:
        return self.pass_seconds >= _LONG_SECONDS

    @property
    def num_nodes(self) -> int:
        if self.is_of_script:
            return 1
        return _NUM_LONG_NODES if self.is_long else _NUM_NODES

    @property
    def num_steps(self) -> int:
        """Of one rehearsal, the first one included."""
        wanted = _REHEARSAL_SECONDS / (self.num_nodes * max(self.pass_seconds, 1e-6))
        return 1 + max(1 if self.is_long else 2, min(_MOST_STEPS, round(wanted)))

    @property
    def rehearsal_seconds(self) -> float:
        return self.num_steps * self.num_nodes * self.pass_seconds

    def is_done(self, policy: LoopPolicy) -> bool:
        if policy.most_samples is not None and len(self.nodes) >= policy.most_samples:
            return True
        if len(self.nodes) < FEWEST_FOR_AN_INTERVAL:
            return False
        error = RepeatTiming.of(self.nodes).error
        return error is not None and error <= policy.tolerance


class RehearsalRounds:
    """Rehearse all sizes in turns.

    Args:
        rehearse: Trains.
        pass_seconds: About how long a pass of each size takes.
        policy: When to stop.
        clock: Wall seconds.
        progress: Told what is rehearsed, and how many seconds there are left at most.
        is_of_script: Whether a script's own loop is rehearsed: its steps have one pass, which with
            its loading is all that a step costs beside its update.
    """

    def __init__(
        self,
        rehearse: Rehearse,
        pass_seconds: dict[int, float],
        policy: LoopPolicy,
        clock: Callable[[], float],
        progress: Callable[[str, float], None] = lambda text, left: None,
        *,
        is_of_script: bool = False,
    ) -> None:
        self._is_of_script = is_of_script
        self._rehearse, self._policy, self._clock = rehearse, policy, clock
        self._progress = progress
        self._sizes = [
            _Size(size, pass_seconds[size], is_of_script) for size in sorted(pass_seconds)
        ]
        parts = policy.parts(
            [size.pass_seconds for size in self._sizes],
            [size.rehearsal_seconds for size in self._sizes],
        )
        for size, part in zip(self._sizes, parts, strict=True):
            size.seconds_left = part
        self._budget_seconds = sum(parts)
        self._fixed: list[float] = []
        self._updates: list[float] = []
        self._empty: list[float] = []
        self._checked: dict[tuple[int, int], list[float]] = {}
        self._out_of_memory: int | None = None
        self._num_rounds = 0

    def run(self) -> LoopCosts:
        """Go round until every size is narrow or the budget is spent; once at least.

        Raises:
            TargetError: Not even the first size fits, trained as a launch trains it.
        """
        end = self._clock() + self._budget_seconds
        while True:
            wanted = [s for s in self._sizes if not s.is_done(self._policy)]
            if self._num_rounds and (not wanted or self._clock() >= end):
                break
            # What sizes that are done have left of their parts is for the others.
            wanted = [s for s in wanted if s.seconds_left >= s.rehearsal_seconds] or wanted
            shift = self._num_rounds % max(len(wanted), 1)
            for size in wanted[shift:] + wanted[:shift]:
                late = self._clock() + size.rehearsal_seconds > end
                if size in self._sizes and not (self._num_rounds and late):
                    self._progress(f"batch size {size.batch_size}", max(0.0, end - self._clock()))
                    self._visit(size)
            if not self._is_of_script:
                self._visit_empty()
                self._check(self._num_rounds)
            self._num_rounds += 1
        for number in range(self._num_rounds, 0 if self._is_of_script else len(_CHECKED_NODES)):
            self._check(number)
        return self._summary()

    def _visit(self, size: _Size) -> None:
        nodes, began = [size.batch_size] * size.num_nodes, self._clock()
        try:
            workers = self._rehearse(nodes, num_steps=size.num_steps)
        except MemoryError:
            self._drop_from(size.batch_size)
            return
        size.seconds_left -= self._clock() - began
        for steps in workers:
            for number, step in enumerate(steps):
                if self._is_of_script:
                    if number:
                        size.nodes.append(step.computed)
                        size.loads.append(step.passes[0][0])
                        self._updates.append(step.update_seconds)
                    continue
                later = [after[1] - before[1] for before, after in pairwise(step.passes)]
                if number or size.is_long:
                    size.nodes += later
                    size.loads += step.gap_seconds
                if number:
                    of_nodes = len(step.passes) * statistics.fmean(later)
                    self._fixed.append(step.ended - step.update_seconds - of_nodes)
                    self._updates.append(step.update_seconds)

    def _drop_from(self, batch_size: int) -> None:
        self._sizes = [size for size in self._sizes if size.batch_size < batch_size]
        self._out_of_memory = batch_size
        if not self._sizes:
            raise TargetError(
                f"the model does not fit the device's memory at batch size {batch_size}, trained "
                f"as a launch trains it",
                hint=told(TOO_LARGE),
            )

    def _visit_empty(self) -> None:
        nodes = [self._sizes[0].batch_size] * _EMPTY_NODES
        for steps in self._rehearse(nodes, num_steps=_EMPTY_STEPS, is_empty=True):
            for step in steps[1:]:
                self._empty += step.pass_seconds[1:]

    def _check(self, number_of_check: int) -> None:
        """Measure a whole step of another number of virtual nodes than the rounds have."""
        combinations = [(s, n) for s in self._spread() for n in _CHECKED_NODES]
        size, number = combinations[number_of_check % len(combinations)]
        steps = 3 if number * size.pass_seconds < _REHEARSAL_SECONDS else 2
        if steps * number * size.pass_seconds > _CHECK_SHARE * self._budget_seconds:
            size = self._sizes[0]
        if steps * number * size.pass_seconds > _CHECK_SHARE * self._budget_seconds:
            return
        workers = self._rehearse([size.batch_size] * number, num_steps=steps)
        kept = self._checked.setdefault((size.batch_size, number), [])
        for found in workers:
            kept += [step.ended for step in found[1:]]

    def _spread(self) -> list[_Size]:
        """Up to three sizes over the whole range, none of them long."""
        short = [size for size in self._sizes if not size.is_long] or self._sizes[:1]
        return [short[index] for index in sorted({len(short) // 2, 0, len(short) - 1})]

    def _summary(self) -> LoopCosts:
        points = tuple(
            LoopPoint(
                batch_size=size.batch_size,
                timing=RepeatTiming.of(size.nodes),
                load_seconds=statistics.median(size.loads),
            )
            for size in self._sizes
        )
        fixed = max(0.0, statistics.median(self._fixed)) if self._fixed else 0.0
        update = RepeatTiming.of(self._updates)
        step_seconds = {point.batch_size: point.step_seconds for point in points}
        return LoopCosts(
            points=points,
            virtual_node_seconds=statistics.median(self._empty) if self._empty else 0.0,
            fixed_seconds=fixed,
            update=update,
            checks=tuple(
                CheckedStep(
                    batch_size=size,
                    num_nodes=number,
                    measured_seconds=statistics.median(measured),
                    predicted_seconds=number * step_seconds[size] + fixed + update.median_seconds,
                )
                for (size, number), measured in self._checked.items()
                if size in step_seconds
            ),
            num_rounds=self._num_rounds,
            tolerance=self._policy.tolerance,
            out_of_memory_batch_size=self._out_of_memory,
        )


# Rehearse some sizes, and carry the others between them by a ratio that is checked.
#
# Two ratios change little from one batch size to the next. One is a pass's time in the loop that
# trains over its time by itself, the other its time beside a host's busy devices over its time
# alone. So each is measured at some sizes over the whole range, and a size between takes its own
# cheap time (of a few passes by themselves; of the loop alone) times the ratio between its
# neighbours. Each measured size is also predicted from those around it as if it had not been
# measured: where that is further off than noise explains, a size to either side is measured too.
# What it is off by widens the carried intervals.


_MOST_BUSY = 6
_SHORT_SECONDS = 0.03  # a pass
# Of a pass: the ratio of a busy host is carried to larger sizes from the largest below.
_SLOW_STEP_SECONDS = 0.5
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
    short = [size for size in sizes if pass_seconds[size] < _SLOW_STEP_SECONDS] or sizes[:1]
    last, steps = len(short) - 1, _MOST_BUSY - 1
    places = {round(number * last / steps) for number in range(_MOST_BUSY)}
    return tuple(short[place] for place in sorted(places))


def measured_and_carried(
    own: Mapping[int, RepeatTiming],
    chosen: Sequence[int],
    rehearse: Callable[[Sequence[int]], LoopCosts],
) -> Carried:
    """Rehearse the chosen sizes, more where their ratio is uneven, and carry the rest."""
    costs = rehearse(chosen)
    sizes = sorted(own)
    rehearsed = [point.batch_size for point in costs.points]
    more = _around(_off(_ratios(own, costs), own, costs), rehearsed, sizes)
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
    """Sizes that nobody has tried, from the largest that fitted to the first that did not."""
    limit, last = costs.out_of_memory_batch_size, costs.points[-1].batch_size
    between = [size for size in sizes if limit is not None and last < size < limit]
    return [last, *between] if between else []  # with ``last``, so that one of them fits


def _times(timing: RepeatTiming, ratio: float, error: float) -> RepeatTiming:
    return replace(
        timing,
        median_seconds=timing.median_seconds * ratio,
        low_seconds=timing.low_seconds * ratio * (1 - min(error, 1.0)),
        high_seconds=timing.high_seconds * ratio * (1 + error),
    )
