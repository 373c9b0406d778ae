"""Feasible levels, and the rows that a shared bottleneck stops, with prices that prove both.

Without space sharing prices of resources are enough: each row pays the least cost of its
throughput, and can rise as far as columns without a price carry it. With it rows live on each
other's time, so the prices of throughput and time count too.

At binding prices a row spends its time only where its throughput costs least. Where that is one
column, or two that its time and throughput determine, nothing is left to decide; only rows for
which several ways cost the same (about one for each price) go through the simplex method. The
answer is exact to the last digits, where an interior point method is not.

    the V100 and K80 of water.py, at level 1/2: with a price of 1 on the V100 a and b pay 1/2 each
    that is all its worth, so neither can rise; c pays nothing, as the K80 does as much for nothing
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from ....schema.errors import BackendError
from ...effort import never
from ..engine import NO_PAIRS, MergedProgram, solve_alone
from ..program import Bools, Floats, FractionProgram, Ints, Solution, resource_use, solve_by_simplex
from ..space_sharing.column_generation import PairProgram, PairTimes, spare_prices

# Least and marginal costs of a row's throughput at given prices of resources.
#
# At prices a column costs rent; time may be split over columns, so the least cost of a
# throughput d is the lower convex hull of the points (rate, rent) and the origin. A row can rise
# for nothing where the hull is flat to the right of d.

# Rates closer than this (relative) are one rate.
SAME = 1e-11
# A column below a line by a smaller part of what it costs is on it.
COST_ROUNDING = 4e-16


def rents(program: FractionProgram, prices: Floats) -> Floats:
    """The price of all of a row member's time on a column [rows, columns]."""
    paid: Floats = program.usage * (prices @ program.resources)
    return paid


def least_cost(rate: Floats, rent: Floats, throughput: Floats) -> Floats:
    """The least cost of a throughput that the row can reach [rows]; infinite where it cannot.

    The edge of the hull above the throughput is found as the simplex method would: the column
    farthest below the line through a slower and a faster one takes the place of one of them, until
    none is below. O(rows x columns) a step, with about log2(columns) steps.

    Args:
        rate: Steps per second [rows, columns]; 0 where the row does not run.
        rent: What all the time on a column costs [rows, columns].
        throughput: Steps per second asked for [rows].
    """
    least = np.where(throughput > 0, np.inf, 0.0)
    fast = (rate > 0) & (rate >= throughput[:, None] * (1.0 - SAME))
    left = np.flatnonzero((throughput > 0) & fast.any(axis=1))
    rate, wanted, fast = rate[left], throughput[left], fast[left]
    rent = np.where(rate > 0, rent[left], np.inf)
    rows = np.arange(len(left))
    # The edge begins at the origin and the cheapest step: no column lies below that line to its
    # left.
    top = np.where(fast, rent / np.where(fast, rate, 1.0), np.inf).argmin(axis=1)
    high, high_paid = rate[rows, top], rent[rows, top]
    low, low_paid = np.zeros(len(left)), np.zeros(len(left))
    # Each turn moves one end of the edge. The count lets every column be either end once, so
    # rounding cannot turn for ever.
    for _ in range(2 * rate.shape[1] + 2):
        part = (wanted - low) / (high - low)
        cost = np.where(part < 1.0, low_paid + part * (high_paid - low_paid), high_paid)
        least[left] = np.minimum(least[left], cost)
        slope = (high_paid - low_paid) / (high - low)
        lowest = (rent - slope[:, None] * rate).argmin(axis=1)
        new, paid, over = rate[rows, lowest], rent[rows, lowest], fast[rows, lowest]
        below = low_paid + slope * (new - low) - paid
        # Only what lies below by more than rounding moves the edge; else two columns on one line
        # would swap.
        go = np.flatnonzero(
            below > COST_ROUNDING * (paid + low_paid + slope * np.maximum(new, high))
        )
        if not len(go):
            break
        high, high_paid = np.where(over, new, high), np.where(over, paid, high_paid)
        low, low_paid = np.where(over, low, new), np.where(over, low_paid, paid)
        # Rows whose edge is final leave, so later turns are short.
        if len(go) < len(left):
            left, wanted, rate, rent, fast = left[go], wanted[go], rate[go], rent[go], fast[go]
            high, high_paid, low, low_paid = high[go], high_paid[go], low[go], low_paid[go]
            rows = np.arange(len(left))
    return least


def marginal_cost(
    rate: Floats, rent: Floats, throughput: Floats, cost: Floats
) -> tuple[Floats, Floats]:
    """The saving of one step less and the cost of one step more, at the least cost [rows] each.

    More is infinite where the row cannot be faster.
    """
    gap = rate - throughput[:, None]
    close = SAME * throughput[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (rent - cost[:, None]) / gap
        # Less throughput may also mean less time on everything: the way to the origin.
        origin = np.where(throughput > 0, cost / throughput, 0.0)
    less = np.where((rate > 0) & (gap < -close), slope, -np.inf).max(axis=1)
    more = np.where((rate > 0) & (gap > close), slope, np.inf).min(axis=1)
    return np.maximum(np.maximum(less, origin), 0.0), np.maximum(more, 0.0)


# Ways that cost the same but for this part of the row's cost are equal.
EQUAL = 1e-7
MOST_ROWS = 64


def at_prices(program: FractionProgram, prices: Floats) -> Solution | None:
    """Which part z of the demands ``program.level`` can be had at binding prices.

    Args:
        program: A max-min program without floors.
        prices: Of resources, at which the demands cost just what the pool is worth.

    Returns:
        A solution whose rows keep to their cheapest columns; where it falls short, with prices
        of the rows that had a choice, sharper than those given. None where too many had.
    """
    # Throughput of each row at the full level [rows].
    wanted = np.where(program.demands, program.level, 0.0)
    rent = rents(program, prices)
    kept, price, pays_time = cheapest(program.rate, rent, wanted)
    x, known = determined(program.rate, kept, pays_time, wanted)
    open_rows = np.flatnonzero(~known & (wanted > 0))
    if len(open_rows) > MOST_ROWS:
        return None
    z = 1.0
    if len(open_rows):
        # What rows without a choice use is taken from the pool; open rows hold nothing yet.
        left = program.capacity - program.resources @ (program.count @ (program.usage * x))
        rest = some_rows(program, open_rows, kept, np.maximum(left, 0.0))
        try:
            found = solve_by_simplex(rest)
        except BackendError:
            return None
        x[open_rows], z = found.x, min(found.z, 1.0)
        if z < 1.0 and found.resource_prices.any():
            prices = found.resource_prices
    used = program.resources @ (program.count @ (program.usage * x))
    # Prices only nearly bind, so the sum may pass a capacity by rounding: all give way alike.
    z = min(z, float((program.capacity / np.maximum(used, program.capacity)).min()))
    return Solution(
        x=x * min(z, 1.0), z=z, objective=z, bound=1.0, job_prices=price, resource_prices=prices,
        gap=1.0 - z, method="prices and simplex",
    )  # fmt: skip


def cheapest(rate: Floats, rent: Floats, wanted: Floats) -> tuple[Bools, Floats, Bools]:
    """Whether a column is among a row's cheapest ways [rows, columns], its price, its time's."""
    cost = least_cost(rate, rent, wanted)
    less, more = marginal_cost(rate, rent, wanted, cost)
    # Any price between the two is right; one inside shows only what the row must use.
    floor = np.where(wanted > 0, cost / np.maximum(wanted, 1e-300), 0.0)
    unit = (float(rent.max()) or 1.0) / np.maximum(rate.max(axis=1), 1e-300)
    price = np.where(np.isfinite(more), 0.5 * (less + np.where(np.isfinite(more), more, 0.0)),
                     2.0 * np.maximum(less, floor) + unit)  # fmt: skip
    profit = np.where(rate > 0, price[:, None] * rate - rent, -np.inf)
    time = np.maximum(profit.max(axis=1), 0.0)
    scale = np.maximum(price * rate.max(axis=1), 1e-300)
    kept = time[:, None] - profit <= EQUAL * scale[:, None]
    return kept, price, time > EQUAL * scale


def determined(rate: Floats, kept: Bools, pays_time: Bools, wanted: Floats) -> tuple[Floats, Bools]:
    """Time fractions of rows without a choice [rows, columns], and which these are [rows]."""
    number = kept.sum(axis=1)
    fast = np.where(kept, rate, -np.inf).argmax(axis=1)
    slow = np.where(kept, rate, np.inf).argmin(axis=1)
    rows = np.arange(len(rate))
    top, low = rate[rows, fast], rate[rows, slow]
    x = np.zeros_like(rate)
    one = (number == 1) & (wanted > 0)
    x[rows[one], fast[one]] = np.minimum(wanted[one] / top[one], 1.0)
    # At two columns with time that has a price, all time is spent: throughput decides the parts.
    two = (number == 2) & pays_time & (top > low) & (wanted > 0)
    part = np.clip((wanted[two] - low[two]) / (top[two] - low[two]), 0.0, 1.0)
    x[rows[two], fast[two]], x[rows[two], slow[two]] = part, 1.0 - part
    return x, one | two


def some_rows(
    program: FractionProgram, rows: Ints, kept: Bools, capacity: Floats
) -> FractionProgram:
    """A program of some rows, on their ``kept`` columns [all rows, columns] and what is left."""
    return replace(
        program,
        count=program.count[rows],
        rate=np.where(kept[rows], program.rate[rows], 0.0),
        usage=program.usage[rows],
        gain=program.gain[rows],
        capacity=capacity,
        level=program.level[rows],
        floor=program.floor[rows],
        demands=program.demands[rows],
    )


# Where all but this part can be had, prices at hand may be sharper than a program's.
NEARLY = 1e-6
# Smaller differences of levels are rounding.
LAST_BITS = 1e-13
# A level below this part of the row's best is next to nothing.
NOTHING = 1e-6
# A row whose level is within this part of its cap is at it.
AT_CAP = 1e-9
# Resources with a smaller part of the whole price are free.
FREE_PART = 1e-6
# Rows are on more columns by the simplex method: an interior point iteration costs columns^2.
MANY_COLUMNS = 50
# What is left of a resource is rounding if it is a smaller part.
LEFT_PART = 1e-12
# Earlier prices are weighed up by this factor, while that refutes by more than a part more.
MORE = 4.0
ENOUGH = 1e-3
MOST = 1e10
# Rows that stopped give way by such parts where they lack as little, which is rounding.
RELAXED = (0.0, 1e-10, 1e-9, 1e-8)
# With space sharing, rows with a smaller part of the whole price than the largest's can rise.
STUCK_PART = 1e-6


class PriceCut(Protocol):
    """Prices that refute levels [rows]."""

    def excess(self, levels: Floats) -> float:
        """By what part the levels' cost passes what there is; above 0 they cannot be had."""
        ...

    def slope(self, levels: Floats, direction: Floats) -> float:
        """How fast the excess falls as levels go back in a direction [rows]."""
        ...

    def pays(self, levels: Floats) -> Floats:
        """What one job of each row pays, as a part of the pool's worth [rows]."""
        ...

    def priced(self, levels: Floats) -> tuple[Floats, Floats, Floats]:
        """Prices of throughput [rows], of resources and of time [rows] that say so."""
        ...


AnyCut = TypeVar("AnyCut", bound=PriceCut)


class LevelLimits(Protocol[AnyCut]):
    """Decides which levels are feasible together, and which rows cannot rise above them."""

    stride: int
    precision: float
    best: Floats
    should_stop: Callable[[], bool]

    def base(self, levels: Floats) -> Floats:
        """What programs start from, given levels that can be had [rows]."""
        ...

    def caps(self) -> Floats:
        """The level above which each row is known to be stuck [rows]."""
        ...

    def solve(self, start: Floats, end: Floats, cut: AnyCut | None) -> tuple[Solution, PairTimes]:
        """Which part z of the way from ``base`` levels to others [rows] can be had.

        ``cut`` refutes anything above ``end``.
        """
        ...

    def cut(self, found: Solution) -> AnyCut:
        """The prices of a solution as a cut."""
        ...

    def binds_already(self, cut: AnyCut) -> bool:
        """Whether a cut gives no new bound for rows that still rise, up to rounding."""
        ...

    def settle(self, levels: Floats, cut: AnyCut, active: Bools) -> tuple[Bools, AnyCut]:
        """The active rows that cannot rise above levels at which ``cut`` binds, and the proof."""
        ...


def best_levels(merged: MergedProgram) -> Floats:
    """The level of each row on its fastest column, alone or in a pair [rows]."""
    best = merged.small.rate
    if merged.pairing is not None:
        beside = merged.pairing.rate.max(axis=1)[merged.pairing.kind]
        best = np.maximum(best, np.where(best > 0, beside, 0.0))
    levels: Floats = best.max(axis=1) / merged.small.level
    return levels


class LimitsAlone:
    """Rows without space sharing: each pays the least cost of its own throughput.

    Past the first bottleneck rows that stopped keep to their cheapest columns at its prices, and
    rows that rise to columns without a price. What has only one choice left is settled, and the
    simplex method decides the rest: fewer rows, exactly, where the interior point method breaks
    down because rows that stopped leave no interior.
    """

    def __init__(self, small: FractionProgram, should_stop: Callable[[], bool] = never) -> None:
        self.small, self.should_stop = small, should_stop
        self._open, self._rest = small.rate > 0, np.zeros(0, np.int64)
        self._fixed = np.zeros_like(small.rate)
        self._busy = np.zeros(len(small.count), dtype=bool)
        self._newest = np.zeros(len(small.capacity))
        self._rising = small.demands
        self.stride, self.precision = len(small.count), 1e-11
        self.best = small.rate.max(axis=1) / small.level
        self.price, self.priced = np.zeros(len(small.capacity)), 0
        self._part = LeastCost(small, self.price, self.price), self._rest
        self._likely: Bools | None = None  # columns that a vertex used

    def base(self, levels: Floats) -> Floats:
        """Start programs from zero levels."""
        return np.zeros_like(levels)

    def caps(self) -> Floats:
        """The best on columns that have cost nothing so far."""
        paid = (self.price @ self.small.resources) > 0
        best = np.where(paid, 0.0, self.small.rate).max(axis=1)
        caps: Floats = best / self.small.level
        return caps

    def solve(
        self, start: Floats, end: Floats, cut: "LeastCost | None"
    ) -> tuple[Solution, PairTimes]:
        """See Limits; prices at hand first, then the interior point method."""
        program = replace(self.small, level=self.small.level * end, demands=end > 0)
        if self.priced:
            return self._solve_rest(program, end), NO_PAIRS
        price = self.price if cut is None else self.price + cut.price
        vertex = at_prices(program, price)
        if vertex is not None and vertex.z >= 1.0 - self.precision:
            return vertex, NO_PAIRS
        # Both nearly reach the aim, so both prices refute ``end`` by about rounding: the sharper
        # ones are kept.
        found = self._solved(program)
        if vertex is not None and vertex.z >= 1.0 - NEARLY <= found.z:
            sharp = max((found, vertex), key=lambda each: self.cut(each).excess(end))
            found = replace(found, resource_prices=sharp.resource_prices)
        return found, NO_PAIRS

    def _solved(self, program: FractionProgram) -> Solution:
        """Solve for all rows: by the simplex method from the last vertex if types are many."""
        if program.rate.shape[1] <= MANY_COLUMNS:
            return solve_alone(program, self.should_stop)
        found = solve_by_simplex(program, self._likely, self.should_stop)
        self._likely = found.x > 0
        return found

    def _solve_rest(self, program: FractionProgram, end: Floats) -> Solution:
        """Solve for the rows that have a choice left, beside what the others hold."""
        small, x = self.small, self._fixed.copy()
        # Rounding of the subtraction would be a capacity that rows fight for.
        left = small.capacity - resource_use(small, x)
        left = np.where(left > LEFT_PART * small.capacity, left, 0.0)
        rest = some_rows(program, self._rest, self._open, left)
        stopped = ~self._rising[self._rest]
        # Rows that stopped hold exactly their level, which rounding may make infeasible: they give
        # way by the least part that helps.
        for part in RELAXED:
            level = np.where(stopped, rest.level * (1.0 - part), rest.level)
            likely = None if self._likely is None else self._likely[self._rest]
            found = solve_by_simplex(replace(rest, level=level), likely, self.should_stop)
            x[self._rest] = found.x
            if self._likely is not None:
                self._likely |= x > 0
            used = resource_use(small, x)
            z = min(found.z, 1.0, float((small.capacity / np.maximum(used, small.capacity)).min()))
            if not 1.0 - NEARLY <= z < 1.0 - self.precision:
                break
        price = self.price
        if z < 1.0 - self.precision and found.resource_prices.any():
            self._newest = self._counted(found.resource_prices)
            price = self._composed(self._newest, end)
            own = found.resource_prices / max(float(rest.capacity @ found.resource_prices), 1e-300)
            unscaled = replace(rest, level=small.level[self._rest])
            self._part = LeastCost(unscaled, own, own), self._rest
        return replace(found, x=x, z=z, objective=z, resource_prices=price)

    def _composed(self, price: Floats, end: Floats) -> Floats:
        """Prices of the rest beside so much of the earlier ones that rows keep to their columns."""
        # The more of these, the weaker the proof in relation to the pool's worth: the least that
        # refutes ``end`` as clearly as more would.
        earlier, refuted, part = self.price / (self.small.capacity @ self.price), -np.inf, 1.0
        # Excess in units of the newest prices: it grows with ``part`` until the rows that stopped
        # keep to their columns, and then stays.
        while part < MOST:
            both = part * earlier + price
            worth = float(self.small.capacity @ both)
            excess = worth * LeastCost(self.small, both / worth, price).excess(end)
            if refuted > 0 and excess <= refuted * (1.0 + ENOUGH):
                break
            refuted, part = excess, part * MORE
        return part * earlier + price

    def _counted(self, price: Floats) -> Floats:
        """Prices without those that do not count, of a pool that is worth 1."""
        worth = price * self.small.capacity
        price = np.where(worth > FREE_PART * worth.sum(), price, 0.0)
        counted: Floats = price / max(float(self.small.capacity @ price), 1e-300)
        return counted

    def cut(self, found: Solution) -> "LeastCost":
        """See Limits; only resources whose price counts keep one."""
        price = found.resource_prices
        if self.priced:
            price = price / (self.small.capacity @ price)
            return CostOfRest(self.small, price, self._newest, *self._part)
        price = self._counted(price)
        return LeastCost(self.small, price, price)

    def binds_already(self, cut: "LeastCost") -> bool:
        """Whether all resources with a price had one before."""
        return bool((self.price[cut.price > 0] > 0).all())

    def settle(self, levels: Floats, cut: "LeastCost", active: Bools) -> tuple[Bools, "LeastCost"]:
        """All prices so far still bind; only their mean shows that every way up costs something."""
        self.price, self.priced = self.price + cut.price, self.priced + 1
        price = self.price / self.priced
        proof = LeastCost(self.small, price, price)
        stuck: Bools = levels >= self.caps() * (1.0 - AT_CAP)
        self._narrow(levels, active & ~stuck, cut.newest)
        return stuck, proof

    def _narrow(self, levels: Floats, rising: Bools, price: Floats) -> None:
        """Close the columns that no row can use any more, and settle rows without a choice."""
        # ``levels``: Of the bottleneck [rows].
        # ``rising``: Rows that it does not stop [rows].
        rent, wanted = rents(self.small, price), self.small.level * levels
        rate = np.where(self._open, self.small.rate, 0.0)
        # At the prices of this bottleneck: rows that it stops may use only their cheapest columns
        # from now on, rows that rise only columns without a price.
        kept, _, busy = cheapest(rate, rent, wanted)
        unsettled: Bools = np.logical_not(self._fixed.any(axis=1))
        self._busy |= busy & unsettled & ~rising
        self._open &= np.where(rising[:, None], rent <= 0, kept | ~unsettled[:, None])
        fixed, known = determined(self.small.rate, self._open, self._busy, wanted)
        known &= ~rising & unsettled
        self._fixed[known] = fixed[known]
        self._rest = np.flatnonzero(unsettled & ~known & self.small.demands)
        self._rising = rising


@dataclass(frozen=True, slots=True)
class LeastCost:
    """The pool's worth is 1 at ``price`` [resources]; levels must not cost more.

    ``newest`` [resources] is the part of it that no earlier bottleneck had.
    """

    small: FractionProgram
    price: Floats
    newest: Floats

    def excess(self, levels: Floats) -> float:
        """What the levels cost, beyond the pool."""
        return float(self.small.count @ self.pays(levels)) - 1.0

    def pays(self, levels: Floats) -> Floats:
        """The least cost of each row's throughput."""
        paid = rents(self.small, self.price)
        return least_cost(self.small.rate, paid, self.small.level * levels)

    def slope(self, levels: Floats, direction: Floats) -> float:
        """By what a step less saves."""
        less, _ = self._marginal(levels)
        return float(self.small.count @ (less * self.small.level * direction))

    def _marginal(self, levels: Floats) -> tuple[Floats, Floats]:
        paid, wanted = rents(self.small, self.price), self.small.level * levels
        return marginal_cost(
            self.small.rate, paid, wanted, least_cost(self.small.rate, paid, wanted)
        )

    def priced(self, levels: Floats) -> tuple[Floats, Floats, Floats]:
        """A step is worth what one less saves."""
        return self._marginal(levels)[0], self.price, np.zeros(len(levels))


@dataclass(frozen=True, slots=True)
class CostOfRest(LeastCost):
    """Prices of all rows, as exact as those of the ``rows`` that have a choice left.

    Beside the earlier prices the last ones are small, so that costs of all rows would be rounded.
    """

    rest: LeastCost
    rows: Ints

    def excess(self, levels: Floats) -> float:
        """What the rest costs, beyond what is left to it."""
        return self.rest.excess(levels[self.rows])

    def slope(self, levels: Floats, direction: Floats) -> float:
        """By what a step less of the rest saves."""
        return self.rest.slope(levels[self.rows], direction[self.rows])


class LimitsWithPairs:
    """Rows that share: prices of time and throughput count, as a program gave them."""

    def __init__(self, merged: MergedProgram, *, keeps_basis: bool = True) -> None:
        """Start with no program.

        ``keeps_basis``: each program goes on from the last one's basis.
        """
        assert merged.pairing is not None
        self.keeps_basis, self.should_stop = keeps_basis, merged.instance.should_stop
        self.merged, self.pairing = merged, merged.pairing
        self.stride, self.precision = 1, 1e-9
        self.best = best_levels(merged)
        self._open: PairProgram | None = None

    def base(self, levels: Floats) -> Floats:
        """Start programs from the last feasible levels."""
        return levels

    def caps(self) -> Floats:
        """The best alone or in a pair."""
        return self.best

    def solve(self, start: Floats, end: Floats, cut: "Linear | None") -> tuple[Solution, PairTimes]:
        """See Limits; the simplex method over pairs that pay, from the last basis."""
        small = self.merged.small
        # Smaller rises are rounding, and would make a program of noise.
        rise = np.where(end - start > LAST_BITS * self.best, end - start, 0.0)
        program = replace(
            small, floor=small.level * start, level=small.level * rise, demands=end > 0
        )
        if self._open is None or not self.keeps_basis:
            self._open = PairProgram(program, self.pairing, should_stop=self.should_stop)
        try:
            found, pairs = self._open.solve(program)
        # The floor was feasible one program earlier; rounding made it infeasible by less than the
        # precision.
        except BackendError:
            program = replace(program, floor=program.floor * (1.0 - self.precision))
            found, pairs = self._open.solve(program)
        # The program's bound is on what rises; the floor's worth comes on top.
        owed = float(small.count @ (found.job_prices * program.floor))
        return replace(found, bound=found.bound + owed), pairs

    def cut(self, found: Solution) -> "Linear":
        """See Limits."""
        assert found.time_prices is not None
        return Linear(
            self.merged.small, found.job_prices, found.resource_prices, found.time_prices,
            found.bound,
        )  # fmt: skip

    def binds_already(self, cut: "Linear") -> bool:
        """Always true: each cut stops a row, or gives no new bound."""
        return True

    def settle(self, levels: Floats, cut: "Linear", active: Bools) -> tuple[Bools, "Linear"]:
        """Rows at level 0 for which every column has a price stay at 0."""
        share = np.where(active, cut.share(self.best), 0.0)
        stuck: Bools = (share > 0) & (share >= STUCK_PART * share.max())
        small = self.merged.small
        spare = spare_prices(small, self.pairing, cut.job, cut.price, cut.time)
        barred = active & ~stuck & (levels <= NOTHING * self.best) & (spare > 0)
        return stuck | barred, replace(cut, job=np.where(barred, cut.job + spare, cut.job))


@dataclass(frozen=True, slots=True)
class Linear:
    """Prices whose throughput is worth at most ``bound``."""

    small: FractionProgram
    job: Floats
    price: Floats
    time: Floats
    bound: float

    def share(self, levels: Floats) -> Floats:
        """Each row's part of the whole [rows]."""
        each: Floats = self.small.count * self.job * self.small.level * levels / self.bound
        return each

    def excess(self, levels: Floats) -> float:
        """By how much the levels' worth exceeds its bound."""
        return float(self.share(levels).sum()) - 1.0

    def pays(self, levels: Floats) -> Floats:
        """By the prices of throughput."""
        each: Floats = self.job * self.small.level * levels / self.bound
        return each

    def slope(self, levels: Floats, direction: Floats) -> float:
        """By the prices of throughput."""
        return float(self.share(direction).sum())

    def priced(self, levels: Floats) -> tuple[Floats, Floats, Floats]:
        """The prices that the program gave."""
        return self.job, self.price, self.time
