"""Pairs of jobs as rows, and rows that differ only in their demands solved as one group.

Rows of a group run at the same rates r, so what matters is the total time t_k that the group has
at each rate. It has to be dealt out so that each of its n jobs has at most all its time and at
least its demand D. It can if and only if, for every rate u >= 0 and every set S of its jobs,

    sum_k t_k max(r_k - u, 0)  >=  sum over S of (D - u)        and  sum_k t_k <= n

(sorted times dominate sorted demands: Hardy, Littlewood and Polya). The sets that matter hold the
jobs with D > u, at u = 0 or a rate that is used; few of them bind. A price w of such a
constraint is a price w of the throughput of every job of S, and w u of its time.

    two jobs that demand 1 and 3, rates 4 and 2; the group has 0.5 of rate 4 and 1 of rate 2
    u = 0: 0.5 x 4 + 1 x 2 = 4 >= 1 + 3; u = 2: 0.5 x 2 = 1 >= 3 - 2: it can be dealt out
    the first gets 0.5 of rate 2; the second 0.5 of rate 2 and 0.5 of rate 4: 1 + 2 = 3

To deal the times out, take the jobs from the least demand up. Each gets adjacent rates, in order
of speed, with just the mean that it demands (or the slowest that are left, if these suffice):
what is left then still suffices for the others.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..program import Bools, Floats, FractionProgram, Ints, equal_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """The rows that may share, and what sharing earns.

    ``kind`` [rows]; ``rate`` [kinds, kinds, columns] of the first kind beside the second;
    ``worth`` [rows, columns] of a step to the objective; ``charge`` [columns] is what holding
    one unit of a column costs it.
    """

    kind: Ints
    rate: Floats
    worth: Floats
    charge: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """Total time of pairs of rows on columns: row ``a``, row ``b``, ``column``, ``time``."""

    a: Ints
    b: Ints
    column: Ints
    time: Floats


class Partners:
    """Members by kind, and for each kind its partners, in tables of equal width.

    ``rate`` [kinds, partners, columns] is a kind's beside its partner; ``of`` [members] numbers
    the kinds that have members; ``alone`` [members] may not pair with themselves.
    """

    def __init__(self, rate: Floats, kind: Ints, runs: Bools, usage: Floats, alone: Bools) -> None:
        """Build the tables; ``rate`` [kinds, kinds, columns], ``kind`` and the others by member."""
        names, first, of = np.unique(kind, return_index=True, return_inverse=True)
        self.of: Ints = of.reshape(-1)
        self.alone, self.usage = alone, usage
        self.order = np.argsort(self.of, kind="stable")
        self.starts = np.searchsorted(self.of[self.order], np.arange(len(names)))
        # [kinds, kinds, columns] of kinds that have members.
        both = rate[names[:, None], names]
        fits = ((both > 0) | (both.transpose(1, 0, 2) > 0)).any(axis=2)
        # Two share a column only if they hold as much of it.
        fits &= (usage[first][:, None] == usage[first][None]).all(axis=2)
        most = max(int(fits.sum(axis=1).max(initial=0)), 1)
        # Each kind's partners first, in order; what follows is filler up to the width of the
        # fullest.
        self.partner = np.argsort(~fits, axis=1, kind="stable")[:, :most]
        rows = np.arange(len(names))[:, None]
        there = fits[rows, self.partner]
        self.rate = both[rows, self.partner]
        back = both[self.partner, rows]
        # Where a kind stands among its partner's partners: so both sides of a pair find each
        # other.
        place = np.cumsum(fits, axis=1) - 1
        self.back = np.where(there, place[self.partner, rows], 0)
        # -1: a kind does not pair with itself.
        self.own = np.where(np.diagonal(fits), np.diagonal(place), -1)
        self.shut = ~(((self.rate > 0) | (back > 0)) & there[:, :, None])
        self.barred = self.shut[self.of] | ~runs[:, None, :]
        self.single = len(names) == len(kind)
        self.ordered = self.single and bool((self.of == np.arange(len(kind))).all())
        self.place = self.partner * most + self.back

    def lines(self, slope: Floats, price: Floats) -> Floats:
        """What members earn beside each partner [members, partners, columns].

        ``slope`` is of a step [members, columns], ``price`` of time [members].
        """
        return self.masked(slope[:, None, :] * self.rate[self.of] - price[:, None, None])

    def masked(self, value: Floats) -> Floats:
        """The values, minus infinity where the two may not share."""
        value[self.barred] = -np.inf
        return value

    def best(self, value: Floats) -> Floats:
        """The most that a member of a kind earns [kinds, partners, columns]."""
        if self.single:
            return value if self.ordered else value[self.order]
        most: Floats = np.maximum.reduceat(value[self.order], self.starts, axis=0)
        return most

    def beside(self, value: Floats) -> Floats:
        """What each member's best companion earns [members, partners, columns]."""
        best = self.best(value)
        earned = best.reshape(-1, best.shape[2])[self.place].reshape(best.shape)
        earned[self.shut] = -np.inf
        earned = earned if self.ordered else earned[self.of]
        owned = np.flatnonzero(self.own[self.of] >= 0)
        if len(owned):
            # The best of a member's own kind may be itself, which is no company if it is a single
            # job.
            earned[owned, self.own[self.of[owned]]] = self._own(value)[0][owned]
        return earned

    def _own(self, value: Floats) -> tuple[Floats, Ints]:
        """The best companion of a member's own kind: its worth and who [members, columns]."""
        members = np.arange(len(value))
        own = self.own[self.of]
        mine = np.where((own >= 0)[:, None], value[members, np.maximum(own, 0)], -np.inf)
        top, who = self._first(mine)
        # Only the best can be the member itself, so the second best is enough.
        itself = self.alone[:, None] & (who == members[:, None])
        second, after = self._first(np.where(itself, -np.inf, mine))
        return np.where(itself, second, top), np.where(itself, after, who)

    def _first(self, value: Floats) -> tuple[Floats, Ints]:
        """For each member the best of its kind, the first of equals [members, columns]."""
        best = np.maximum.reduceat(value[self.order], self.starts, axis=0)[self.of]
        # Of equal earnings the first member, so that answers do not depend on the order of sums.
        ties = np.where(value == best, np.arange(len(value))[:, None], len(value) - 1)
        who: Ints = np.minimum.reduceat(ties[self.order], self.starts, axis=0)
        return best, who[self.of]

    def _companion(self, value: Floats, member: Ints, partner: Ints, column: Ints) -> Ints:
        """The companions that earn most beside members, at these partners and columns [some]."""
        kind = self.of[member]
        other, back = self.partner[kind, partner], self.back[kind, partner]
        if self.single:
            who = self.order[other]
        else:
            # Kinds have unlike numbers of members: padded to the largest, the rest never wins.
            size = np.diff(np.append(self.starts, len(value)))
            width = np.arange(int(size.max()))
            some = self.order[np.minimum(self.starts[other, None] + width, len(value) - 1)]
            earned = value[some, back[:, None], column[:, None]]
            earned = np.where(width < size[other, None], earned, -np.inf)
            who = some[np.arange(len(member)), earned.argmax(axis=1)]
        itself = partner == self.own[kind]
        if itself.any():
            who = np.where(itself, self._own(value)[1][member, column], who)
        return who

    def surplus(self, value: Floats, rent: Floats) -> float:
        """The most that any pair earns above its rent [columns]; no member twice if alone."""
        return float(self._earned(value, rent).max(initial=-np.inf))

    def _earned(self, value: Floats, rent: Floats) -> Floats:
        earned = self.beside(value)
        earned += value
        earned -= (self.usage * rent)[:, None, :]
        return earned

    def paying(self, value: Floats, rent: Floats, tolerance: float) -> set[tuple[int, int, int]]:
        """For every member the pair (a, b, column) that earns most, where it earns anything."""
        flat = self._earned(value, rent).reshape(len(value), -1)
        top = flat.argmax(axis=1)
        unit = np.abs(value).max(axis=(1, 2), where=np.isfinite(value), initial=1e-300)
        # What counts as a gain is relative to the largest earning of the kind.
        unit = np.maximum.reduceat(unit[self.order], self.starts)[self.of]
        member = np.flatnonzero(flat[np.arange(len(value)), top] > tolerance * unit)
        partner, column = np.divmod(top[member], value.shape[2])
        other = self._companion(value, member, partner, column)
        low, high = np.minimum(member, other), np.maximum(member, other)
        return {*zip(low.tolist(), high.tolist(), column.tolist(), strict=True)}


# A job that shares with its own group must find others there for all but this part of that time.
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Groups:
    """``of`` [rows] is each row's group, ``first`` [groups] the first row of each."""

    of: Ints
    first: Ints

    @property
    def number(self) -> int:
        """How many groups there are."""
        return len(self.first)

    def split(self, groups: set[int]) -> "Groups":
        """The groups, with some taken apart into their rows."""
        apart = np.isin(self.of, sorted(groups))
        return _numbered(np.where(apart, self.number + np.arange(len(self.of)), self.of))


def grouped(program: FractionProgram, pairing: Pairing) -> Groups:
    """Rows alike but for count, level and floor."""
    table: Floats = np.column_stack(
        (pairing.kind.astype(np.float64), program.rate, program.usage, program.gain, pairing.worth)
    )  # fmt: skip
    return _numbered(equal_rows(table))


def each_apart(rows: int) -> Groups:
    """Every row a group."""
    return Groups(np.arange(rows), np.arange(rows))


def _numbered(of: Ints) -> Groups:
    of = equal_rows(of[:, None].astype(np.float64))
    return Groups(of, np.unique(of, return_index=True)[1])


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Times of rows: ``x`` [rows, columns] of one job, and totals of pairs.

    ``clashes`` are groups whose jobs would have to share with themselves.
    """

    x: Floats
    pairs: PairTimes
    clashes: set[int]


def deal(
    program: FractionProgram,
    pairing: Pairing,
    groups: Groups,
    singles: Floats,
    pairs: PairTimes,
    z: float,
) -> RowTimes:
    """Deal the times of groups out to their rows; O(rows + times) after sorting.

    ``singles`` [groups, columns] is total time alone, ``pairs`` that of pairs; ``z`` the level
    reached.
    """
    demand = program.demand(z)
    if groups.number == len(groups.of):
        x = singles[groups.of] / program.count[:, None]
        first = groups.first
        return RowTimes(x, PairTimes(
            a=first[pairs.a], b=first[pairs.b], column=pairs.column, time=pairs.time
        ), set())  # fmt: skip
    kind = pairing.kind[groups.first]
    rate_a = pairing.rate[kind[pairs.a], kind[pairs.b], pairs.column].tolist()
    rate_b = pairing.rate[kind[pairs.b], kind[pairs.a], pairs.column].tolist()
    pieces = _Pieces(program, groups, demand)
    # What a group has: (rate, total time, where from).
    for g, c in zip(*(each.tolist() for each in np.nonzero(singles > 0)), strict=True):
        pieces.add(g, float(program.rate[groups.first[g], c]), float(singles[g, c]), ("x", c))
    a, b, time = pairs.a.tolist(), pairs.b.tolist(), pairs.time.tolist()
    for i in range(len(a)):
        if a[i] == b[i]:
            # Within a group both sides are its own, so its members get twice the time.
            pieces.add(a[i], rate_a[i], 2.0 * time[i], ("a", i))
        else:
            pieces.add(a[i], rate_a[i], time[i], ("a", i))
            pieces.add(b[i], rate_b[i], time[i], ("b", i))
    dealt = pieces.deal()
    x, clashes = np.zeros_like(program.rate), set[int]()
    out: list[tuple[int, int, int, float]] = []
    column = pairs.column.tolist()
    for (side, i), parts in dealt.items():
        if side == "x":
            for row, part in parts:
                x[row, i] += part / program.count[row]
        elif side == "a" and a[i] == b[i]:
            # A job cannot be beside itself for longer than others of its group are there.
            alone = max((part for row, part in parts if program.count[row] < 2), default=0.0)
            if alone > time[i] * (1.0 + SLACK):
                clashes.add(a[i])
            out.extend(
                (m, n, column[i], part)
                for m, n, part in _folded(parts, time[i])
                if m != n or program.count[m] > 1
            )
        elif side == "a":
            other = dealt["b", i]
            out.extend((m, n, column[i], part) for m, n, part in _side_by_side(parts, other))
    return RowTimes(x, _totals(out), clashes)


class _Pieces:
    """The times of each group at each rate, to be dealt out."""

    def __init__(self, program: FractionProgram, groups: Groups, demand: Floats) -> None:
        # Within a group by demand, the least first: what the module's head deals by.
        order = np.lexsort((demand, groups.of))
        starts = np.searchsorted(groups.of[order], np.arange(groups.number + 1)).tolist()
        rows, count, needs = order.tolist(), program.count[order].tolist(), demand[order].tolist()
        self.jobs = [
            list(zip(rows[i:j], count[i:j], needs[i:j], strict=True))
            for i, j in zip(starts[:-1], starts[1:], strict=True)
        ]
        self.times: list[list[tuple[float, float, tuple[str, int]]]] = [[] for _ in self.jobs]

    def add(self, group: int, rate: float, time: float, name: tuple[str, int]) -> None:
        """A group has a time at a rate."""
        self.times[group].append((rate, time, name))

    def deal(self) -> dict[tuple[str, int], list[tuple[int, float]]]:
        """Which rows have how much of each time; rows from the least demand up."""
        answer: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        for jobs, times in zip(self.jobs, self.times, strict=True):
            # A single row gets all its group's times.
            if len(jobs) == 1:
                for _, time, name in times:
                    answer[name].append((jobs[0][0], time))
            elif times:
                # Time that nobody uses is time at rate 0: so each job gets exactly one unit of
                # time.
                idle = sum(count for _, count, _ in jobs) - sum(time for _, time, _ in times)
                times.sort(key=lambda each: each[0])
                for row, part, name in _dealt(jobs, [(0.0, max(idle, 0.0), ("", 0)), *times]):
                    if name[0]:
                        answer[name].append((row, part))
        return answer


def _dealt(
    jobs: list[tuple[int, float, float]], times: list[tuple[float, float, tuple[str, int]]]
) -> Iterator[tuple[int, float, tuple[str, int]]]:
    """Times in order of speed, dealt to (row, count, demand) in order of demand."""
    # What earlier jobs left below their own rates stays in ``below``. Later jobs need more, so
    # they never reach below all of it.
    below: list[list[float]] = []  # [rate, time, place], slowest first
    above = [[rate, time, place] for place, (rate, time, _) in enumerate(times)]
    above.reverse()  # slowest last
    for row, count, demand in jobs:
        window: list[list[float]] = []
        # The slowest times at hand: those just below the gap, then those just above it.
        mass, reached = _take(window, below, count)
        window.reverse()
        start = 0
        mass, reached = _take(window, above, count, mass, reached)
        # Slide up until the mean is what the job demands.
        # The slowest part of the window is swapped for the slowest above it: the times stay
        # adjacent.
        while reached < demand * count and above:
            low, high = window[start], above[-1]
            gain, step = high[0] - low[0], min(low[1], high[1])
            # The last swap takes only the part that the demand still lacks.
            done = gain * step >= demand * count - reached
            if done:
                step = (demand * count - reached) / gain
            reached += step * gain
            low[1] -= step
            _put(below, low[0], step, low[2])
            _put(window, high[0], step, high[2])
            high[1] -= step
            if high[1] <= 0.0:
                above.pop()
            if low[1] <= 0.0:
                start += 1
            if done:
                break
        for _, part, place in window[start:]:
            if part > 0.0:
                yield row, part, times[int(place)][2]


def _take(
    window: list[list[float]],
    pieces: list[list[float]],
    count: float,
    mass: float = 0.0,
    reached: float = 0.0,
) -> tuple[float, float]:
    """Move times from the end of the pieces to the window until it holds ``count`` of time."""
    # Returned is what it then holds: time, and time by rate.
    while pieces and mass < count:
        piece = pieces.pop()
        part = min(piece[1], count - mass)
        if part < piece[1]:
            pieces.append([piece[0], piece[1] - part, piece[2]])
        window.append([piece[0], part, piece[2]])
        mass, reached = mass + part, reached + part * piece[0]
    return mass, reached


def _put(pieces: list[list[float]], rate: float, time: float, place: float) -> None:
    # Parts of one time stay one entry.
    if pieces and pieces[-1][2] == place:
        pieces[-1][1] += time
    else:
        pieces.append([rate, time, place])


def _side_by_side(
    first: list[tuple[int, float]], second: list[tuple[int, float]]
) -> Iterator[tuple[int, int, float]]:
    """Two lists of (row, time) laid end to end and cut at each other's borders."""
    i = j = 0
    left, right = first[0][1], second[0][1]
    while True:
        step = min(left, right)
        if step > 0.0:
            yield first[i][0], second[j][0], step
        left, right = left - step, right - step
        if left <= 0.0:
            i += 1
            if i == len(first):
                return
            left = first[i][1]
        if right <= 0.0:
            j += 1
            if j == len(second):
                return
            right = second[j][1]


def _folded(parts: list[tuple[int, float]], half: float) -> Iterator[tuple[int, int, float]]:
    """A list of (row, time) beside itself, shifted by half its length: no row meets itself."""
    first: list[tuple[int, float]] = []
    second: list[tuple[int, float]] = []
    left = half
    for row, part in parts:
        here = min(part, left)
        if here > 0.0:
            first.append((row, here))
        if part > here:
            second.append((row, part - here))
        left -= here
    if not second:
        return iter(())
    return _side_by_side(first, second)


def _totals(parts: list[tuple[int, int, int, float]]) -> PairTimes:
    total: dict[tuple[int, int, int], float] = defaultdict(float)
    for a, b, c, time in parts:
        total[min(a, b), max(a, b), c] += time
    keys = sorted(total)
    table = np.array(keys, dtype=np.int64).reshape(-1, 3)
    return PairTimes(
        a=table[:, 0],
        b=table[:, 1],
        column=table[:, 2],
        time=np.array([total[key] for key in keys]),
    )
