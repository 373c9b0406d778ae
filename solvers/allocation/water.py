"""Water filling: lexicographic max-min over a tree of weights (thesis 5.4.3).

All unsaturated jobs rise together, each in proportion to its share of the tree, until some
can rise no further; these keep their level, their share passes to their siblings, and the rest
rises on. The thesis solves a linear program and a MILP for each level. But nearly every level
is only one job that has reached its own best, which needs no program: those levels are a path
known in advance (``tree.Path``), and what is asked is how far up that path all jobs together
can go. One program at a point beyond it gives prices; these refute every point of the path
above a lower one; a few such steps (Newton's method, from above) end where nothing is refuted.
There the jobs that would pay for a little more are stuck; the others rise on, on columns that
cost nothing. Without space sharing each such stage prices a further resource, so there are at
most as many stages as resources, each of a few programs of O(jobs x types) an iteration.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...schema.errors import BackendError
from ...schema.jobs import Entity
from . import shared
from .engine import NO_PAIRS, LevelProof, Merged, Outcome, solve_alone
from .instance import Instance
from .prices import least_cost, marginal_cost, rents
from .program import Bools, Floats, Ints, Program, Solution, dual_bound, gap_between
from .shared import PairTimes
from .tree import Path, Tree
from .vertex import at_prices

# A row whose level is within this part of its cap is at it.
AT_CAP = 1e-9
# Resources with a smaller part of the whole price are free.
FREE_PART = 1e-6
# With space sharing, rows with a smaller part of the whole price than the largest's can rise.
STUCK_PART = 1e-6
MAX_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Give each job ``unit`` [jobs] * its level of throughput, levels rising together.

    Levels rise by ``weight`` [jobs] through the tree of ``entities``; ``entity`` [jobs] is each
    job's node, -1 for the top.
    """

    unit: Floats
    weight: Floats
    entity: Ints
    entities: tuple[Entity, ...] = ()


class _Cut(Protocol):
    """Prices that refute levels [rows]."""

    def excess(self, levels: Floats) -> float:
        """By what part the levels' cost passes what there is; above 0 they cannot be had."""
        ...

    def slope(self, levels: Floats, direction: Floats) -> float:
        """How fast the excess falls as levels go back in a direction [rows]."""
        ...

    def priced(self, levels: Floats) -> tuple[Floats, Floats, Floats]:
        """Prices of throughput [rows], of resources and of time [rows] that say so."""
        ...


class _Limits(Protocol):
    """What levels can be had together, and who is stuck at them."""

    stride: int
    precision: float

    def base(self, levels: Floats) -> Floats:
        """What programs start from, given levels that can be had [rows]."""
        ...

    def caps(self) -> Floats:
        """The level above which each row is known to be stuck [rows]."""
        ...

    def solve(
        self, start: Floats, end: Floats, cut: _Cut | None
    ) -> tuple[Solution, PairTimes]:
        """Which part z of the way from ``base`` levels to others [rows] can be had.

        ``cut`` refutes anything above ``end``.
        """
        ...

    def cut(self, found: Solution) -> _Cut:
        """The prices of a solution as a cut."""
        ...

    def settle(self, levels: Floats, cut: _Cut, active: Bools) -> Bools:
        """Who of the active rows would have to pay for more than these levels, at which ``cut`` binds [rows]."""
        ...


def fill(instance: Instance, goal: Fill) -> Outcome:
    """Water-fill: the unique lexicographic max-min levels.

    The outcome's objective, bound and prices are those of the first level: the least level over
    shares. Its ``levels`` prove the others.

    Raises:
        BackendError: A program broke down.
    """
    merged = Merged.of(instance, instance.program(level=goal.unit), _alike(goal))
    small, first = merged.small, merged.first
    tree = Tree(goal.entities, goal.entity[first], goal.weight[first], small.count)
    limits: _Limits = _Alone(small) if merged.pairing is None else _Paired(merged)
    level, active = np.zeros(len(small.count)), small.demands.copy()
    found, pairs, cuts, programs = None, NO_PAIRS, [], 0
    start: tuple[Program, Floats, Floats, Floats] | None = None
    while active.any():
        caps = limits.caps()
        path = Path(tree, level, active, caps)
        time, cut, found, pairs, steps = _highest(limits, path)
        programs += steps
        start = start or _first_level(small, path, time, cut, caps)
        level = path.levels(time)
        active &= level < caps * (1.0 - AT_CAP)
        if cut is None:
            break
        active &= ~limits.settle(level, cut, active)
        cuts.append((cut, level))
    assert found is not None
    assert start is not None
    method = f"{found.method.split(',')[0]}; water filling, {len(cuts)} shared bottlenecks"
    found = replace(found, method=f"{method}, {programs} programs")
    found = _scored(merged, _no_more_than(merged, found, small.level * level), pairs, start)
    asked = replace(
        merged.program, level=start[0].level[merged.row_of], demands=start[0].demands[merged.row_of]
    )
    outcome = replace(merged, program=asked).outcome(found, pairs)
    return replace(outcome, levels=_proofs(merged, cuts), gap=max(outcome.gap, found.gap))


def _alike(goal: Fill) -> Ints:
    """Which jobs the tree does not tell apart; one that waits its turn is like no other."""
    table = np.column_stack((goal.entity, goal.weight))
    group: Ints = np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)
    fifo = np.array([node.policy == "fifo" for node in goal.entities] + [False])
    waiting = np.flatnonzero(fifo[goal.entity])
    group[waiting] = len(table) + np.arange(len(waiting))
    return group


def _highest(
    limits: _Limits, path: Path
) -> tuple[float, _Cut | None, Solution, PairTimes, int]:
    """The last time on a path whose levels can be had, and the prices that refute all later."""
    last = len(path.times) - 1
    low, place, steps = 0.0, min(limits.stride, last), 0
    time, cut = path.times[place], None
    while True:
        start, end = limits.base(path.levels(low)), path.levels(time)
        found, pairs = limits.solve(start, end, cut)
        steps += 1
        had = (start + found.z * (end - start)) * (1.0 + limits.precision)
        if (had >= end).all():
            if cut is not None or place == last:
                break
            low, place = time, min(2 * place, last)
            time = path.times[place]
            continue
        newer = limits.cut(found)
        earlier = max(_binding(path, newer, time), low)
        if (had >= path.levels(earlier)).all() or steps >= MAX_STEPS:
            time, cut = earlier, newer
            break
        if (earlier >= time and cut is not None) or (path.levels(earlier) <= start).all():
            time, cut = earlier, newer
            break
        time, cut = earlier, newer
    levels = path.levels(time)
    lacking = np.where(levels > 0, 1.0 - had / np.maximum(levels, 1e-300), 0.0).max()
    return time, cut, replace(found, z=1.0 - max(float(lacking), 0.0)), pairs, steps


def _binding(path: Path, cut: _Cut, time: float) -> float:
    """The last time up to ``time`` that prices do not refute; 0 if they refute all."""
    low, high = 0, int(np.searchsorted(path.times, time))
    if cut.excess(path.levels(time)) <= 0:
        return time
    while high - low > 1:
        middle = (low + high) // 2
        if cut.excess(path.levels(path.times[middle])) > 0:
            high = middle
        else:
            low = middle
    start, end = path.times[low], min(path.times[high], time)
    base, top = path.levels(start), path.levels(end)
    # Levels are linear here and costs convex: tangents from the right stay above the root.
    part = 1.0
    for _ in range(MAX_STEPS):
        value, slope = cut.excess(levels := base + part * (top - base)), cut.slope(levels, top - base)
        step = value / slope if slope > 0 else np.inf
        if value <= 0 or part - step >= part:
            break
        part = max(part - step, 0.0)
    return start + part * (end - start)


class _Alone:
    """Rows without space sharing: each pays the least cost of its own throughput."""

    def __init__(self, small: Program) -> None:
        self.small = small
        self.stride, self.precision = len(small.count), 1e-11
        self.price = np.zeros(len(small.capacity))

    def base(self, levels: Floats) -> Floats:
        return np.zeros_like(levels)

    def caps(self) -> Floats:
        """The best on columns that have cost nothing so far."""
        paid = (self.price @ self.small.resources) > 0
        best = np.where(paid, 0.0, self.small.rate).max(axis=1)
        caps: Floats = best / self.small.level
        return caps

    def solve(
        self, start: Floats, end: Floats, cut: "_LeastCost | None"
    ) -> tuple[Solution, PairTimes]:
        program = replace(self.small, level=self.small.level * end, demands=end > 0)
        price = self.price if cut is None else self.price + cut.price
        found = at_prices(program, price)
        if found is None or found.z < 1.0 - self.precision:
            found = solve_alone(program)
        return found, NO_PAIRS

    def cut(self, found: Solution) -> "_LeastCost":
        price = found.resource_prices
        worth = price * self.small.capacity
        price = np.where(worth > FREE_PART * worth.sum(), price, 0.0)
        return _LeastCost(self.small, price / (self.small.capacity @ price))

    def settle(self, levels: Floats, cut: "_LeastCost", active: Bools) -> Bools:
        # All prices so far still bind; only their sum shows that every way up costs something.
        self.price = self.price + cut.price
        return levels >= self.caps() * (1.0 - AT_CAP)


@dataclass(frozen=True, slots=True)
class _LeastCost:
    """The pool's worth is 1 at ``price`` [resources]; levels must not cost more."""

    small: Program
    price: Floats

    def excess(self, levels: Floats) -> float:
        paid = rents(self.small, self.price)
        cost = least_cost(self.small.rate, paid, self.small.level * levels)
        return float(self.small.count @ cost) - 1.0

    def slope(self, levels: Floats, direction: Floats) -> float:
        less, _ = self._marginal(levels)
        return float(self.small.count @ (less * self.small.level * direction))

    def _marginal(self, levels: Floats) -> tuple[Floats, Floats]:
        paid, wanted = rents(self.small, self.price), self.small.level * levels
        return marginal_cost(
            self.small.rate, paid, wanted, least_cost(self.small.rate, paid, wanted)
        )

    def priced(self, levels: Floats) -> tuple[Floats, Floats, Floats]:
        return self._marginal(levels)[0], self.price, np.zeros(len(levels))


class _Paired:
    """Rows that share: prices of time and throughput count, as a program gave them."""

    def __init__(self, merged: Merged) -> None:
        assert merged.pairing is not None
        self.merged, self.pairing = merged, merged.pairing
        self.stride, self.precision = 1, 1e-9
        kind = self.pairing.kind
        beside = self.pairing.rate.max(axis=1)[kind]
        best = np.maximum(merged.small.rate, np.where(merged.small.rate > 0, beside, 0.0))
        self.best = best.max(axis=1) / merged.small.level
        self.pairs: PairTimes | None = None

    def base(self, levels: Floats) -> Floats:
        return levels

    def caps(self) -> Floats:
        return self.best

    def solve(
        self, start: Floats, end: Floats, cut: "_Linear | None"
    ) -> tuple[Solution, PairTimes]:
        small = self.merged.small
        program = replace(
            small,
            floor=small.level * start,
            level=small.level * (end - start),
            demands=end > 0,
        )
        try:
            found, self.pairs = shared.solve(program, self.pairing, self.pairs)
        except BackendError:
            program = replace(program, floor=program.floor * (1.0 - self.precision))
            found, self.pairs = shared.solve(program, self.pairing, self.pairs)
        owed = float(small.count @ (found.job_prices * program.floor))
        return replace(found, bound=found.bound + owed), self.pairs

    def cut(self, found: Solution) -> "_Linear":
        assert found.time_prices is not None
        return _Linear(
            self.merged.small, found.job_prices, found.resource_prices, found.time_prices,
            found.bound,
        )  # fmt: skip

    def settle(self, levels: Floats, cut: "_Linear", active: Bools) -> Bools:
        share = np.where(active, cut.share(levels), 0.0)
        stuck: Bools = share >= STUCK_PART * share.max()
        return stuck


@dataclass(frozen=True, slots=True)
class _Linear:
    """Prices whose throughput is worth at most ``bound``."""

    small: Program
    job: Floats
    price: Floats
    time: Floats
    bound: float

    def share(self, levels: Floats) -> Floats:
        """Each row's part of the whole [rows]."""
        each: Floats = self.small.count * self.job * self.small.level * levels / self.bound
        return each

    def excess(self, levels: Floats) -> float:
        return float(self.share(levels).sum()) - 1.0

    def slope(self, levels: Floats, direction: Floats) -> float:
        return float(self.share(direction).sum())

    def priced(self, levels: Floats) -> tuple[Floats, Floats, Floats]:
        return self.job, self.price, self.time


def _first_level(
    small: Program, path: Path, time: float, cut: _Cut | None, caps: Floats
) -> tuple[Program, Floats, Floats, Floats]:
    """The program of the first level, and prices of throughput, resources and time for it.

    Where a job's own best ends the first level, it alone has a price.
    """
    alone = path.times[min(1, len(path.times) - 1)]
    until = min(alone, time)
    level = path.levels(until)
    program = replace(small, level=small.level * level / until, demands=level > 0)
    if cut is not None and time <= alone:
        job, price, rent = cut.priced(level)
    else:
        stuck = int((level >= caps * (1.0 - 1e-12)).argmax())
        job, price, rent = np.zeros(len(level)), np.zeros(len(small.capacity)), np.zeros(len(level))
        job[stuck] = 1.0
        rent[stuck] = caps[stuck] * small.level[stuck]
    unit = float(small.count @ (job * program.level))
    return program, job / unit, price / unit, rent / unit


def _proofs(merged: Merged, cuts: list[tuple[_Cut, Floats]]) -> tuple[LevelProof, ...]:
    """Each shared bottleneck's prices by job; without space sharing with all before it."""
    proofs, before = [], np.zeros(len(merged.small.capacity))
    for cut, level in cuts:
        job, price, time = cut.priced(level)
        if merged.pairing is None:
            before = before + price
            proofs.append(LevelProof(resource_prices=before / (len(proofs) + 1)))
        else:
            proofs.append(
                LevelProof(
                    resource_prices=price,
                    job_prices=job[merged.row_of],
                    time_prices=time[merged.row_of],
                )
            )
    return tuple(proofs)


def _no_more_than(merged: Merged, found: Solution, throughput: Floats) -> Solution:
    """A solution without the last bits that rows got above their throughput [rows]."""
    if merged.pairing is not None:
        return found
    reached = (merged.small.rate * found.x).sum(axis=1)
    part = np.minimum(1.0, throughput / np.where(reached > 0, reached, 1.0))
    return replace(found, x=found.x * part[:, None])


def _scored(
    merged: Merged,
    found: Solution,
    pairs: PairTimes,
    start: tuple[Program, Floats, Floats, Floats],
) -> Solution:
    """The last solution with the objective, bound and prices of the first level."""
    program, job, price, time = start
    if merged.pairing is None:
        reached = (program.rate * found.x).sum(axis=1)
        bound, job, price = dual_bound(program, job, price)
        times = None
    else:
        reached = shared.reach(program, merged.pairing, found.x, pairs)[0]
        bound, job, price, times = shared.bound_with_pairs(
            program, merged.pairing, job, price, time
        )
    rows = program.demands
    objective = float((reached[rows] / program.level[rows]).min())
    gap = max(gap_between(program, objective, bound), 1.0 - found.z)
    return replace(
        found, z=objective, objective=objective, bound=bound, gap=gap, job_prices=job,
        resource_prices=price, time_prices=times,
    )  # fmt: skip
