"""Programs with space sharing: columns that two rows hold together, generated as they pay.

The simplex method of HiGHS solves the program over the columns at hand; its prices tell which
pair would earn most, and pairs join until none earns anything. Jobs of one kind differ only in
their prices, so the best pair of two kinds is made of the best job of each.
"""

from dataclasses import dataclass, replace

import numpy as np

from ...schema.errors import BackendError
from ..lp import LinearAnswer, LinearSession
from .program import Floats, Ints, Program, Solution, dual_bound, gap_between

MAX_ROUNDS = 500
FULL_ROWS = 40  # up to so many rows, all pairs at once are cheaper than generating them
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Who may share, and what it earns.

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


class _Master:
    """The program over singles and the pairs added so far, in row totals."""

    def __init__(self, program: Program, pairing: Pairing, row: Floats | None = None) -> None:
        self.program, self.pairing = program, pairing
        rows, kinds = len(program.count), len(program.capacity)
        self.session = LinearSession()
        self.row = np.maximum(program.rate.max(axis=1), 1e-300) if row is None else row
        self.gain_unit = float(np.abs(program.gain).max()) or 1.0
        infinite = np.full(rows, np.inf)
        self.session.add_rows(-infinite, program.count)
        self.session.add_rows(np.full(kinds, -np.inf), program.capacity)
        self.session.add_rows(_least(program, self.row), infinite)
        m, c = np.nonzero(program.rate > 0)
        self.singles = (m, c)
        self.a, self.b, self.c = (np.zeros(0, np.int64) for _ in range(3))
        self.columns, self.at = 0, np.zeros(0, np.int64)  # of pairs
        self._add(m, None, c)
        self._add_level()

    def ask(self, program: Program) -> None:
        """Go on with other levels, floors and demands, from the last basis."""
        before = _least(self.program, self.row)
        self.program, low = program, _least(program, self.row)
        first = len(program.count) + len(program.capacity)
        for m in np.flatnonzero(low != before).tolist():
            self.session.set_row(first + m, float(low[m]), np.inf)
        if self.has_level:
            self.session.shut_column(self.level_at)
        self._add_level()

    def _add(self, m: Ints, other: Ints | None, c: Ints) -> None:
        p, rows, number = self.program, len(self.program.count), len(m)
        first = p.rate[m, c] if other is None else self._rate(m, other, c)
        entries = [(m, np.ones(number)), (rows + len(p.capacity) + m, first / self.row[m])]
        cost = p.gain[m, c] if other is None else self.pairing.worth[m, c] * first
        if other is not None:
            second = self._rate(other, m, c)
            entries.append((other, np.ones(number)))
            entries.append((rows + len(p.capacity) + other, second / self.row[other]))
            cost = cost + self.pairing.worth[other, c] * second
            cost = cost - self.pairing.charge[c] * p.usage[m, c]
        for k in range(len(p.capacity)):
            entries.append((np.full(number, rows + k), p.usage[m, c] * p.resources[k, c]))
        self.session.add_columns(cost / self.gain_unit, *_compressed(entries, number))
        self.columns += number

    def _add_level(self) -> None:
        p, rows = self.program, len(self.program.count)
        self.has_level = bool(p.level_weight)
        if not self.has_level:
            return
        demand = -np.where(p.demands, p.count * p.level / self.row, 0.0)
        self.unit = 1.0 / (float(np.abs(demand).max()) or 1.0)
        index = np.concatenate((rows + np.arange(len(p.capacity)), rows + len(p.capacity)
                                + np.arange(rows)))  # fmt: skip
        values = np.concatenate((-p.level_capacity, demand)) * self.unit
        kept = values != 0
        self.session.add_columns(np.ones(1), np.zeros(1), index[kept], values[kept])
        self.level_at, self.columns = self.columns, self.columns + 1

    def _rate(self, m: Ints, beside: Ints, c: Ints) -> Floats:
        rates: Floats = self.pairing.rate[self.pairing.kind[m], self.pairing.kind[beside], c]
        return rates

    def add_pairs(self, a: Ints, b: Ints, c: Ints) -> None:
        self.at = np.concatenate((self.at, self.columns + np.arange(len(a))))
        self._add(a, b, c)
        self.a = np.concatenate((self.a, a))
        self.b = np.concatenate((self.b, b))
        self.c = np.concatenate((self.c, c))

    def add_distinct(self, pairs: PairTimes) -> None:
        triples = {*zip(pairs.a.tolist(), pairs.b.tolist(), pairs.column.tolist(), strict=True)}
        if triples:
            self.add_pairs(*(np.array(side) for side in zip(*sorted(triples), strict=True)))

    def is_feasible(self) -> bool:
        return self.session.solve() is not None

    def solve(self) -> tuple[LinearAnswer, Floats, Floats, Floats]:
        """The answer, and the prices of time u, demand y and resources."""
        answer = self.session.solve()
        if answer is None:
            raise BackendError("HiGHS found no optimum of the allocation program")
        rows, kinds = len(self.program.count), len(self.program.capacity)
        u = np.maximum(answer.prices[:rows], 0.0)
        price = np.maximum(answer.prices[rows : rows + kinds], 0.0)
        y = np.maximum(-answer.prices[rows + kinds :], 0.0) / self.row
        scale = self.unit if self.has_level else self.gain_unit
        return answer, u * scale, y * scale, price * scale


def _least(program: Program, row: Floats) -> Floats:
    """What the demand rows must reach at least, in their units [rows]."""
    low: Floats = np.where(program.demands, program.count * program.floor / row, -np.inf)
    return low


def _compressed(entries: list[tuple[Ints, Floats]], number: int) -> tuple[Ints, Ints, Floats]:
    column = np.tile(np.arange(number), len(entries))
    row = np.concatenate([index for index, _ in entries])
    value = np.concatenate([values for _, values in entries])
    # A row that pairs with itself holds both members: equal entries are added up.
    height = int(row.max()) + 1 if len(row) else 1
    key, place = np.unique(column * height + row, return_inverse=True)
    total = np.bincount(place, weights=value)
    kept = total != 0
    key, total = key[kept], total[kept]
    starts = np.searchsorted(key // height, np.arange(number))
    return starts, key % height, total


def solve(
    program: Program, pairing: Pairing, seed: PairTimes | None = None
) -> tuple[Solution, PairTimes]:
    """Maximise over singles and pairs; exact, a vertex of the optimal face.

    Args:
        program: The program over rows alone.
        pairing: Who may share.
        seed: Pairs to start from, such as those of a similar program's answer.

    Raises:
        BackendError: HiGHS finds no optimum.
    """
    return Open(program, pairing, seed).solve(program)


class Open:
    """A program held open: other levels, floors and demands, solved from the last basis."""

    def __init__(
        self,
        program: Program,
        pairing: Pairing,
        seed: PairTimes | None = None,
        row: Floats | None = None,
    ) -> None:
        """Start with the pairs of ``seed``; demands are measured in ``row`` [rows], best rates."""
        self._pairing = pairing
        self._master = master = _Master(program, pairing, row)
        self._whole = len(program.count) <= FULL_ROWS
        if self._whole:
            master.add_pairs(*_all_pairs(program, pairing))
        elif seed is not None:
            master.add_distinct(seed)
        elif program.floor.any() and not master.is_feasible():
            master.add_distinct(_pairs_for_floors(program, pairing))
        self._known = {*zip(master.a.tolist(), master.b.tolist(), master.c.tolist(), strict=True)}

    def solve(self, program: Program) -> tuple[Solution, PairTimes]:
        """Maximise a program that differs from the first in levels, floors and demands alone.

        Raises:
            BackendError: HiGHS finds no optimum.
        """
        master, rounds = self._master, 0
        if program is not master.program:
            master.ask(program)
        while True:
            answer, u, y, price = master.solve()
            rounds += 1
            fresh = set() if self._whole else _paying(program, self._pairing, u, y, price)
            fresh -= self._known
            if not fresh or rounds >= MAX_ROUNDS:
                break
            self._known |= fresh
            master.add_pairs(*(np.array(side) for side in zip(*sorted(fresh), strict=True)))
        return _read(master, answer, u, y, price, rounds)


def _pairs_for_floors(program: Program, pairing: Pairing) -> PairTimes:
    """Pairs with which all floors can be met, where they can: those of a max-min program."""
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
    return solve(lift, free)[1]


def nobody(program: Program) -> Pairing:
    """Nobody shares with anybody."""
    columns = program.rate.shape[1]
    return Pairing(
        kind=np.zeros(len(program.count), dtype=np.int64),
        rate=np.zeros((1, 1, columns)),
        worth=np.zeros_like(program.rate),
        charge=np.zeros(columns),
    )


def solve_alone(program: Program) -> Solution:
    """Maximise without pairs, by the simplex method: for programs without an interior."""
    found, _ = solve(program, nobody(program))
    return replace(found, time_prices=None, method="HiGHS simplex")


def _all_pairs(program: Program, pairing: Pairing) -> tuple[Ints, Ints, Ints]:
    kind = pairing.kind
    both = pairing.rate[kind[:, None], kind[None, :]]
    useful = (both > 0) | (both.transpose(1, 0, 2) > 0)
    useful &= (program.rate[:, None, :] > 0) & (program.rate[None, :, :] > 0)
    useful &= program.usage[:, None, :] == program.usage[None, :, :]
    useful &= np.triu(np.ones(both.shape[:2], bool))[:, :, None]
    alone = np.flatnonzero(program.count < 2)
    useful[alone, alone] = False
    a, b, c = np.nonzero(useful)
    return a, b, c


class _Envelope:
    """For kinds A, B and a column: the row of A that earns most beside a row of B."""

    def __init__(self, program: Program, pairing: Pairing, u: Floats, y: Floats) -> None:
        kinds, columns = len(pairing.rate), program.rate.shape[1]
        shape = (kinds, kinds, columns)
        self.best, self.second = np.full(shape, -np.inf), np.full(shape, -np.inf)
        self.row, self.next = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.value: list[tuple[Ints, Floats]] = []
        for a in range(kinds):
            rows = np.flatnonzero(pairing.kind == a)
            worth = y[rows, None] + pairing.worth[rows]
            value = worth[:, None, :] * pairing.rate[a] - u[rows, None, None]
            runs = (program.rate[rows] > 0)[:, None, :]
            value = np.where(runs & ((pairing.rate[a] > 0) | (pairing.rate[:, a] > 0)), value,
                             -np.inf)  # fmt: skip
            self.value.append((rows, value))
            if len(rows):
                order = np.argsort(-value, axis=0, kind="stable")
                self._keep(a, rows, value, order, program.count)

    def _keep(self, a: int, rows: Ints, value: Floats, order: Ints, count: Floats) -> None:
        first = order[0]
        self.row[a], self.best[a] = rows[first], np.take_along_axis(value, order[:1], 0)[0]
        # A partner of the same kind is the next row, or the same row where it has two members.
        twin = count[rows[first]] >= 2
        if len(rows) > 1:
            after = np.take_along_axis(value, order[1:2], 0)[0]
            self.next[a] = np.where(twin, rows[first], rows[order[1]])
            self.second[a] = np.where(twin, self.best[a], after)
        else:
            self.next[a], self.second[a] = rows[first], np.where(twin, self.best[a], -np.inf)


def _paying(
    program: Program, pairing: Pairing, u: Floats, y: Floats, price: Floats
) -> set[tuple[int, int, int]]:
    """For every row the pair that would earn most, where it earns anything."""
    envelope = _Envelope(program, pairing, u, y)
    rent = price @ program.resources + pairing.charge
    found: set[tuple[int, int, int]] = set()
    for a, (rows, value) in enumerate(envelope.value):
        if not len(rows):
            continue
        beside, partner = envelope.best[:, a].copy(), envelope.row[:, a].copy()
        beside[a], partner[a] = envelope.second[a, a], envelope.next[a, a]
        earned = value + beside - (program.usage[rows] * rent)[:, None, :]
        if len(rows) > 1:  # the next row's own best partner is the first
            own = rows[:, None] == partner[a]
            earned[:, a][own & (program.count[rows] < 2)[:, None]] = -np.inf
        flat = earned.reshape(len(rows), -1)
        top = flat.argmax(axis=1)
        unit = np.abs(value).max(where=np.isfinite(value), initial=1e-300)
        for i in np.flatnonzero(flat[np.arange(len(rows)), top] > TOLERANCE * unit):
            b, c = divmod(int(top[i]), program.rate.shape[1])
            pair = sorted((int(rows[i]), int(partner[b, c])))
            found.add((pair[0], pair[1], c))
    return found


def spare_prices(program: Program, pairing: Pairing, y: Floats, price: Floats, u: Floats) -> Floats:
    """How much dearer each row's throughput might be before any column pays for itself [rows].

    All rows at once may be dearer by this; 0 where some column costs nothing, alone or in
    company.
    """
    envelope = _Envelope(program, pairing, u, y)
    helped = np.maximum(envelope.best.max(axis=0)[pairing.kind], 0.0)
    rent = program.usage * (price @ program.resources + pairing.charge)
    left = rent - helped + u[:, None] - (y[:, None] + pairing.worth) * program.rate
    beside = pairing.rate.max(axis=1)[pairing.kind]
    fastest = np.maximum(program.rate, np.where(program.rate > 0, beside, 0.0))
    left = np.where(left > TOLERANCE * float(rent.max()), left, 0.0)
    each = np.where(program.rate > 0, left / np.where(fastest > 0, fastest, 1.0), np.inf)
    spare: Floats = 0.5 * each.min(axis=1)
    return spare


def bound_with_pairs(
    program: Program, pairing: Pairing, y: Floats, price: Floats, u: Floats
) -> tuple[float, Floats, Floats, Floats]:
    """The upper bound that prices prove when rows may share; ``u`` [rows] prices time."""
    alone, fair, prices = dual_bound(program, y, price)
    if not np.isfinite(alone):
        return alone, fair, prices, u
    scale = float(prices.sum() / price.sum()) if price.sum() > 0 else 1.0
    rent = prices @ program.resources
    worth = program.gain + fair[:, None] * program.rate - program.usage * rent
    rent = rent + pairing.charge
    time = np.maximum(np.where(program.rate > 0, worth, 0.0).max(axis=1), u * scale)
    envelope = _Envelope(program, pairing, time, fair)
    usage = np.zeros((len(pairing.rate), program.rate.shape[1]))
    usage[pairing.kind] = program.usage
    beside = envelope.best.transpose(1, 0, 2)
    beside = np.where(np.eye(len(usage), dtype=bool)[:, :, None], envelope.second, beside)
    earned = envelope.best + beside - (usage * rent)[:, None, :]
    time = time + max(0.0, float(earned.max())) / 2
    bound = program.capacity @ prices + program.count @ (time - fair * program.floor)
    return float(bound), fair, prices, time


def _read(
    master: _Master, answer: LinearAnswer, u: Floats, y: Floats, price: Floats, rounds: int
) -> tuple[Solution, PairTimes]:
    program, pairing = master.program, master.pairing
    values = np.maximum(answer.values, 0.0)
    number = len(master.singles[0])
    x = np.zeros_like(program.rate)
    x[master.singles] = values[:number] / program.count[master.singles[0]]
    time = values[master.at]
    used = np.flatnonzero(time > 0)
    pairs = PairTimes(a=master.a[used], b=master.b[used], column=master.c[used], time=time[used])
    share = _overuse(program, x, pairs)
    x, pairs = x / share, replace(pairs, time=pairs.time / share)
    reached, gained = reach(program, pairing, x, pairs)
    rows = program.demands & (program.level > 0)
    slack = (reached - program.floor)[rows]
    z = float((slack / program.level[rows]).min()) if rows.any() and master.has_level else 0.0
    objective = gained + program.level_weight * z
    bound, y, price, u = bound_with_pairs(program, pairing, y, price, u)
    needed = np.maximum(program.floor, 1e-300)
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


def _overuse(program: Program, x: Floats, pairs: PairTimes) -> float:
    spent = pair_time(pairs, len(x)) / program.count + x.sum(axis=1)
    used = program.resources @ (program.count @ (program.usage * x))
    held = program.usage[pairs.a, pairs.column] * pairs.time
    used = used + program.resources[:, pairs.column] @ held
    limit = np.where(program.level_capacity > 0, np.inf, np.maximum(program.capacity, 1e-300))
    spare = 1.0 + 8 * np.finfo(float).eps * (len(pairs.time) + x.size)
    return max(1.0, spare * float(spent.max()), spare * float((used / limit).max()))


def pair_time(pairs: PairTimes, rows: int) -> Floats:
    """Total time of each row spent in pairs [rows]."""
    both = np.concatenate((pairs.a, pairs.b))
    return _summed(both, np.concatenate((pairs.time, pairs.time)), rows)


def _summed(index: Ints, weights: Floats, rows: int) -> Floats:
    total: Floats = np.bincount(index, weights=weights, minlength=rows).astype(np.float64)
    return total


def reach(program: Program, pairing: Pairing, x: Floats, pairs: PairTimes) -> tuple[Floats, float]:
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
