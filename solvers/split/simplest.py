"""The simplest of the splits whose predicted step stays within a limit; which of equals is taken.

Measurements are uncertain, so many plans cannot be told apart from the one with the shortest
predicted step. Of all splits whose predicted step is at most the limit ``simplest`` takes the one
with the fewest virtual nodes in all. Next count the fewest devices, then the shortest step. Of
those left it prefers one in which all devices of each used type do the same work, and the fastest
types do the most.

For one level (levels.py) the limit fixes the seconds of each device. These fix the amounts of
samples that it can do and the fewest passes for each amount. Device after device is added to a
table that holds, for each number of samples, the fewest passes and devices that do exactly so many:
a knapsack, O(devices x amounts x batch) for a level.

    batch 12; A does passes of 2 in 1 s or of 4 in 2.1 s, B passes of 2 in 2 s
    the fastest: 4 passes of 2 on A, 2 on B: 4 s and 6 virtual nodes
    within 4.3 s A may do 8 in 2 passes of 4: 2 + 2 = 4 virtual nodes, which is taken

``choose`` says which of equally fast plans is taken. Types are taken by how much one of their
devices can do within the optimal time, most first.
1. If some plan gives every device of each used type the same work, with all of the type's devices
   in use, take one: each type in turn does as much as it can.
2. Otherwise each type in turn does as much as it can with equal work on each of its used devices.
   If that is impossible it does as much as it can at all; its devices are halved again and again,
   and each half gets a part as equal as possible.
Of equal amounts: the fewest devices, then the fewest virtual nodes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np
import numpy.typing as npt

from ...schema.plan import ReplicaGroup
from ...schema.problem import SplitProblem
from .feasible import FeasibleSums, SplitPool, TypeSums, group_on, members, sumset
from .levels import Level, bisect, candidates, first_bound, holds, levels, single_devices

Work = Counter[int]  # samples per device -> number of devices


def choose(feasible: FeasibleSums) -> dict[int, Work]:
    """Choose the devices' work: type -> (samples a device -> number of devices)."""
    totals = _all_alike(feasible)
    if totals is not None:
        return {
            one.kind: Counter({done // one.count: one.count})
            for one, done in zip(feasible.types, totals, strict=True)
            if done
        }
    left, work = feasible.target, {}
    for index, one in enumerate(feasible.types):
        share, alike = _best_share(feasible, index, left)
        left -= share * one.stride
        work[one.kind] = alike or _halved(feasible, one, share)
    return {kind: amounts for kind, amounts in work.items() if amounts}


def _all_alike(feasible: FeasibleSums) -> list[int] | None:
    """Samples done by each type in rule 1, or None."""
    choices = [_alike_sums(feasible, one) for one in feasible.types]
    mask = (2 << feasible.target) - 1
    suffixes = [1]
    for bits in reversed(choices):
        suffixes.append(sumset(suffixes[-1], bits, mask))
    suffixes.reverse()
    if not suffixes[0] >> feasible.target & 1:
        return None
    left, totals = feasible.target, []
    for one, bits, after in zip(feasible.types, choices, suffixes[1:], strict=True):
        # Contributions of samples undone ascend, of samples done descend: either way most work
        # first.
        found = members(bits)
        order = found if feasible.undone else found[::-1]
        share = next(m for m in order if m <= left and after >> (left - m) & 1)
        left -= share
        totals.append(one.count * one.top - share if feasible.undone else share)
    return totals


def _alike_sums(feasible: FeasibleSums, one: TypeSums) -> int:
    bits = 0
    for share in members(one.folds[1]):
        # The total in samples, as types have unlike strides.
        total = share * one.stride * one.count
        if total <= feasible.target:
            bits |= 1 << total
    return bits


def _best_share(feasible: FeasibleSums, index: int, left: int) -> tuple[int, Work | None]:
    """A type's contribution, in strides, and its devices' work if they are alike."""
    one, after = feasible.types[index], feasible.suffixes[index + 1]
    found = members(one.folds[one.count])
    order = found if feasible.undone else found[::-1]
    # Only shares that the types behind can complete.
    possible = [m for m in order if (rest := left - m * one.stride) >= 0 and after >> rest & 1]
    for share in possible:
        alike = _alike(one, _done(feasible, one, one.count, share))
        if alike is not None:
            return share, alike
    return possible[0], None


def _done(feasible: FeasibleSums, one: TypeSums, num_devices: int, share: int) -> int:
    samples = share * one.stride
    return num_devices * one.top - samples if feasible.undone else samples


def _alike(one: TypeSums, done: int) -> Work | None:
    if done == 0:
        return Counter()
    # The fewest devices first, as few as can do so much at all.
    for num_devices in range(-(-done // one.top), one.count + 1):
        each, rest = divmod(done, num_devices)
        if rest == 0 and fewest_passes(one.entries, each):
            return Counter({each: num_devices})
    return None


def fewest_passes(entries: list[tuple[int, int]], samples: int) -> tuple[int, int] | None:
    """(size, passes) that do exactly ``samples`` in the fewest passes, or None."""
    fitting = [size for size, most in entries if samples % size == 0 and samples // size <= most]
    return (max(fitting), samples // max(fitting)) if fitting else None


def _halved(feasible: FeasibleSums, one: TypeSums, share: int) -> Work:
    """Share out a contribution among all devices of a type, half against half."""
    work: Work = Counter()
    tasks = [(one.count, share)]
    while tasks:
        num_devices, part = tasks.pop()
        if num_devices == 1:
            work[_done(feasible, one, 1, part)] += 1
            continue
        small = num_devices // 2
        large = num_devices - small
        fold, other = one.folds[small], one.folds[large]
        # Halves that both can be had; the nearest to an equal part per device.
        fitting = [m for m in members(fold) if m <= part and other >> (part - m) & 1]
        half = min(fitting, key=lambda m: (abs(m * num_devices - part * small), m))
        tasks += [(small, half), (large, part - half)]
    # An unused device does nothing.
    del work[0]
    return work


def groups_of(pool: SplitPool, work: Mapping[int, Work], bound: float) -> tuple[ReplicaGroup, ...]:
    """The plan's groups: each device's work in the fewest passes of at most ``bound`` seconds."""
    # The work was found in time: the same passes are allowed again.
    passes = pool.passes(bound)
    groups = []
    for kind, amounts in sorted(work.items()):
        option, points = pool.options[kind]
        at = {point.batch_size: point for point in points}
        for samples, num_devices in sorted(amounts.items(), reverse=True):
            size, count = fewest_passes(pool.entries(passes, kind), samples) or (0, 0)
            groups.append(group_on(option, num_devices, count, at[size]))
    return tuple(groups)


WORK_LIMIT = 5e8
"""Entries of all tables together that a search may look at: about a second."""
_MOST_ENTRIES = 1e7  # in memory together
_NEVER = 1 << 60
_ROUNDING = 1 + 1e-12

Costs = npt.NDArray[np.int64]
Rank = tuple[int, int]  # virtual nodes in all, devices


class TooMuchWorkError(Exception):
    """The search would need more work than its limit."""


@dataclass(frozen=True, slots=True)
class _Move:
    """What some devices of one type do together: samples in strides, and what that counts for."""

    strides: int
    passes: int
    num_devices: int


@dataclass(frozen=True, slots=True)
class _Stage:
    """One choice of a table: at most one of the moves. ``costs`` are of this stage and later."""

    kind: int
    moves: Sequence[_Move]
    costs: Costs


@dataclass(slots=True)
class _Search:
    """The tables of one problem; counts the entries that were computed."""

    work_left: float
    known: dict[tuple[tuple[int, ...], bytes, int], Rank | None] = field(default_factory=dict)

    def rank(self, level: Level, seconds: float, limit: Rank) -> Rank | None:
        """The fewest passes, then devices, of a level within ``seconds`` each."""
        # None where there are none, or none that come up to ``limit``.
        if not holds(level.pool, level, seconds):
            return None
        # A table that does not count devices is cheaper, and most often enough.
        found = self._rank(level, seconds, counted=False)
        if found is not None and found[1] > level.num_devices and found <= limit:
            found = self._rank(level, seconds, counted=True)
        return None if found is None or found > limit else found

    def _rank(self, level: Level, seconds: float, *, counted: bool) -> Rank | None:
        # The time matters only through the passes.
        passes = level.pool.passes(seconds).tobytes()
        key = (level.counts, passes, level.num_devices if counted else 0)
        if key not in self.known:
            self.known[key] = self._table(level, seconds, counted=counted).rank
        return self.known[key]

    def work(self, level: Level, seconds: float, rank: Rank) -> dict[int, Work]:
        """How the devices share out the batch, of all ways with this rank."""
        # Alike devices first, without counting them first: of tables with this rank the simplest
        # answer.
        tables = (
            self._table(level, seconds, counted=counted, alike=alike, keeps=True)
            for alike in (True, False)
            for counted in (False, True)
        )
        return next(table for table in tables if table.rank == rank).work()

    def _table(
        self,
        level: Level,
        seconds: float,
        *,
        counted: bool,
        alike: bool = False,
        keeps: bool = False,
    ) -> "_Table":
        pool = level.pool
        passes = pool.passes(seconds)
        tops = pool.tops(passes)
        stride = gcd(pool.batch, *(int(size) for size in pool.sizes))
        target, limit = pool.batch // stride, level.num_devices if counted else 0
        # ``work`` needs all stages; a rank only the last two.
        stages = sum(level.counts) if keeps else 2
        if stages * (target + 1) * (limit + 1) > _MOST_ENTRIES:
            raise TooMuchWorkError
        table = _Table(target, stride, limit, keeps=keeps)
        # The types that can do most are added last, so ``work`` takes them first.
        for kind in sorted(range(len(tops)), key=lambda kind: (tops[kind], -kind)):
            if not level.counts[kind] or not tops[kind]:
                continue
            moves = _moves(pool.entries(passes, kind), stride)
            if alike:
                moves = list(_together(moves, level.counts[kind], target))
            for _ in range(1 if alike else level.counts[kind]):
                self.work_left -= len(moves) * table.size
                if self.work_left < 0:
                    raise TooMuchWorkError
                if not table.add(kind, moves):
                    break  # one device more changes nothing, nor do others
        return table


class _Table:
    """The fewest passes and devices for every number of samples, built from the last stage.

    ``limit`` is the most devices, which are counted then; 0 counts none. ``keeps`` the stages, for
    ``work``.
    """

    def __init__(self, target: int, stride: int, limit: int, *, keeps: bool) -> None:
        self.target, self.stride, self.limit, self.keeps = target, stride, limit, keeps
        self.scale = target + 1  # no plan has more devices than samples
        last = np.full((limit + 1, target + 1), _NEVER, dtype=np.int64)
        last[:, 0] = 0
        self.last = self.front = last
        self.stages: list[_Stage] = []

    @property
    def size(self) -> int:
        """Entries of one stage."""
        return int(self.last.size)

    @property
    def rank(self) -> Rank | None:
        """The best for all samples; None where they cannot add up."""
        best = int(self.front[self.limit, self.target])
        return None if best >= _NEVER else divmod(best, self.scale)

    def add(self, kind: int, moves: Sequence[_Move]) -> bool:
        """Put a stage in front; returns whether any entry became better."""
        after = self.front
        best = after.copy()
        for move in moves:
            rows = self._rows(move)
            if rows <= self.limit and move.strides <= self.target:
                # Each move shifts the whole table: one operation for all numbers of samples.
                end = self.target + 1 - move.strides
                np.minimum(
                    best[rows:, move.strides :],
                    after[: self.limit + 1 - rows, :end] + self._cost(move),
                    out=best[rows:, move.strides :],
                )
        self.front = best
        if self.keeps:
            self.stages.append(_Stage(kind, moves, best))
        return bool((best < after).any())

    def _rows(self, move: _Move) -> int:
        return move.num_devices if self.limit else 0

    def _cost(self, move: _Move) -> int:
        return move.passes * self.scale + move.num_devices

    def work(self) -> dict[int, Work]:
        """The devices' work: from the front, each stage does as much as it can."""
        found: dict[int, Work] = {}
        row, left = self.limit, self.target
        behind = [self.last, *(stage.costs for stage in self.stages[:-1])]
        # What this stage and all behind it do in all; a move is right where the rest is what is
        # behind.
        for stage, after in zip(reversed(self.stages), reversed(behind), strict=True):
            best = stage.costs[row, left]
            for move in sorted(stage.moves, key=lambda move: -move.strides):
                rows = self._rows(move)
                if rows > row or move.strides > left:
                    continue
                if after[row - rows, left - move.strides] + self._cost(move) == best:
                    each = move.strides * self.stride // move.num_devices
                    found.setdefault(stage.kind, Counter())[each] += move.num_devices
                    row, left = row - rows, left - move.strides
                    break
        return found


def _moves(entries: list[tuple[int, int]], stride: int) -> list[_Move]:
    """What one device can do, each amount in the fewest passes."""
    # A number of passes is kept once for each amount: the first, with the largest size, is the
    # fewest.
    fewest: dict[int, int] = {}
    for size, most in sorted(entries, reverse=True):  # larger sizes first need fewer passes
        for passes in range(1, most + 1):
            fewest.setdefault(passes * size // stride, passes)
    return [_Move(strides, passes, 1) for strides, passes in fewest.items()]


def _together(one: Sequence[_Move], most: int, target: int) -> Iterator[_Move]:
    """Choose alike for several devices that do the same."""
    for move in one:
        for number in range(1, min(most, target // move.strides) + 1):
            yield _Move(number * move.strides, number * move.passes, number)


def simplest(
    problem: SplitProblem,
    pool: SplitPool,
    fastest: tuple[ReplicaGroup, ...],
    limit_seconds: float,
    work_limit: float = WORK_LIMIT,
) -> tuple[ReplicaGroup, ...]:
    """The simplest plan whose predicted step is at most ``limit_seconds``.

    Args:
        problem: Profiles, pool and batch.
        pool: Their sizes and times.
        fastest: The groups of the fastest plan, which stays where none is simpler.
        limit_seconds: At least its predicted step.
        work_limit: Entries of tables that may be looked at.

    Raises:
        TooMuchWorkError: The search would look at more.
    """
    number = sum(group.num_devices for group in fastest)
    nodes = sum(group.num_devices * group.virtual_nodes for group in fastest)
    alone = (o for o in single_devices(problem) if o.step_seconds <= limit_seconds * _ROUNDING)
    single = min(alone, key=lambda one: one.group.virtual_nodes, default=None)
    search = _Search(work_limit)
    within = _levels_within(problem, pool, limit_seconds)
    best: Rank = (nodes, number)
    if single is not None:
        best = min(best, (single.group.virtual_nodes, 1))
    # No plan has fewer passes than samples over the largest size, nor fewer than two devices.
    least_nodes = -(-pool.batch // max(pool.sizes.tolist(), default=1))
    # The most devices first: a low rank found there closes the narrower levels at once.
    for level in sorted(within, key=lambda level: -level.num_devices):  # least restricted first
        if best <= (least_nodes, 2):
            break
        best = search.rank(level, _seconds_left(level, limit_seconds), best) or best
    if best == (nodes, number):
        return fastest
    if best[1] == 1 and single is not None:
        return (single.group,)
    level, seconds = _fastest_of_rank(search, within, limit_seconds, best)
    return groups_of(level.pool, search.work(level, seconds, best), seconds)


def _levels_within(problem: SplitProblem, pool: SplitPool, limit_seconds: float) -> list[Level]:
    """Every level that could hold a plan of two or more devices within the limit."""
    if sum(pool.counts) < 2:
        return []
    found = []
    for bound, level in levels(pool, 0.0):
        if bound > limit_seconds * _ROUNDING:
            break
        found.append(level)
    return found


def _seconds_left(level: Level, limit_seconds: float) -> float:
    return limit_seconds * _ROUNDING - level.overhead_seconds


def _fastest_of_rank(
    search: _Search, within: Sequence[Level], limit_seconds: float, rank: Rank
) -> tuple[Level, float]:
    """Of all plans of the least rank the fastest: its level, and its compute time."""
    best_step, best_level, best_seconds = limit_seconds, None, 0.0
    for level in within:
        bound = _seconds_left(level, best_step)
        # Only times that improve the step found so far.
        if search.rank(level, bound, rank) != rank:
            continue
        own = level.pool
        times = candidates(own, first_bound(own, level), bound)

        def has_rank(seconds: float, at: Level = level) -> bool:
            return search.rank(at, seconds, rank) == rank

        seconds = bisect(times, has_rank)
        if best_level is None or seconds + level.overhead_seconds < best_step:
            best_step = seconds + level.overhead_seconds
            best_level, best_seconds = level, seconds
    if best_level is None:
        raise AssertionError("the search lost the plan whose rank it found")
    return best_level, best_seconds
