"""Least attained service, allocated thousands of times: for the simulator.

With one rate everywhere (``centre``): the level in closed form, the analytic centre by Newton's
method. A job of class c asks for sum_j x_cj >= p_c z on the types it runs on. So the best z is the
least of 1 / p_c and of C(S) / D(S) over sets of types S (Hall's condition). D(S) is what the
classes that run on S alone ask for. What is tight in every optimum is known from that, and the
centre of the rest maximises the sum of the logarithms of all other slacks: a smooth problem with as
many coupled unknowns as types. In plain Python, which is faster than arrays of a few numbers.

With a rate for each type (``WarmMaxMin``): one program over classes of equal jobs, with a row of
time and a row of demand for each class that ever appeared. A job that arrives or leaves changes two
numbers of its class, and the simplex method starts from its last basis (a warm start).

    a V100 and a K80; three jobs that ask for 1 each, two of them run on the V100 alone
    S = {V100}: C = 1, D = 2, so z <= 1/2; S = both: C = 2, D = 3, so z <= 2/3; 1 / p = 1
    z = 1/2: the two share the V100 in every optimum; the third's time on the K80 is the centre's
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schema.errors import BackendError, ProblemError
from ..lp import LinearSession
from .program import Floats, Ints

MAX_ITERATIONS = 60
_TIGHT = 1e-12
_DONE = 1e-7  # relative change of the last step; the next would be its square
_KEEP = 0.9
_RIDGE = 1e-13

Row = list[float]


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of equal jobs: how many, devices of each, types open to it, time it has.

    Its total time is ``low`` where that equals ``high``, and between them otherwise.
    """

    count: float
    scale: float
    types: list[int]
    low: float
    high: float


def centre(
    counts: Sequence[float],
    scales: Sequence[float],
    runs: Sequence[Sequence[bool]],
    levels: Sequence[float],
    capacity: Sequence[float],
    start: Sequence[Row | None] | None = None,
) -> list[Row] | None:
    """Time fractions [classes, types] of a job of each class at the centre of the optimal face.

    O(classes x types^2) an iteration, about ten; sets of types that matter are unions of ``runs``.

    ``scales`` are devices of a job, ``levels`` the time p that one unit of z asks of it, ``runs``
    [classes, types]. ``start`` is the centre of a similar problem, None for classes that it lacks.

    Returns:
        The fractions, feasible to about 1e-11; None where the numbers gave out.
    """
    open_ = [{j for j, able in enumerate(row) if able} for row in runs]
    asks = [n * s * p for n, s, p in zip(counts, scales, levels, strict=True)]
    limits = _limits(open_, asks, capacity)
    # By the slowest class alone, and by each set of types.
    z = min(1.0 / max(levels), min(limits.values()))
    # Sets that limit z are full in every optimum: classes inside have just their demand, and the
    # types of such a set are closed to all others. What is left to choose has an interior.
    tight = [set(union) for union, limit in limits.items() if limit <= z * (1.0 + _TIGHT)]
    classes = []
    for n, s, mine, p in zip(counts, scales, open_, levels, strict=True):
        stuck = any(mine <= union for union in tight) or p * z >= 1.0 - _TIGHT
        low = min(p * z, 1.0)
        types = mine.difference(*(union for union in tight if not mine <= union))
        classes.append(_Class(n, s, sorted(types), low, low if stuck else 1.0))
    full = set().union(*tight) if tight else set()
    filled, nothing = [j in full for j in range(len(capacity))], [None] * len(classes)
    # The centre of the problem before is near this one's, but may lie a rounding error beyond a
    # limit.
    for begin in [nothing] if start is None else [start, nothing]:
        try:
            return _newton(classes, list(capacity), filled, begin)
        except ZeroDivisionError:  # the start was a rounding error away from a limit
            continue
    return None


def _limits(
    open_: list[set[int]], asks: list[float], capacity: Sequence[float]
) -> dict[frozenset[int], float]:
    """The upper limit on z for each union of the classes' types."""
    unions: set[frozenset[int]] = set()
    # Closed under union: other sets of types limit nothing more (Hall).
    for mine in {frozenset(one) for one in open_}:
        unions |= {mine | other for other in unions} | {mine}
    return {
        union: sum(capacity[j] for j in union)
        / sum(ask for mine, ask in zip(open_, asks, strict=True) if mine <= union)
        for union in unions
    }


def _newton(
    classes: list[_Class], capacity: Row, full: list[bool], start: Sequence[Row | None]
) -> list[Row] | None:
    """From a point that need not fill the pool rightly; steps keep all slacks positive."""
    types = range(len(capacity))
    x = []
    # Each class begins with the middle of its time, spread by the size of its types.
    for one, before in zip(classes, start, strict=True):
        room = sum(capacity[j] for j in one.types)
        time = 0.5 * (one.low + one.high)
        row = [time * capacity[j] / room if j in one.types else 0.0 for j in types]
        had = sum(before) if before else 0.0
        if before and (one.low < had < one.high or one.low == one.high):
            # The former point scaled to the present total; a type that it lacked gets the even
            # share.
            part = 1.0 if one.low < one.high else one.low / had
            row = [part * before[j] or row[j] if j in one.types else 0.0 for j in types]
        x.append(row)
    used = [
        sum(c.count * c.scale * row[j] for c, row in zip(classes, x, strict=True)) for j in types
    ]
    # Slacks need not agree with what is used: Newton's steps bring them together, while each slack
    # stays positive, which is what the logarithms need.
    w = [0.0 if full[j] else max(capacity[j] - used[j], 0.1 * capacity[j]) for j in types]
    price = [0.0 if full[j] else 1.0 / w[j] for j in types]
    mu = [0.0] * len(classes)
    # Until the step is next to nothing: it converges quadratically, so the next would be its
    # square.
    for _ in range(MAX_ITERATIONS):
        step = _step(classes, capacity, full, x, w, price, mu)
        if step is None:
            return None
        dx, dw, dprice, dmu = step
        change, part = 0.0, 1.0
        for one, row, drow in zip(classes, x, dx, strict=True):
            for j in one.types:
                # No value may shrink by more than ``_KEEP`` of itself in a step: logarithms stay
                # finite.
                ratio = drow[j] / row[j]
                change = max(change, abs(ratio))
                part = min(part, -_KEEP / ratio) if ratio < -_KEEP else part
            if one.high > one.low:
                total, gain = sum(row), sum(drow)
                # Neither may the total come nearer to an end of its range.
                ratio = gain / ((one.high if gain > 0 else one.low) - total)
                part = min(part, _KEEP / ratio) if ratio > _KEEP else part
        for j in types:
            if not full[j]:
                ratio = dw[j] / w[j]
                change = max(change, abs(ratio))
                part = min(part, -_KEEP / ratio) if ratio < -_KEEP else part
        x = [[a + part * b for a, b in zip(*rows, strict=True)] for rows in zip(x, dx, strict=True)]
        w = [a + part * b for a, b in zip(w, dw, strict=True)]
        price = [a + part * b for a, b in zip(price, dprice, strict=True)]
        mu = [a + part * b for a, b in zip(mu, dmu, strict=True)]
        if change < _DONE:
            return x
    return None


def _step(
    classes: list[_Class],
    capacity: Row,
    full: list[bool],
    x: list[Row],
    w: Row,
    price: Row,
    mu: Row,
) -> tuple[list[Row], Row, Row, Row] | None:
    """Newton's step on -1/x + phi' + s price + mu = 0 and the rows' and types' totals."""
    size = len(capacity)
    types = range(size)
    matrix = [[0.0] * size for _ in types]
    right = [0.0] * size
    for j in types:
        matrix[j][j] = w[j] * w[j]
        right[j] = 2.0 * w[j] - w[j] * w[j] * price[j] - capacity[j]
    # [types, types] the prices' system: each class is eliminated by its total, a rank-one term.
    parts, largest = [], 0.0
    for one, row, m in zip(classes, x, mu, strict=True):
        total = sum(row)
        if one.high > one.low:
            above, below = 1.0 / (one.high - total), 1.0 / (total - one.low)
            slope, give, miss = above - below, 1.0 / (above * above + below * below), 0.0
        else:
            slope, give, miss = m, 0.0, one.low - total
        # Multiplied by x^2, as 1/x overflows where x goes to 0.
        square = [value * value for value in row]
        off = [
            value - value * value * (slope + one.scale * price[j]) if value else 0.0
            for j, value in enumerate(row)
        ]  # x^2 r
        pivot = sum(square) + give
        lift = (sum(off) - miss) / pivot
        parts.append((square, off, pivot, lift))
        n_s = one.count * one.scale
        n_ss = n_s * one.scale
        for j in one.types:
            right[j] += n_s * (row[j] + off[j] - square[j] * lift)
            line, weight = matrix[j], n_ss * square[j]
            line[j] += weight
            largest = max(largest, weight, matrix[j][j])
            weight /= pivot
            for k in one.types:
                line[k] -= weight * square[k]
    for j in types:  # all prices of a full pool may shift together
        matrix[j][j] += _RIDGE * largest
    dprice = _solved(matrix, right)
    if dprice is None:
        return None
    # Back from prices to classes.
    dx, dmu = [], []
    for one, (square, off, pivot, lift) in zip(classes, parts, strict=True):
        nu = lift - one.scale * sum(b * d for b, d in zip(square, dprice, strict=True)) / pivot
        dx.append(
            [a - b * (one.scale * d + nu) for a, b, d in zip(off, square, dprice, strict=True)]
        )
        dmu.append(0.0 if one.high > one.low else nu)
    dw = [w[j] - w[j] * w[j] * (price[j] + dprice[j]) for j in types]
    return dx, dw, dprice, dmu


def _solved(matrix: list[Row], right: Row) -> Row | None:
    """Solve a positive definite system; None where rounding says that it is none."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for j in range(size):
        pivot = rows[j][j]
        # Not ``<= 0``: NaN is refused as well.
        if not pivot > 0.0:
            return None
        for k in range(j + 1, size):
            factor = rows[k][j] / pivot
            if factor:
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[j], strict=True)]
    answer = [0.0] * size
    for j in reversed(range(size)):
        rest = sum(rows[j][k] * answer[k] for k in range(j + 1, size))
        answer[j] = (rows[j][size] - rest) / rows[j][j]
    return answer


class WarmMaxMin:
    """Maximise the least throughput over ``level`` among the classes present.

    The allocation is the vertex of the optimal face that the simplex method reaches from the
    previous one: deterministic for a sequence of calls, but another than ``solve`` returns.
    """

    def __init__(self, capacity: Floats) -> None:
        """Start with no classes."""
        self.session = LinearSession()
        types = len(capacity)
        self.capacity = capacity
        self.session.add_rows(np.full(types, -np.inf), capacity.astype(float))
        self.session.add_columns(np.ones(1), np.zeros(1), np.zeros(0), np.zeros(0))
        self.level: list[float] = []
        self.best: list[float] = []
        self.twins: dict[int, list[int]] = {}
        self.place = np.zeros(0, dtype=np.int64)  # columns of singles, then of pairs
        self.pair_place: list[int] = []
        self.pair_of: list[tuple[int, int, int]] = []
        self._columns = 1
        self.values = np.zeros(1)
        self.prices = np.zeros(0)
        self._rates: list[Floats] = []
        self.scales: list[float] = []
        self.row_of = np.zeros(0, dtype=np.int64)
        self.type_of = np.zeros(0, dtype=np.int64)

    def add_class(self, rate: Floats, scale: float, level: float) -> int:
        """Add a class, empty at first; returns its number.

        ``rate`` [types] is of one job, 0 where it does not run; ``level`` is the throughput that a
        unit of the objective asks of it.

        Raises:
            ProblemError: The class runs nowhere.
        """
        runs = np.flatnonzero((rate > 0) & (scale <= self.capacity))
        if not len(runs):
            raise ProblemError("a class of jobs runs on no device type of the pool")
        # Each class has two rows behind those of types: time, then demand.
        row = len(self.capacity) + 2 * len(self.level)
        best = float(rate.max())
        self.session.add_rows(np.array([-np.inf, 0.0]), np.array([0.0, np.inf]))
        rows = np.column_stack((runs, np.full(len(runs), row), np.full(len(runs), row + 1)))
        values = np.column_stack((np.full(len(runs), scale), np.ones(len(runs)), rate[runs] / best))
        starts = 3 * np.arange(len(runs))
        self.session.add_columns(np.zeros(len(runs)), starts, rows.ravel(), values.ravel())
        self.row_of = np.append(self.row_of, np.full(len(runs), len(self.level)))
        self.type_of = np.append(self.type_of, runs)
        self.place = np.append(self.place, self._columns + np.arange(len(runs)))
        self._columns += len(runs)
        self.level.append(level / best)
        self.best.append(best)
        self._rates.append(np.where(scale <= self.capacity, rate / best, 0.0))
        self.scales.append(scale)
        return len(self.level) - 1

    def add_pair(self, a: int, b: int, rates: Floats, scale: float) -> None:
        """Let jobs of two classes share devices; a class may share with itself.

        ``rates`` [2, types] are of either beside the other, 0 where they cannot; ``scale`` devices
        are shared.
        """
        types = len(self.capacity)
        first, second = types + 2 * a, types + 2 * b
        for kind in np.flatnonzero((rates > 0).all(axis=0) & (scale <= self.capacity)).tolist():
            one, two = rates[0, kind] / self.best[a], rates[1, kind] / self.best[b]
            if a == b:
                # A pair of one class takes twice its time and gives both rates.
                rows, values = [kind, first, first + 1], [scale, 2.0, one + two]
                self.twins.setdefault(a, []).append(self._columns)
            else:
                rows = [kind, first, first + 1, second, second + 1]
                values = [scale, 1.0, one, 1.0, two]
            self.session.add_columns(
                np.zeros(1), np.zeros(1), np.array(rows), np.array(values, dtype=float)
            )
            self.pair_place.append(self._columns)
            self.pair_of.append((a, b, kind))
            self._columns += 1

    def set_counts(self, classes: Ints, counts: Ints) -> None:
        """Say how many jobs some classes hold now [classes]."""
        rows = len(self.capacity) + 2 * classes
        self.session.set_rows(rows, np.full(len(rows), -np.inf), counts.astype(float))
        # The number of jobs bounds the time, and multiplies the demand for z.
        for number, count in zip(classes.tolist(), counts.tolist(), strict=True):
            row = len(self.capacity) + 2 * number
            self.session.set_coefficient(row + 1, 0, -count * self.level[number])
            for column in self.twins.get(number, ()):  # nobody shares with itself
                self.session.set_column(column, np.inf if count > 1 else 0.0)

    def solve(self, *, with_prices: bool = False) -> tuple[float, Floats]:
        """The objective, and each class's total time on each type [classes, types].

        Raises:
            BackendError: HiGHS finds no optimum; with no job present there is none.
        """
        answer = self.session.solve(with_prices=with_prices)
        if answer is None:
            raise BackendError("HiGHS found no optimum of the warm program")
        times = np.zeros((len(self.level), len(self.capacity)))
        self.values, self.prices = answer.values, answer.prices
        times[self.row_of, self.type_of] = np.maximum(answer.values[self.place], 0.0)
        return answer.objective, times

    def rates(self, classes: Ints) -> Floats:
        """Rates of classes relative to each one's best [types, classes]."""
        return np.array(self._rates).T[:, classes]

    def pair_times(self) -> tuple[Ints, Ints, Ints, Floats]:
        """Of the last solution, pairs that have time: classes, type, total time [pairs]."""
        places = np.array(self.pair_place, dtype=np.int64)
        time = self.values[places]
        used = np.flatnonzero(time > 0)
        of = np.array(self.pair_of, dtype=np.int64).reshape(-1, 3)[used]
        return of[:, 0], of[:, 1], of[:, 2], time[used]
