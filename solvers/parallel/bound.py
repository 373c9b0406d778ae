"""Lower bounds on the step of plans of one microbatch size and number of replicas.

The slowest stage's time T and the longest update with its all-reduce X are capped. T is of passes
alone where these hide messages. Under caps, what is left is to cover the layers by stages that take
few seconds in all and few devices of each type. A price on each type makes that a shortest path
over cuts (Lagrange); how replicas are dealt is relaxed, so that a stage of two types costs at least
the cheaper one for every replica. The best prices are those of the linear program whose columns are
the paths that were found (column generation). A region of caps is low_T < T <= high_T and
low_X <= X <= high_X. In it a step takes at least (m - 1) low_T + low_X + S(high_T, high_X), for S
the shortest path less the pool's worth.

    layers of 2 and 1 s on an A, of 4 and 2 s on a B; one of each, m = 3 microbatches, X = 0
    T <= 2: layer 1 on an A (2 s), layer 2 on an A (1 s) or a B (2 s); 3 s would take two A's
    at a price of 1 s on an A both ways cost 5; less the pool's worth, one A: S = 4
    so a step takes at least 2 low_T + 4: as low_T nears 2 that is 8, and the plan A | B takes 8

A path takes O(stages x options) vector operations over the layers. Prices take some tens of paths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from ...planning.costs.parallel_stage import gather_ratio
from ...schema.parallel import ParallelPool, ParallelProblem
from ..effort import Effort
from ..lp import LinearSession
from .gradients import Rings
from .space import OptionSpace, StageOption, fitting_with, kept_in_a_solve

_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # between two types' prices
_MOST_KNOWN = 64  # paths that a search for prices starts from
_MOST_PATHS = 24  # in one search for prices
_NEAR = 2e-4  # of the step, between the prices' bound and the linear program
_ROUGH = 0.2  # of what is missing: so exact are prices that cannot prove it
_DEAREST = 1e4  # times what is to be proved: what a share of the program that takes nothing costs
_SECONDS, _EXCHANGES = 6, 4  # intervals of T and of X in the first grid of a search
_PARTS = 4  # of T and of X, at most, into which a region is split
_MOST_TURNS = 8  # of prices of a grid
_SLACK = 1 + 1e-12  # of caps, which times may meet exactly
_MOST_LAYERS_FOR_LEVELS = 400
WORK_OF_AN_ENTRY = 0.02
"""An option and an end in a table take so much of ``Effort.tree_work`` for each stage."""

Path = tuple[tuple[int, int, int], ...]
"""Stages from the first to the last: an option's number in the space, its start, its end."""


@kept_in_a_solve(1024)
def first_by_memory(space: OptionSpace, in_flight: int) -> np.ndarray:
    """For each end the first layer from which a stage fits; behind all where none [options, e]."""
    firsts = []
    for number, _ in enumerate(space.options):
        # Fewer layers need no more memory, so all starts from the first fitting one on fit: one
        # number stands for the column. [starts, ends]
        has_room = fitting_with(space.options, space.unlike, number, in_flight)
        firsts.append(np.where(has_room.any(axis=0), has_room.argmax(axis=0), len(has_room)))
    return np.array(firsts)


@kept_in_a_solve(8)
def stage_levels(space: OptionSpace, hides_messages: bool) -> np.ndarray | None:
    """All T of stages that fit; None for very many layers."""
    if len(space.least_seconds) > _MOST_LAYERS_FOR_LEVELS:
        return None
    found = [
        stage_seconds(option, hides_messages=hides_messages)[
            fitting_with(space.options, space.unlike, number, 1)
        ]
        for number, option in enumerate(space.options)
    ]
    return np.unique(np.concatenate(found)) if found else np.zeros(0)


def price_rows(pools: tuple[ParallelPool, ...]) -> np.ndarray:
    """Prices that bound devices alone [rows, pools]: all alike, each type, ratios of each pair."""
    rows = [np.ones(len(pools)), *np.eye(len(pools))]
    for first, second in combinations(range(len(pools)), 2):
        # Any prices >= 0 give a valid test; two types can trade places at some rate, so ratios of
        # pairs refute most of what the types alone do not.
        for ratio in _RATIOS:
            row = np.zeros(len(pools))
            row[first], row[second] = 1.0, ratio
            rows.append(row)
    return np.array(rows)


@kept_in_a_solve(128)
def stage_seconds(option: StageOption, *, hides_messages: bool = False) -> np.ndarray:
    """Return what stages take at least [start, end]; infinite where the stage is empty."""
    sums, sent, back = _times(option)
    sent, back = (0.0 * sent, 0.0 * back) if hides_messages else (sent, back)
    places = np.arange(len(sums))
    # Neighbours' links are not known here: messages count as if these were as fast as the stage's
    # own, which a bound may assume.
    whole = sums[None, :] - sums[:, None] + sent[None, :] + back[:, None]
    stages: np.ndarray = np.where(places[None, :] > places[:, None], whole, inf)
    return stages


@kept_in_a_solve(8)
def _alone(space: OptionSpace, numbers: tuple[int, ...], *, hides_messages: bool) -> np.ndarray:
    """T of stages of these options [options, start, end]; one table for all numbers of replicas."""
    options = [space.options[number] for number in numbers]
    return np.array([stage_seconds(each, hides_messages=hides_messages) for each in options])


def _times(option: StageOption) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prefix sums of compute, seconds of the output [ends] and of the gradient [starts]."""
    sent = np.array(option.output_seconds)
    # The last stage sends no output on, and the first no gradient back.
    sent[-1] = 0.0
    back = np.append(np.array(option.gradient_seconds), 0.0)
    back[0] = 0.0
    return np.array(option.seconds), sent, back


@dataclass(frozen=True, slots=True, eq=False)
class CappedRegion:
    """Plans whose T and X lie between caps, with prices and the seconds that they prove.

    Attributes:
        low_seconds, high_seconds: Caps on T.
        low_exchange, high_exchange: Caps on X.
        prices: [pools] seconds of one device of a replica.
        rest_seconds: S, at these prices.
        least_seconds: No plan of the region has a shorter step.
        is_priced: Whether its prices are of ``Relaxation.priced``.
        is_near: Whether better prices would prove hardly more.
        step: Plans are looked for that are at most so much above the bound.
        tables: What a search of the region has counted for its labels, if there was one.
    """

    low_seconds: float
    high_seconds: float
    low_exchange: float
    high_exchange: float
    prices: np.ndarray
    rest_seconds: float
    least_seconds: float
    is_priced: bool = False
    is_near: bool = False
    step: float = 0.02
    tables: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class _Column:
    """A path of the linear program: its seconds, devices [pools], T and X."""

    seconds: float
    devices: np.ndarray
    slowest: float
    exchange: float


class _Columns(NamedTuple):
    """Paths of the linear program: seconds, devices [paths, pools], T and X."""

    seconds: np.ndarray
    devices: np.ndarray
    slowest: np.ndarray
    exchange: np.ndarray


@dataclass(slots=True, eq=False)
class Relaxation:
    """Stages of single options for one microbatch size and number of replicas.

    Args:
        problem: Whose plans.
        space: The options.
        num_replicas: d.
        num_microbatches: m: no stage has more in flight.
        most_stages: Stages that there may be.
        effort: Says when to stop; all methods raise OutOfTimeError then.
    """

    problem: ParallelProblem
    space: OptionSpace
    num_replicas: int
    num_microbatches: int
    most_stages: int
    effort: Effort
    work: float = 0.0
    numbers: list[int] = field(init=False)
    budget: np.ndarray = field(init=False)
    rings: Rings = field(init=False)
    pools: np.ndarray = field(init=False)
    degrees: np.ndarray = field(init=False)
    _sums: np.ndarray = field(init=False)
    after: np.ndarray = field(init=False)
    before: np.ndarray = field(init=False)
    alone: np.ndarray = field(init=False)
    _exchange: np.ndarray | None = None
    _columns: list[_Column] = field(default_factory=list)
    _found: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = [
            number
            for number, option in enumerate(self.space.options)
            if option.tensor_parallel_size <= self.problem.pools[option.pool].num_devices
        ]
        options = [self.space.options[number] for number in self.numbers]
        times = [_times(option) for option in options]
        self.budget = np.array([p.num_devices for p in self.problem.pools]) / self.num_replicas
        self.rings = Rings(self.problem, self.num_replicas, self.effort)
        self.pools = np.array([option.pool for option in options], dtype=int)
        self.degrees = np.array([float(option.tensor_parallel_size) for option in options])
        self._sums = np.array([sums for sums, _, _ in times])
        # A stage takes after[end] + before[start]: as prefix sums separate, one range minimum over
        # starts serves every end. [options, cuts]
        self.after = np.array([sums + sent for sums, sent, _ in times])
        self.before = np.array([back - sums for sums, _, back in times])
        hides = self.problem.hides_messages
        self.alone = _alone(self.space, tuple(self.numbers), hides_messages=hides)
        if self.shares_weights:
            # Waits depend on start and end together, so they count under the caps alone, never
            # along paths.
            self.alone = self.alone + [self.rings.least_waits(option) for option in options]

    @property
    def shares_weights(self) -> bool:
        """Whether passes wait for transfers of weights, over links that depend on the replicas."""
        return self.problem.shard == "all" and self.num_replicas > 1

    @property
    def size(self) -> int:
        """Layers and one: places of cuts."""
        return len(self.problem.layers) + 1

    def exchange(self) -> np.ndarray:
        """What the update and the all-reduce of a stage take at least [options, starts, ends]."""
        if self._exchange is None:
            options = [self.space.options[number] for number in self.numbers]
            kinds: dict[tuple[int, int], np.ndarray] = {}
            for option in options:
                key = option.pool, option.tensor_parallel_size
                if key not in kinds:
                    least = self.rings.least(*key)
                    # Shares may be unlike, but some replica has at least an equal one.
                    with_it = [o for o in options if o.tensor_parallel_size == key[1]]
                    own = with_it if self.space.unlike else [option]
                    kinds[key] = least + np.min([self._update(o, least) for o in own], axis=0)
            self._exchange = np.array(
                [kinds[option.pool, option.tensor_parallel_size] for option in options]
            )
        return self._exchange

    def _update(self, option: StageOption, reduce: np.ndarray) -> np.ndarray:
        """The optimizer's update of stages [starts, ends], with what replicas then exchange."""
        sums = np.array(option.updates)
        own = sums[None, :] - sums[:, None]
        if self.problem.cost_rule == "sailor":
            own = np.append(np.array(option.update_at), 0.0)[:, None]
        whole: np.ndarray = own + gather_ratio(self.problem) * reduce
        return whole

    def first_by_memory(self, num_behind: int) -> np.ndarray:
        """The first start that fits for each end [options, ends], before so many stages."""
        in_flight = min(num_behind + 1, self.num_microbatches)
        return first_by_memory(self.space, in_flight)[self.numbers]

    def first_by_cap(
        self, caps: Sequence[float], *, is_exchange: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The first start under a cap for each end [caps, options, ends], and each one's number."""
        known, places = np.unique(np.array(caps), return_inverse=True)
        # Empty stages would pass any cap.
        size, ends = self.size, np.arange(self.size)
        found = np.full((len(known), len(self.numbers), size), size)
        taken = self.exchange() if is_exchange else self.alone
        taken = np.where(ends[None, :] > ends[:, None], taken, inf)
        for number, cap in enumerate(known):
            self.effort.check()
            is_allowed = taken <= cap * _SLACK
            found[number] = np.where(is_allowed.any(axis=1), is_allowed.argmax(axis=1), size)
        return found, places

    def firsts(self, cap_seconds: float, cap_exchange: float) -> list[np.ndarray]:
        """[stages behind] the first start allowed for each end [options, ends]; ``size``: none."""
        size, ends = self.size, np.arange(self.size)
        if cap_seconds == inf and cap_exchange == inf:
            by_caps = np.where(ends > 0, 0, size)[None, :].repeat(len(self.numbers), axis=0)
        else:
            allowed = ends[None, :] > ends[:, None]
            allowed = allowed & (self.alone <= cap_seconds * _SLACK)
            if cap_exchange < inf and cap_exchange < self.exchange().max(initial=0.0):
                allowed &= self.exchange() <= cap_exchange * _SLACK
            # The first allowed start stands for all later ones: a stage that begins later is part
            # of one that begins there, and takes no more. Where costs are not quite monotonous this
            # allows too much, which a bound may.
            by_caps = np.where(allowed.any(axis=1), allowed.argmax(axis=1), size)
        found: list[np.ndarray] = []
        for placed in range(self.most_stages):
            # From m stages behind on, no more microbatches are in flight, so memory allows the
            # same.
            if placed >= self.num_microbatches:
                found.append(found[-1])
                continue
            self.effort.check()
            first = np.maximum(by_caps, self.first_by_memory(placed))
            first = np.where(first < ends, first, size)
            # The same object, not an equal one, tells ``tables`` that its windows still hold.
            same = found and np.array_equal(first, found[-1])
            found.append(found[-1] if same else first)
        return found

    def tables(
        self, prices: np.ndarray, firsts: Sequence[np.ndarray], *, is_timed: bool
    ) -> np.ndarray:
        """The least cost of layers 0 to ``end - 1`` [stages behind, rows, ends].

        ``prices`` [rows, pools] are of one device of a replica; ``is_timed``: seconds count too.
        """
        size, rows, options = self.size, len(prices), len(self.numbers)
        # [rows, options, 1] seconds that the stage's devices cost at each row's prices.
        self.work += WORK_OF_AN_ENTRY * self.most_stages * rows * options * size
        priced = (prices[:, self.pools] * self.degrees)[:, :, None]
        after = priced + (self.after if is_timed else 0.0)
        before = self.before if is_timed else 0.0
        tables = np.full((self.most_stages + 1, rows, size), inf)
        # Without layers nothing is left to place, however many stages are behind; with layers and
        # all stages used up, nothing is possible.
        tables[:, :, 0] = 0.0
        first, ends = np.zeros(0, dtype=int), np.arange(size)
        # Where each option's row begins in the flattened windows.
        own = np.arange(options)[:, None] * size
        # Here ``placed`` stages are behind; what comes before them is in the table of one more.
        for placed in range(self.most_stages - 1, -1, -1):
            self.effort.check()
            later = tables[placed + 1]
            if firsts[placed] is not first:
                first = firsts[placed]
                is_allowed = first < size
                # The largest power of two within the window of starts from ``first`` to ``end -
                # 1``: two windows of that length cover it, one from its first start and one up to
                # its last.
                level = np.frexp(np.where(is_allowed, ends - first, 1))[1] - 1
                place = level * options * size + own
                left = place + np.where(is_allowed, first, 0)
                right = place + np.where(is_allowed, ends - (1 << level), 0)
                num_levels = int(level.max(initial=0)) + 1
            elif np.array_equal(later, tables[min(placed + 2, self.most_stages)]):
                tables[placed] = later  # more stages change nothing
                continue
            if not is_timed:  # from any later start on no more layers are left
                onwards = np.minimum.accumulate(later[:, ::-1], axis=1)[:, ::-1]
                reached = np.where(is_allowed, onwards[:, first * is_allowed], inf) + after
                tables[placed, :, 1:] = reached.min(axis=1)[:, 1:]
                continue
            # The least over each window of starts is that of two windows of a power of two.
            windows = np.empty((rows, num_levels, options, size))
            windows[:, 0] = later[:, None, :] + before
            for number in range(1, num_levels):
                half = 1 << (number - 1)
                windows[:, number] = windows[:, number - 1]
                np.minimum(
                    windows[:, number - 1, :, :-half],
                    windows[:, number - 1, :, half:],
                    out=windows[:, number, :, :-half],
                )
            flat = windows.reshape(rows, -1)
            reached = np.minimum(flat[:, left], flat[:, right]) + after
            reached[:, ~is_allowed] = inf
            tables[placed, :, 1:] = reached.min(axis=1)[:, 1:]
        return tables

    def covers(self) -> bool:
        """Whether the pool might suffice for stages that fit the memory, whatever they take."""
        if not self.numbers or self.most_stages < 1:
            return False
        rows = price_rows(self.problem.pools)
        tables = self.tables(rows, self.firsts(inf, inf), is_timed=False)
        # Each row of prices is a test that every plan passes: its devices, weighed by the prices,
        # weigh no more than the pool. Failing one is proof that none fits; passing all is none.
        return bool((tables[0, :, -1] <= rows @ self.budget * (1 + 1e-12)).all())

    def cap(self, seconds: float) -> float:
        """The longest time of a stage, in seconds, that a step under ``seconds`` allows."""
        m = self.num_microbatches
        left = seconds - self.space.least_seconds[-1]
        # The slowest stage runs all m microbatches; and a step is (m - 1) T and one way through all
        # stages, which takes the whole work at least.
        return min(seconds / m, left / (m - 1)) if m > 1 else seconds

    def regions(self, low_seconds: float, below: float, limit: float) -> list[CappedRegion]:
        """All plans under ``limit`` seconds, in regions with bounds.

        A grid over both caps, the finer where plans under ``below`` seconds are. All its regions
        are priced at once by ``Grid``, whose shortest paths take some memory for granted.

        No plan's slowest stage takes less than ``low_seconds``; ``below`` is enough to prove.
        """
        exchange = self.exchange()
        longest = float(exchange[exchange < inf].max(initial=0.0))
        through = self.space.least_seconds[-1]
        least = (self.num_microbatches - 1) * low_seconds + through
        nothing = np.zeros(len(self.budget))
        top = CappedRegion(low_seconds, self.cap(limit), 0.0, longest, nothing, through, least)
        if sum(pool.num_devices for pool in self.problem.pools) <= _MANY_DEVICES:
            top = replace(top, step=_WIDE)  # bounds do not know of round trips, which take a share
        return [] if least >= limit else self._grid(top, (_SECONDS, _EXCHANGES), below)

    def _grid(
        self, region: CappedRegion, parts: tuple[int, int], below: float
    ) -> list[CappedRegion]:
        """The region in so many intervals of T and of X."""
        # Under ``room`` of X a plan may still be faster than ``below``; beyond it one interval is
        # enough.
        low, high, passes = region.low_seconds, region.high_seconds, self.num_microbatches - 1
        free, room = region.low_exchange, below - region.least_seconds + region.low_exchange
        found = []
        for one in pairwise(_marks(low, self.cap(below), high, parts[0])):
            low, high = self._snapped(*one)
            marks = _marks(free, room, region.high_exchange, parts[1])
            for free_of_one, full in pairwise(marks) if low <= high * _SLACK else ():
                part = replace(
                    region,
                    low_seconds=low,
                    high_seconds=high,
                    low_exchange=free_of_one,
                    high_exchange=full,
                )
                found.append(_bounded(part, passes * low + free_of_one))
        return _Grid(self, found).priced(below) if found else []

    def _snapped(self, low: float, high: float) -> tuple[float, float]:
        """The least and the greatest time of a stage within these caps; they cross where none."""
        # T is the time of a stage that exists: caps moved to such times lose no plan, and the
        # bound counts ``low``.
        levels = stage_levels(self.space, self.problem.hides_messages)
        if levels is None or self.shares_weights:
            return low, high
        first = int(np.searchsorted(levels, low / _SLACK))
        last = int(np.searchsorted(levels, high * _SLACK, side="right")) - 1
        if first >= len(levels) or last < 0:
            return inf, -inf
        return max(low, float(levels[first])), float(levels[last])

    def priced(self, region: CappedRegion, below: float, rough: float = _ROUGH) -> CappedRegion:
        """The region with the best prices found; enough to prove ``below`` seconds end the search.

        Starts from the region's own prices. ``below`` may be any aim; ``rough`` is what may be
        missing of what is missing in any case.
        """
        firsts = self.firsts(region.high_seconds, region.high_exchange)
        fixed = (self.num_microbatches - 1) * region.low_seconds + region.low_exchange
        # ``target``: what S has to reach for a proof. Prices that nearly reach it are not refined.
        target, near = below - fixed, _NEAR * below
        program = _Paths(self.budget, _DEAREST * max(target, near))
        known = [
            column
            for column in self._columns[-_MOST_KNOWN:]
            if column.slowest <= region.high_seconds and column.exchange <= region.high_exchange
        ]
        if known:
            program.add(
                np.array([column.seconds for column in known]),
                np.array([column.devices for column in known]),
            )
        best, prices, limit = -inf, region.prices, inf
        trial, is_near = prices, False
        for number in range(_MOST_PATHS):
            if number or program.num_paths:
                limit, trial = program.best()
                # The program's own prices jump between far corners while it knows few paths.
                # Halfway to the best prices so far they settle in a few turns; any prices give a
                # valid bound.
                trial = trial if best == -inf else 0.5 * (trial + prices)
            # Far from what is to be proved, the region is split anyway.
            # ``limit`` is what no prices can exceed, as far as paths are known; ``best`` is what
            # some prove.
            if limit - best <= max(near, rough * (target - limit)):
                is_near = limit - best <= near
                break
            tables = self.tables(trial[None], firsts, is_timed=True)[:, 0]
            least = float(tables[0, -1])
            if least == inf:
                best, prices, is_near = inf, trial, True
                break
            if least - float(trial @ self.budget) > best:
                best, prices = least - float(trial @ self.budget), trial
            # Enough is proved: better prices would refute nothing more.
            if best >= target:
                break
            column = self._column(trial, tables, firsts)
            self._columns.append(column)
            program.add(np.array([column.seconds]), column.devices[None])
        return _bounded(
            replace(region, prices=prices, rest_seconds=best, is_priced=True, is_near=is_near),
            fixed,
        )

    def _column(
        self, prices: np.ndarray, tables: np.ndarray, firsts: Sequence[np.ndarray]
    ) -> _Column:
        """The shortest path of ``tables``."""
        priced = prices[self.pools] * self.degrees
        # ``tables`` keeps no predecessors: of millions of entries one path is read, so its arcs
        # are found again, O(options x cuts) a stage.
        end, placed, path = self.size - 1, 0, []
        slowest = seconds = 0.0
        devices = np.zeros(len(self.budget))
        while end:
            costs = self.after[:, end, None] + priced[:, None] + self.before[:, :end]
            costs = costs + tables[placed + 1, :end]
            costs[np.arange(end)[None, :] < firsts[placed][:, end, None]] = inf
            option, start = divmod(int(costs.argmin()), end)
            slowest = max(slowest, float(self.alone[option, start, end]))
            seconds += float(self.after[option, end] + self.before[option, start])
            devices[self.pools[option]] += self.degrees[option]
            path.append((option, start, end))
            end, placed = start, placed + 1
        exchange = max(float(self.exchange()[stage]) for stage in path)
        named = tuple((self.numbers[o], start, end) for o, start, end in reversed(path))
        self.keep(named, devices)
        return _Column(seconds, devices, slowest, exchange)

    def paths(self) -> list[Path]:
        """The paths found since the last call that need no more devices than there are."""
        found, self._found = self._found, []
        return found

    def keep(self, path: Path, devices: np.ndarray) -> None:
        """Give a path with ``paths``, if the pool has its devices."""
        if (devices <= self.budget * _SLACK).all():
            self._found.append(path)

    def split(self, region: CappedRegion, below: float) -> list[CappedRegion]:
        """The region as two, each with a bound of its own; none where it is narrow already.

        Only plans under ``below`` seconds count.
        """
        if not region.is_priced:
            return [self.priced(region, below)]
        # By how much the bound may be too low for either cap: plans at the upper end of T take that
        # much longer than the bound, which counts T at its lower end.
        by_seconds = (self.num_microbatches - 1) * (region.high_seconds - region.low_seconds)
        by_exchange = min(
            region.high_exchange - region.low_exchange, max(below - region.least_seconds, 0.0)
        )
        is_small = self.size * self.most_stages <= _FEW
        # Splitting costs a search for prices each time; with few layers, building the plans is
        # cheaper.
        narrow = _NARROW_FOR_FEW if is_small else max(_NARROW, _CUTS / self.size**2)
        parts = [min(_PARTS, ceil(width / (narrow * below))) for width in (by_seconds, by_exchange)]
        if max(parts) <= 1:
            if region.is_near:
                return []
            return [replace(self.priced(region, below, rough=0.0), is_near=True)]
        wide = replace(region, is_priced=False, is_near=False)
        return self._grid(wide, (max(parts[0], 1), max(parts[1], 1)), below)


_NARROW, _CUTS = 0.002, 20.0
"""A region is not split where its caps differ by so little of the step, or by the second over the
square of the layers: the fewer stages there are to choose from, the sooner plans are built."""
_WIDE, _MANY_DEVICES = 0.05, 2048
"""``CappedRegion.step``, where there are not too many devices to try all plans so far above."""
_FEW, _NARROW_FOR_FEW = 100, 0.2  # layers times stages: plans are soon built then


def _bounded(region: CappedRegion, fixed: float) -> CappedRegion:
    rest = max(region.rest_seconds, region.low_seconds)
    return replace(region, least_seconds=max(region.least_seconds, fixed + rest))


def _marks(low: float, near: float, high: float, number: int) -> list[float]:
    """Ends of intervals from ``low`` to ``high``: so many up to ``near``, and one for the rest."""
    # Each is as much longer than the one before as that one, where ``low`` is not 0.
    near, marks = min(near, high), [low]
    if near > low:
        shares = [(i + 1) / number for i in range(number - 1)]
        marks += [low * (near / low) ** share if low > 0 else near * share for share in shares]
        marks.append(near)
    return [*marks, high] if high > marks[-1] or len(marks) < 2 else marks


class _Grid:
    """Shortest paths of many regions at once.

    A stage that ends at a layer has at least as many stages behind it as the layers behind it
    need; with so many it has to fit. So one table over ends is enough for each region, where
    ``Relaxation.tables`` has one for each number of stages behind.
    """

    def __init__(self, relaxation: Relaxation, regions: list[CappedRegion]) -> None:
        self._relaxation, size = relaxation, relaxation.size
        by_seconds, each_seconds = relaxation.first_by_cap(
            [region.high_seconds for region in regions], is_exchange=False
        )
        by_exchange, each_exchange = relaxation.first_by_cap(
            [region.high_exchange for region in regions], is_exchange=True
        )
        most = relaxation.most_stages
        number = len(regions)
        behind = np.full((number, size), most)  # at least, behind each end
        behind[:, -1] = 0
        self._firsts = np.full((size, number, len(relaxation.numbers)), size)
        # From the last layer back, as what is behind a stage decides how much memory it has: the
        # fewest stages behind are certain, and the least memory in flight goes with them.
        for end in range(size - 1, 0, -1):
            relaxation.effort.check()
            placed = behind[:, end]
            first = np.maximum(by_seconds[each_seconds, :, end], by_exchange[each_exchange, :, end])
            known, each = np.unique(placed, return_inverse=True)
            by_memory = np.array([relaxation.first_by_memory(int(n))[:, end] for n in known])
            first = np.maximum(first, by_memory[each])
            first[(placed >= most)[:, None] | (first >= end)] = size
            self._firsts[end] = first
            # Every start from the least first one on can be reached, with one stage more behind
            # it.
            reached = np.arange(end) >= first.min(axis=1)[:, None]
            fewer = np.where(reached, placed[:, None] + 1, most)
            behind[:, :end] = np.minimum(behind[:, :end], fewer)
        # No stage begins at layer 0: no plan lies under these caps.
        is_covered = (self._firsts[:, :, :] == 0).any(axis=(0, 2))
        self._firsts = self._firsts[:, is_covered]
        self._regions = [r for r, covered in zip(regions, is_covered, strict=True) if covered]

    def priced(self, below: float) -> list[CappedRegion]:
        """The regions with the best prices found; a proof of ``below`` seconds ends it."""
        relaxation, passes = self._relaxation, self._relaxation.num_microbatches - 1
        number, budget = len(self._regions), relaxation.budget
        fixed = [passes * r.low_seconds + r.low_exchange for r in self._regions]
        best = np.array([region.rest_seconds for region in self._regions])
        prices = np.array([region.prices for region in self._regions])
        trials = prices.copy()
        # The first turn asks at the regions' own prices, the second at prohibitive ones: then a
        # program knows a cheap path and a frugal one, and has prices between.
        target = [below - each for each in fixed]
        near = _NEAR * below
        programs: dict[int, _Paths] = {}
        known: list[_Columns] = []
        left = [r for r in range(number) if self._regions[r].least_seconds < below]
        for turn in range(_MOST_TURNS):
            if not left:
                break
            left = [r for r in left if best[r] < target[r]]
            if turn == 1:  # prices that refuse what takes more devices than there are in all
                trials[left] = _DEAREST * max(max(target), near) / budget.max()
            elif turn:
                for r in list(left):
                    new = known[-1:]
                    if r not in programs:
                        programs[r], new = _Paths(budget, _DEAREST * max(target[r], near)), known
                    for columns in new:
                        # Paths found for one region serve each other whose caps they keep.
                        programs[r].add_within(columns, self._regions[r])
                    limit, trial = programs[r].best()
                    trials[r] = 0.5 * (trial + prices[r])
                    if limit - best[r] <= max(near, _ROUGH * (target[r] - limit)):
                        left.remove(r)
            if not left:
                break
            rows = np.array(left)
            costs, columns = self._paths(rows, trials[rows])
            # Weak duality: at any prices, the shortest path less the pool's worth bounds S from
            # below.
            worth = costs - trials[rows] @ budget
            for row, r in enumerate(left):
                if worth[row] > best[r]:
                    best[r], prices[r] = worth[row], trials[r]
            is_path = np.isfinite(costs)
            known.append(_distinct(columns, is_path))
        return [
            _bounded(replace(region, prices=prices[r], rest_seconds=float(best[r])), fixed[r])
            for r, region in enumerate(self._regions)
            if best[r] < inf
        ]

    def _paths(self, rows: np.ndarray, prices: np.ndarray) -> "tuple[np.ndarray, _Columns]":
        """The least costs of all layers [rows], and the paths."""
        relaxation, size = self._relaxation, self._relaxation.size
        options = len(relaxation.numbers)
        firsts = self._firsts[:, rows]
        priced = prices[:, relaxation.pools] * relaxation.degrees
        least = np.full((len(rows), size), inf)
        least[:, 0] = 0.0
        starts = np.zeros((len(rows), size), dtype=int)
        chosen = np.zeros((len(rows), size), dtype=int)
        relaxation.work += WORK_OF_AN_ENTRY * len(rows) * options * size
        for end in range(1, size):
            relaxation.effort.check()
            first = firsts[end]
            low = int(first.min(initial=size))
            if low >= end:
                continue
            # [rows, options, starts from ``low``]
            costs = least[:, None, low:end] + relaxation.before[:, low:end]
            costs += (priced + relaxation.after[:, end])[:, :, None]
            costs[np.arange(low, end) < first[:, :, None]] = inf
            flat = costs.reshape(len(rows), -1)
            place = flat.argmin(axis=1)
            least[:, end] = flat[np.arange(len(rows)), place]
            chosen[:, end], starts[:, end] = np.divmod(place, end - low)
            starts[:, end] += low
        # All paths are read back together; a row at end 0 is over.
        ends, each = np.full(len(rows), size - 1), np.arange(len(rows))
        ends[np.isinf(least[:, -1])] = 0
        seconds, slowest, exchange = np.zeros((3, len(rows)))
        devices = np.zeros((len(rows), len(relaxation.budget)))
        table = relaxation.exchange()
        paths: list[list[tuple[int, int, int]]] = [[] for _ in rows]
        while ends.any():
            on = ends > 0
            for row in np.flatnonzero(on):
                option, start = int(chosen[row, ends[row]]), int(starts[row, ends[row]])
                paths[row].append((relaxation.numbers[option], start, int(ends[row])))
            option, start = chosen[each, ends], starts[each, ends]
            own = np.where(on, relaxation.after[option, ends] + relaxation.before[option, start], 0)
            seconds += own
            slowest = np.maximum(slowest, np.where(on, relaxation.alone[option, start, ends], 0.0))
            exchange = np.maximum(exchange, np.where(on, table[option, start, ends], 0.0))
            # Each row stands once in ``each``: an indexed += would add only one of two entries for
            # the same place.
            devices[each, relaxation.pools[option]] += np.where(on, relaxation.degrees[option], 0.0)
            ends = np.where(on, start, 0)
        for path, taken in zip(paths, devices, strict=True):
            if path:
                relaxation.keep(tuple(reversed(path)), taken)
        return least[:, -1], _Columns(seconds, devices, slowest, exchange)


def _distinct(columns: _Columns, chosen: np.ndarray) -> _Columns:
    """The paths that were chosen, alike ones once: many regions find the same."""
    rows = np.column_stack([columns.devices, columns.seconds, columns.slowest, columns.exchange])
    rows = np.unique(rows[chosen], axis=0)
    return _Columns(rows[:, -3], rows[:, :-3], rows[:, -2], rows[:, -1])


class _Paths:
    """The linear program of paths: shares of them that take no more devices than there are.

    ``budget`` [pools] devices of one replica; no prices prove more than ``dearest`` seconds.
    """

    def __init__(self, budget: np.ndarray, dearest: float) -> None:
        self._program = LinearSession(generates_columns=True)
        self._rows = len(budget)
        # For each pool, sum of share x (devices - budget) <= 0; and shares sum to 1. [pools + 1]
        # rows
        low = np.append(np.full(len(budget), -inf), 1.0)
        self._program.add_rows(low, np.append(np.zeros(len(budget)), 1.0))
        self._budget, self.num_paths = budget, 0
        # This share takes no devices at any cost, so the program is feasible before it knows a
        # path.
        self.add(np.array([dearest]), np.zeros((1, len(budget))))
        self.num_paths = 0

    def add(self, seconds: np.ndarray, devices: np.ndarray) -> None:
        """Add paths: their seconds [paths] and devices [paths, pools]."""
        number, height = len(seconds), self._rows + 1
        entries = np.concatenate([devices - self._budget, np.ones((number, 1))], axis=1)
        rows = np.tile(np.arange(height), number)
        starts = height * np.arange(number)
        # The session maximises.
        self._program.add_columns(-seconds, starts, rows, entries.ravel())
        self.num_paths += number

    def add_within(self, columns: _Columns, region: CappedRegion) -> None:
        """Add the paths that lie in a region."""
        usable = (columns.slowest <= region.high_seconds * _SLACK) & (
            columns.exchange <= region.high_exchange * _SLACK
        )
        if usable.any():
            self.add(columns.seconds[usable], columns.devices[usable])

    def best(self) -> tuple[float, np.ndarray]:
        """The least seconds of shares of these paths, and the prices [pools] that prove it."""
        answer = self._program.solve()
        assert answer is not None  # the share that takes nothing is always possible
        return -answer.objective, np.abs(answer.prices[: self._rows])
