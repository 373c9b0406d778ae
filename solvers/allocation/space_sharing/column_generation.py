"""Programs with space sharing: columns for pairs of rows, generated when their reduced cost pays.

Rows that differ only in what they demand are solved as one group (``groups``). The simplex method
of HiGHS solves the program over the columns and constraints at hand (``Master``); constraints
join until the groups' times suffice for each of their rows, pairs until none earns anything at
the program's prices (``pairs``). Then the times are dealt out to the rows.

    one GPU; a and b do 1 a second alone, 0.8 and 0.7 together; maximise z, both at least z
    alone: z = 1/2, prices 1/2 of each throughput and 1/2 of the GPU
    the pair earns 0.8 / 2 + 0.7 / 2 - 1/2 = 0.25 > 0 and joins: together 10/11 of the time, b alone
    1/11: z = 8/11, prices at which no column pays
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ....schema.errors import BackendError
from ...effort import never
from ...lp import LinearAnswer, LinearSession
from ..program import Floats, FractionProgram, Ints, Solution, dual_bound, gap_between
from .groups import Groups, Pairing, PairTimes, Partners, deal, each_apart, grouped

# A group lacks throughput where a constraint is broken by this part of its best rates.
BROKEN = 2e-9
TOLERANCE = 1e-9


class RowPrices(NamedTuple):
    """Prices of rows: time ``u``, throughput ``y`` [rows], and of ``resources``."""

    u: Floats
    y: Floats
    resources: Floats


class Master:
    """The program over singles and the pairs added so far, in totals of groups.

    Columns: z first (0 where there is none), then singles and pairs as they came. Rows: time of
    each group, resources, then demands: of each group the plain one (all its jobs, u = 0) first.
    """

    def __init__(
        self,
        program: FractionProgram,
        pairing: Pairing,
        groups: Groups,
        row: Floats | None = None,
        partners: Partners | None = None,
    ) -> None:
        """Start with singles; demands are measured in ``row`` [rows], else in the best rates."""
        self.program, self.pairing, self.groups = program, pairing, groups
        self.first = groups.first
        # Jobs in each group.
        self.count = np.bincount(groups.of, weights=program.count)
        self.kind = pairing.kind[self.first]
        # HiGHS's tolerances are absolute, so throughput is measured in what a row can reach.
        best = np.maximum(program.rate.max(axis=1), 1e-300) if row is None else row
        self.scale = best[self.first]
        self.usage, self.worth = program.usage[self.first], pairing.worth[self.first]
        self.gain = program.gain[self.first]
        self.gain_unit = float(np.abs(program.gain).max()) or 1.0
        runs = program.rate[self.first] > 0
        self.partners = partners or Partners(
            pairing.rate, self.kind, runs, self.usage, self.count < 2
        )
        number, kinds = groups.number, len(program.capacity)
        self.demands_at = number + kinds
        # Demand j: group, rate u, and members as members[ends[j]:ends[j + 1]].
        order = np.argsort(groups.of, kind="stable")
        self.cut_group, self.cut_rate = np.arange(number), np.zeros(number)
        self.members = order
        self.ends = np.concatenate(([0], np.cumsum(np.bincount(groups.of))))
        self.known: set[tuple[float, bytes]] = set()
        self.session = LinearSession(generates_columns=True)
        # Rows in this order: the time of each group, each resource, then demands, which join.
        self.session.add_rows(np.full(number, -np.inf), self.count)
        self.session.add_rows(np.full(kinds, -np.inf), program.capacity)
        self._measure()
        self.session.add_rows(self.low, np.full(number, np.inf))
        rows, values = self._level_column()
        kept = values != 0
        self.level_values = values
        cost = np.array([1.0 if self.program.level_weight else 0.0])
        self.session.add_columns(cost, np.zeros(1), rows[kept], values[kept])
        m, c = np.nonzero(program.rate[self.first] > 0)
        # A single has its group as both sides, so both arrays have one entry a column.
        self.a, self.b, self.c, self.singles = m, m, c, len(m)
        self.rate_a, self.rate_b = program.rate[self.first][m, c], np.zeros(len(m))
        self._add_columns(m, None, c, self.rate_a, self.rate_b)

    def ask(self, program: FractionProgram) -> None:
        """Change levels, floors and demands; the next solve starts from the last basis."""
        before = self.low
        self.program = program
        self._measure()
        changed = np.flatnonzero(self.low != before)
        self.session.set_rows(
            self.demands_at + changed, self.low[changed], np.full(len(changed), np.inf)
        )
        rows, values = self._level_column()
        # Only what changed goes to HiGHS: so its basis stays, and the next solve takes few steps.
        for i in np.flatnonzero(values != self.level_values).tolist():
            self.session.set_coefficient(int(rows[i]), 0, float(values[i]))
        self.level_values = values

    def _measure(self) -> None:
        """What demands must reach at least, and what a unit of z asks of them [demands]."""
        p = self.program
        asked = p.demands[self.members]
        # [3, members] jobs, floors and levels, then their sums by demand: members of a demand
        # stand together.
        count = np.where(asked, p.count[self.members], 0.0)
        sums = np.stack((count, count * p.floor[self.members], count * p.level[self.members]))
        number, floor, level = np.add.reduceat(sums, self.ends[:-1], axis=1)
        scale = self.scale[self.cut_group]
        low = (floor - number * self.cut_rate) / scale
        self.low = np.where(number > 0, low, -np.inf)
        self.levels = level / scale

    def _level_column(self) -> tuple[Ints, Floats]:
        """Choose the unit of z anew; the rows and values of its column in that unit."""
        p = self.program
        # z is measured so that its largest coefficient is 1.
        self.unit = 1.0 / (float(np.abs(self.levels).max()) or 1.0)
        if not p.level_weight:
            return np.zeros(0, np.int64), np.zeros(0)
        rows = self.groups.number + np.arange(len(p.capacity) + len(self.levels))
        return rows, np.concatenate((-p.level_capacity, -self.levels)) * self.unit

    def _add_columns(self, a: Ints, b: Ints | None, c: Ints, ra: Floats, rb: Floats) -> None:
        p, number = self.program, len(a)
        place = np.arange(number)
        entries: list[tuple[Ints, Ints, Floats]] = [(place, a, np.ones(number))]
        sides = [(a, ra)]
        if b is None:
            cost = self.gain[a, c]
        else:
            entries.append((place, b, np.ones(number)))
            sides.append((b, rb))
            cost = self.worth[a, c] * ra + self.worth[b, c] * rb
            cost = cost - self.pairing.charge[c] * self.usage[a, c]
        for k in range(len(p.capacity)):
            held = self.usage[a, c] * p.resources[k, c]
            entries.append((place, np.full(number, self.groups.number + k), held))
        order = np.argsort(self.cut_group, kind="stable")
        each = np.bincount(self.cut_group, minlength=self.groups.number)
        start = np.concatenate(([0], np.cumsum(each)[:-1]))
        for group, rate in sides:
            n = each[group]
            # Each column meets all demands of its group: ranges of unlike length, laid out one
            # after another.
            which = np.repeat(start[group] - np.cumsum(n) + n, n) + np.arange(int(n.sum()))
            cut = order[which]
            # A demand at rate u counts only what a column does beyond u for the time spent.
            above = np.maximum(np.repeat(rate, n) - self.cut_rate[cut], 0.0)
            above = above / self.scale[self.cut_group[cut]]
            entries.append((np.repeat(place, n), self.demands_at + cut, above))
        self.session.add_columns(cost / self.gain_unit, *_compressed(entries, number))

    def add_pairs(self, pairs: set[tuple[int, int, int]]) -> None:
        """Add pairs (group, group, column) that are not there yet."""
        if not pairs:
            return
        a, b, c = np.array(sorted(pairs), dtype=np.int64).T
        # [pairs] the rate of a beside b, then that of b beside a.
        ra = self.pairing.rate[self.kind[a], self.kind[b], c]
        rb = self.pairing.rate[self.kind[b], self.kind[a], c]
        self._add_columns(a, b, c, ra, rb)
        self.a, self.b = np.concatenate((self.a, a)), np.concatenate((self.b, b))
        self.c = np.concatenate((self.c, c))
        self.rate_a = np.concatenate((self.rate_a, ra))
        self.rate_b = np.concatenate((self.rate_b, rb))

    def all_pairs(self) -> set[tuple[int, int, int]]:
        """Every pair of groups that may share."""
        number = np.arange(self.groups.number)
        runs = self.program.rate[self.first] > 0
        both = self.pairing.rate[self.kind[:, None], self.kind[None, :]]
        useful = (both > 0) | (both.transpose(1, 0, 2) > 0)
        useful &= runs[:, None, :] & runs[None, :, :]
        useful &= self.usage[:, None, :] == self.usage[None, :, :]
        # Each pair once, as (low, high).
        useful &= (number[:, None] <= number)[:, :, None]
        alone = np.flatnonzero(self.count < 2)
        # A group of one job cannot pair with itself.
        useful[alone, alone] = False
        return {*zip(*(side.tolist() for side in np.nonzero(useful)), strict=True)}

    def solve(self) -> LinearAnswer:
        """The optimum over the columns and constraints at hand.

        Raises:
            BackendError: HiGHS finds none.
        """
        answer = self.session.solve()
        if answer is None:
            raise BackendError("HiGHS found no optimum of the allocation program")
        number = self.groups.number
        unit = self.unit if self.program.level_weight else self.gain_unit
        # Rows <= have prices >= 0 in a maximisation, demands (>=) the opposite; what rounding
        # turns is 0. Prices are given back in the units of rows.
        self.time_price = np.maximum(answer.prices[:number], 0.0) * unit
        self.resource_price = np.maximum(answer.prices[number : self.demands_at], 0.0) * unit
        paid = np.maximum(-answer.prices[self.demands_at :], 0.0) * unit
        self.cut_price = paid / self.scale[self.cut_group]
        self.values = np.maximum(answer.values, 0.0)
        return answer

    def separate(self) -> bool:
        """Add the constraint of each group that the answer breaks most; whether there was one."""
        # Where each row is a group of its own, its plain demand says all.
        if self.groups.number == len(self.groups.of):
            return False
        p, of = self.program, self.groups.of
        z = float(self.values[0]) * self.unit if p.level_weight else 0.0
        demand = p.demand(z)
        # All time spent, alone and by both sides of pairs, the fastest first in each group.
        time, pair = self.values[1:], slice(self.singles, None)
        used = np.concatenate((self.a, self.b[pair]))
        rate = np.concatenate((self.rate_a, self.rate_b[pair])) / self.scale[used]
        spent = np.concatenate((time, time[pair]))
        kept = spent > 0
        used, rate, spent = used[kept], rate[kept], spent[kept]
        order = np.lexsort((-rate, used))
        used, rate, spent = used[order], rate[order], spent[order]
        # For each rate u: what the group does beyond u, the sum of time x (rate - u) over what is
        # faster.
        had = _running(used, spent * rate) - rate * _running(used, spent)
        # Jobs by group, from the largest demand down; those above a rate are its set.
        jobs = np.lexsort((-demand, of))
        count, wanted = p.count[jobs], demand[jobs] / self.scale[of[jobs]]
        # (group, demand) as one ascending number: demands take less than half of the distance
        # between groups, so these never mix.
        height = 4.0 * float(rate.max(initial=1.0))
        place = of[jobs] - np.minimum(wanted, 0.5 * height) / height
        start = np.searchsorted(of[jobs], used)
        end = np.maximum(np.searchsorted(place, used - rate / height), start)
        number = np.concatenate(([0.0], np.cumsum(count)))
        total = np.concatenate(([0.0], np.cumsum(count * wanted)))
        # Jobs that demand more than u need, beyond u for all their time, more than the group has.
        lacking = total[end] - total[start] - rate * (number[end] - number[start]) - had
        broken = np.flatnonzero(lacking > BROKEN)
        if not len(broken):
            return False
        broken = broken[np.argsort(-lacking[broken], kind="stable")]
        # One constraint a group in each round, the one broken most: with it the others often hold.
        _, top = np.unique(used[broken], return_index=True)
        chosen = broken[top]
        groups, rates = used[chosen], rate[chosen] * self.scale[used[chosen]]
        sets = [jobs[start[i] : end[i]] for i in chosen.tolist()]
        # What is there already is broken by rounding alone.
        keys = [(u, rows.tobytes()) for u, rows in zip(rates.tolist(), sets, strict=True)]
        fresh = [i for i, key in enumerate(keys) if key not in self.known]
        self.known.update(keys)
        if fresh:
            self._add_demands(groups[fresh], rates[fresh], [sets[i] for i in fresh])
        return bool(fresh)

    def _add_demands(self, groups: Ints, rates: Floats, sets: list[Ints]) -> None:
        before = len(self.cut_group)
        self.cut_group = np.concatenate((self.cut_group, groups))
        self.cut_rate = np.concatenate((self.cut_rate, rates))
        self.members = np.concatenate((self.members, *sets))
        lengths = np.cumsum([len(rows) for rows in sets])
        self.ends = np.concatenate((self.ends, self.ends[-1] + lengths))
        self._measure()
        starts, columns, values = [], [], []
        at = 0
        # The same entries as in ``_add_columns``, by row instead of by column.
        for j, (g, u) in enumerate(zip(groups.tolist(), rates.tolist(), strict=True), before):
            mine, other = np.flatnonzero(self.a == g), np.flatnonzero(self.b == g)
            # Singles name their group on both sides; they count once.
            other = other[other >= self.singles]
            value = np.zeros(len(self.a))
            value[mine] += np.maximum(self.rate_a[mine] - u, 0.0)
            value[other] += np.maximum(self.rate_b[other] - u, 0.0)
            index = np.flatnonzero(value)
            level = [-self.levels[j] * self.unit] if self.program.level_weight else []
            starts.append(at)
            columns.append(np.concatenate(([0][: len(level)], index + 1)))
            values.append(np.concatenate((level, value[index] / self.scale[g])))
            at += len(columns[-1])
        self.session.add_full_rows(
            self.low[before:], np.array(starts), np.concatenate(columns), np.concatenate(values)
        )
        if self.program.level_weight:
            fresh = -self.levels[before:] * self.unit
            self.level_values = np.concatenate((self.level_values, fresh))

    def paying(self) -> set[tuple[int, int, int]]:
        """For every group the pair that would earn most, where it earns anything."""
        plain = self.cut_price[: self.groups.number]
        # [groups, partner kinds, columns] what a group earns beside each kind: plain demands at
        # the full rate, others beyond their rate.
        slope = plain[:, None] + self.worth
        value = slope[:, None, :] * self.partners.rate[self.partners.of]
        extra = np.flatnonzero(self.cut_price[self.groups.number :] > 0) + self.groups.number
        for j in extra.tolist():
            g = self.cut_group[j]
            above = np.maximum(self.partners.rate[self.partners.of[g]] - self.cut_rate[j], 0.0)
            value[g] += self.cut_price[j] * above
        value -= self.time_price[:, None, None]
        rent = self.resource_price @ self.program.resources + self.pairing.charge
        return self.partners.paying(self.partners.masked(value), rent, TOLERANCE)

    def prices(self) -> RowPrices:
        """What the answer's prices mean for rows."""
        rows = len(self.program.count)
        number = np.diff(self.ends)
        asked = self.program.demands[self.members]
        each = np.where(asked, np.repeat(self.cut_price, number), 0.0)
        # A demand's price falls on all its members alike; its rate times the price is a price of
        # their time.
        y: Floats = np.bincount(self.members, weights=each, minlength=rows).astype(np.float64)
        each = each * np.repeat(self.cut_rate, number)
        u: Floats = np.bincount(self.members, weights=each, minlength=rows).astype(np.float64)
        return RowPrices(u + self.time_price[self.groups.of], y, self.resource_price)

    def times(self) -> tuple[Floats, PairTimes]:
        """Totals of the answer: alone [groups, columns], and of pairs."""
        time = self.values[1:]
        alone = np.zeros((self.groups.number, self.program.rate.shape[1]))
        s = self.singles
        alone[self.a[:s], self.c[:s]] = time[:s]
        used = s + np.flatnonzero(time[s:] > 0)
        return alone, PairTimes(
            a=self.a[used], b=self.b[used], column=self.c[used], time=time[used]
        )


def _running(group: Ints, value: Floats) -> Floats:
    """Running sums within groups that stand together, each value included."""
    total = np.cumsum(value)
    # The place where each group begins, for every entry.
    start = np.searchsorted(group, group)
    running: Floats = total - (total[start] - value[start])
    return running


def _compressed(entries: list[tuple[Ints, Ints, Floats]], number: int) -> tuple[Ints, Ints, Floats]:
    """Entries (columns, rows, values) as starts of columns, rows and values."""
    column = np.concatenate([each for each, _, _ in entries])
    row = np.concatenate([each for _, each, _ in entries])
    value = np.concatenate([each for _, _, each in entries])
    # A group that pairs with itself holds both members: equal entries are added up.
    height = int(row.max()) + 1 if len(row) else 1
    key, place = np.unique(column * height + row, return_inverse=True)
    total = np.bincount(place.reshape(-1), weights=value)
    kept = total != 0
    key, total = key[kept], total[kept]
    starts = np.searchsorted(key // height, np.arange(number))
    return starts, key % height, total


__all__ = [
    "PairProgram", "PairTimes", "Pairing", "bound_with_pairs", "no_pairing", "pair_time", "solve",
    "spare_prices", "throughput_with_pairs",
]  # fmt: skip

MAX_ROUNDS = 500
# Up to so many rows need no groups, and up to so many groups all pairs at once are cheaper than
# generating them.
FULL_ROWS = 40


def solve(
    program: FractionProgram, pairing: Pairing, should_stop: Callable[[], bool] = never
) -> tuple[Solution, PairTimes]:
    """Maximise over singles and pairs; exact, a vertex of the groups' optimal face.

    ``should_stop`` is asked before pairs join; True ends with those at hand.

    Raises:
        BackendError: HiGHS finds no optimum.
    """
    return PairProgram(program, pairing, should_stop=should_stop).solve(program)


class PairProgram:
    """A program held open: other levels, floors and demands, solved from the last basis."""

    def __init__(
        self,
        program: FractionProgram,
        pairing: Pairing,
        seed: PairTimes | None = None,
        row: Floats | None = None,
        should_stop: Callable[[], bool] = never,
    ) -> None:
        """Start with no pairs, or few.

        ``seed`` are pairs of rows to start from. With ``row`` [rows], what demands are measured
        in, every row is a group of its own.
        """
        self._should_stop = should_stop
        self._pairing, self._row = pairing, row
        self._partners = partners_of(program, pairing)
        rows = len(program.count)
        apart = row is not None or rows <= FULL_ROWS
        groups = each_apart(rows) if apart else grouped(program, pairing)
        self._start(program, groups, _triples(program, groups, seed))

    def _start(
        self, program: FractionProgram, groups: Groups, seed: set[tuple[int, int, int]]
    ) -> None:
        self._groups = groups
        self._master = master = Master(
            program, self._pairing, groups, self._row,
            self._partners if groups.number == len(groups.of) else None,
        )  # fmt: skip
        self._whole = groups.number <= FULL_ROWS
        self._known = master.all_pairs() if self._whole else seed
        master.add_pairs(self._known)

    def solve(self, program: FractionProgram) -> tuple[Solution, PairTimes]:
        """Maximise a program that differs from the first in levels, floors and demands alone.

        Raises:
            BackendError: HiGHS finds no optimum.
        """
        if program is not self._master.program:
            self._master.ask(program)
        rounds = 0
        while True:
            rounds += self._optimise()
            master = self._master
            z = float(master.values[0]) * master.unit if master.program.level_weight else 0.0
            # Totals of groups become times of rows; a clash is a job that the totals would pair
            # with itself.
            dealt = deal(program, self._pairing, self._groups, *master.times(), z)
            if not dealt.clashes:
                break
            # A job would share with itself: its group is taken apart, and solved again.
            apart = self._groups.split(dealt.clashes)
            self._start(program, apart, _triples(program, apart, dealt.pairs))
        return _read(
            program, self._pairing, self._partners, dealt.x, dealt.pairs, master.prices(), rounds
        )

    def _optimise(self) -> int:
        master, rounds = self._master, 0
        while True:
            self._bounded()
            rounds += 1
            fresh = set() if self._whole else master.paying() - self._known
            if not fresh or rounds >= MAX_ROUNDS or self._should_stop():
                return rounds
            self._known |= fresh
            master.add_pairs(fresh)

    def _bounded(self) -> None:
        """Solve, adding constraints until none is violated."""
        try:
            self._separated()
        except BackendError:
            # Floors may be out of reach for the pairs at hand.
            program = self._master.program
            if self._whole or not program.floor.any():
                raise
            fresh = _pairs_for_floors(program, self._pairing, self._groups) - self._known
            if not fresh:
                raise
            self._known |= fresh
            self._master.add_pairs(fresh)
            self._separated()

    def _separated(self) -> None:
        for _ in range(MAX_ROUNDS):
            self._master.solve()
            if not self._master.separate():
                return
        raise BackendError("the allocation program's constraints found no end")


def _triples(
    program: FractionProgram, groups: Groups, pairs: PairTimes | None
) -> set[tuple[int, int, int]]:
    """Pairs of rows as pairs of groups; no job is its own partner."""
    if pairs is None:
        return set()
    alone = np.bincount(groups.of, weights=program.count) < 2
    a, b = groups.of[pairs.a], groups.of[pairs.b]
    kept = (a != b) | ~alone[a]
    low, high = np.minimum(a, b)[kept], np.maximum(a, b)[kept]
    return {*zip(low.tolist(), high.tolist(), pairs.column[kept].tolist(), strict=True)}


def _pairs_for_floors(
    program: FractionProgram, pairing: Pairing, groups: Groups
) -> set[tuple[int, int, int]]:
    """Pairs with which all floors can be met, if that is possible: those of a max-min program."""
    # Meeting all floors together is a max-min program over them, without gains.
    lift = replace(
        program,
        gain=np.zeros_like(program.gain),
        level=program.floor,
        floor=np.zeros_like(program.floor),
        demands=program.floor > 0,
        level_weight=1.0,
        level_capacity=np.zeros_like(program.level_capacity),
    )
    free = replace(
        pairing, worth=np.zeros_like(pairing.worth), charge=np.zeros_like(pairing.charge)
    )
    return _triples(program, groups, solve(lift, free)[1])


def no_pairing(program: FractionProgram) -> Pairing:
    """A pairing in which no two rows may share."""
    columns = program.rate.shape[1]
    return Pairing(
        kind=np.zeros(len(program.count), dtype=np.int64),
        rate=np.zeros((1, 1, columns)),
        worth=np.zeros_like(program.rate),
        charge=np.zeros(columns),
    )


def spare_prices(
    program: FractionProgram, pairing: Pairing, y: Floats, price: Floats, u: Floats
) -> Floats:
    """How much dearer each row's throughput might be before any column pays for itself [rows].

    All rows at once may be dearer by this; 0 where some column costs nothing, alone or in
    a pair.
    """
    partners = partners_of(program, pairing)
    # What a row gains from the best partner at these prices. [rows, columns]
    earned = partners.beside(partners.lines(y[:, None] + pairing.worth, u))
    helped = np.maximum(earned.max(axis=1), 0.0)
    rent = program.usage * (price @ program.resources + pairing.charge)
    left = rent - helped + u[:, None] - (y[:, None] + pairing.worth) * program.rate
    beside = pairing.rate.max(axis=1)[pairing.kind]
    fastest = np.maximum(program.rate, np.where(program.rate > 0, beside, 0.0))
    # Smaller remainders are rounding of the rents, not room.
    left = np.where(left > TOLERANCE * float(rent.max()), left, 0.0)
    each = np.where(program.rate > 0, left / np.where(fastest > 0, fastest, 1.0), np.inf)
    # Half of it each, as both rows of a pair may be dearer at once.
    spare: Floats = 0.5 * each.min(axis=1)
    return spare


def partners_of(program: FractionProgram, pairing: Pairing) -> Partners:
    """Which rows may share with which."""
    return Partners(pairing.rate, pairing.kind, program.rate > 0, program.usage, program.count < 2)


def bound_with_pairs(
    program: FractionProgram,
    pairing: Pairing,
    y: Floats,
    price: Floats,
    u: Floats,
    partners: Partners | None = None,
) -> tuple[float, Floats, Floats, Floats]:
    """The upper bound that prices prove when rows may share; ``u`` [rows] prices time."""
    alone, fair, prices = dual_bound(program, y, price)
    if not np.isfinite(alone):
        return alone, fair, prices, u
    # ``dual_bound`` scales prices to a feasible dual, and time has to follow.
    scale = float(prices.sum() / price.sum()) if price.sum() > 0 else 1.0
    rent = prices @ program.resources
    worth = program.gain + fair[:, None] * program.rate - program.usage * rent
    rent = rent + pairing.charge
    time = np.maximum(np.where(program.rate > 0, worth, 0.0).max(axis=1), u * scale)
    partners = partners_of(program, pairing) if partners is None else partners
    value = partners.lines(fair[:, None] + pairing.worth, time)
    # Where a pair still earns something, half of the largest surplus on every job's time takes it
    # away: any such prices bound.
    time = time + max(0.0, partners.surplus(value, rent)) / 2
    bound = program.capacity @ prices + program.count @ (time - fair * program.floor)
    return float(bound), fair, prices, time


def _read(
    program: FractionProgram,
    pairing: Pairing,
    partners: Partners,
    x: Floats,
    pairs: PairTimes,
    prices: RowPrices,
    rounds: int,
) -> tuple[Solution, PairTimes]:
    spent = pair_time(pairs, len(x)) / program.count + x.sum(axis=1)
    used = program.resources @ (program.count @ (program.usage * x))
    held = program.usage[pairs.a, pairs.column] * pairs.time
    used = used + program.resources[:, pairs.column] @ held
    # Times may pass limits by rounding of sums: the more terms, the more. All shrink by one
    # factor.
    limit = np.where(program.level_capacity > 0, np.inf, np.maximum(program.capacity, 1e-300))
    spare = 1.0 + 8 * np.finfo(float).eps * (len(pairs.time) + x.size)
    share = max(1.0, spare * float(spent.max()), spare * float((used / limit).max()))
    x, pairs = x / share, replace(pairs, time=pairs.time / share)
    reached, gained = throughput_with_pairs(program, pairing, x, pairs)
    rows = program.demands & (program.level > 0)
    slack = (reached - program.floor)[rows]
    z = float((slack / program.level[rows]).min()) if rows.any() and program.level_weight else 0.0
    objective = gained + program.level_weight * z
    bound, y, price, u = bound_with_pairs(
        program, pairing, prices.y, prices.resources, prices.u, partners
    )
    needed = np.where(program.floor > 0, program.floor, np.inf)
    lacking = np.where(program.demands, (program.floor - reached) / needed, 0.0).max(initial=0.0)
    return Solution(
        x=x,
        z=z,
        objective=objective,
        bound=bound,
        gap=max(gap_between(program, objective, bound), float(lacking)),
        job_prices=y,
        resource_prices=price,
        time_prices=u,
        method=f"HiGHS simplex over pairs, {rounds} rounds",
    ), pairs


def pair_time(pairs: PairTimes, rows: int) -> Floats:
    """Total time of each row spent in pairs [rows]."""
    both = np.concatenate((pairs.a, pairs.b))
    return _summed(both, np.concatenate((pairs.time, pairs.time)), rows)


def _summed(index: Ints, weights: Floats, rows: int) -> Floats:
    total: Floats = np.bincount(index, weights=weights, minlength=rows).astype(np.float64)
    return total


def throughput_with_pairs(
    program: FractionProgram, pairing: Pairing, x: Floats, pairs: PairTimes
) -> tuple[Floats, float]:
    """Throughput of one job of each row [rows], and the total gain."""
    a, b, c = pairs.a, pairs.b, pairs.column
    first = pairing.rate[pairing.kind[a], pairing.kind[b], c] * pairs.time
    second = pairing.rate[pairing.kind[b], pairing.kind[a], c] * pairs.time
    rows = len(x)
    shared = (_summed(a, first, rows) + _summed(b, second, rows)) / program.count
    gain = float(program.count @ (program.gain * x).sum(axis=1))
    gain += float(pairing.worth[a, c] @ first + pairing.worth[b, c] @ second)
    gain -= float((pairing.charge[c] * program.usage[a, c]) @ pairs.time)
    return (program.rate * x).sum(axis=1) + shared, gain
