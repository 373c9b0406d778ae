"""The linear program over the times of groups of rows.

Pairs and constraints are added when needed; ``groups`` defines the constraints.
"""

import numpy as np

from ....schema.errors import BackendError
from ...lp import LinearAnswer, LinearSession
from ..program import Floats, FractionProgram, Ints
from .groups import Groups
from .pairs import Pairing, PairTimes, Partners

# A group lacks throughput where a constraint is broken by this part of its best rates.
BROKEN = 2e-9
TOLERANCE = 1e-9


class RowPrices:
    """Prices of rows: time ``u``, throughput ``y`` [rows], and of ``resources``."""

    __slots__ = ("resources", "u", "y")

    def __init__(self, u: Floats, y: Floats, resources: Floats) -> None:
        self.u, self.y, self.resources = u, y, resources


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
        """Start with singles.

        Args:
            program: The program over rows.
            pairing: Who may share.
            groups: Of rows.
            row: What demands are measured in [rows]; the best rates otherwise.
            partners: Of the groups, where it is known.
        """
        self.program, self.pairing, self.groups = program, pairing, groups
        self.first = groups.first
        self.count = np.bincount(groups.of, weights=program.count)
        self.kind = pairing.kind[self.first]
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
        for i in np.flatnonzero(values != self.level_values).tolist():
            self.session.set_coefficient(int(rows[i]), 0, float(values[i]))
        self.level_values = values

    def _measure(self) -> None:
        """What demands must reach at least, and what a unit of z asks of them [demands]."""
        p = self.program
        asked = p.demands[self.members]
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
            which = np.repeat(start[group] - np.cumsum(n) + n, n) + np.arange(int(n.sum()))
            cut = order[which]
            above = np.maximum(np.repeat(rate, n) - self.cut_rate[cut], 0.0)
            above = above / self.scale[self.cut_group[cut]]
            entries.append((np.repeat(place, n), self.demands_at + cut, above))
        self.session.add_columns(cost / self.gain_unit, *_compressed(entries, number))

    def add_pairs(self, pairs: set[tuple[int, int, int]]) -> None:
        """Add pairs (group, group, column) that are not there yet."""
        if not pairs:
            return
        a, b, c = np.array(sorted(pairs), dtype=np.int64).T
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
        useful &= (number[:, None] <= number)[:, :, None]
        alone = np.flatnonzero(self.count < 2)
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
        self.time_price = np.maximum(answer.prices[:number], 0.0) * unit
        self.resource_price = np.maximum(answer.prices[number : self.demands_at], 0.0) * unit
        paid = np.maximum(-answer.prices[self.demands_at :], 0.0) * unit
        self.cut_price = paid / self.scale[self.cut_group]
        self.values = np.maximum(answer.values, 0.0)
        return answer

    def separate(self) -> bool:
        """Add the constraint of each group that the answer breaks most; whether there was one."""
        if self.groups.number == len(self.groups.of):
            return False
        p, of = self.program, self.groups.of
        z = float(self.values[0]) * self.unit if p.level_weight else 0.0
        demand = p.demand(z)
        time, pair = self.values[1:], slice(self.singles, None)
        used = np.concatenate((self.a, self.b[pair]))
        rate = np.concatenate((self.rate_a, self.rate_b[pair])) / self.scale[used]
        spent = np.concatenate((time, time[pair]))
        kept = spent > 0
        used, rate, spent = used[kept], rate[kept], spent[kept]
        order = np.lexsort((-rate, used))
        used, rate, spent = used[order], rate[order], spent[order]
        had = _running(used, spent * rate) - rate * _running(used, spent)
        # Jobs by group, from the largest demand down; those above a rate are its set.
        jobs = np.lexsort((-demand, of))
        count, wanted = p.count[jobs], demand[jobs] / self.scale[of[jobs]]
        height = 4.0 * float(rate.max(initial=1.0))
        place = of[jobs] - np.minimum(wanted, 0.5 * height) / height
        start = np.searchsorted(of[jobs], used)
        end = np.maximum(np.searchsorted(place, used - rate / height), start)
        number = np.concatenate(([0.0], np.cumsum(count)))
        total = np.concatenate(([0.0], np.cumsum(count * wanted)))
        lacking = total[end] - total[start] - rate * (number[end] - number[start]) - had
        broken = np.flatnonzero(lacking > BROKEN)
        if not len(broken):
            return False
        broken = broken[np.argsort(-lacking[broken], kind="stable")]
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
        for j, (g, u) in enumerate(zip(groups.tolist(), rates.tolist(), strict=True), before):
            mine, other = np.flatnonzero(self.a == g), np.flatnonzero(self.b == g)
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
