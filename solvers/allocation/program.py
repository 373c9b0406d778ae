"""The linear program behind every policy: equal rows merged, its dual bound, the simplex method.

For rows m (jobs, or classes of equal jobs) and columns c (device types, placements, mixes)::

    maximise    sum_m n_m (g_m . x_m)  +  gamma z
    subject to  sum_c x_mc <= 1                                     (5.2), price u_m
                sum_m n_m S_mc R_kc x_mc - e_k z <= capacity_k      (5.3), price lambda_k
                T_m . x_m - p_m z >= b_m       where m has a demand        price y_m
                x >= 0

Space sharing adds columns that two rows share; ``space_sharing`` prices them.

    one V100 and one K80; a does 2 or 1 a second on them, b 1 on both; maximise z, both at least z
    z = 1: a half its time on the V100, b half on each
    with y = 1 for b's demand and u = 1 for b's time the dual bound is 1 too: none is better

``solve_by_simplex`` gives a vertex of a program without pairs, exact to the last digits. It answers
where the interior point method does not: rows that must keep exactly what is the most they can have
leave no interior. Of many columns only likely ones are in the program at first; those that would
pay at its prices join until none would (column generation). So 2,000 jobs on 200 types need some
6,000 columns, not 400,000.

    type 7 does 3 a second for a job; prices: 1 of its throughput, 0.5 of its time, 2 of the type
    3 x 1 - 0.5 - 2 = 0.5 > 0: the column pays, and joins
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import BackendError
from ..effort import never
from ..lp import LinearSession

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FractionProgram:
    """A linear program over time fractions.

    ``count`` n [rows]; ``rate`` T, ``usage`` S and ``gain`` g [rows, columns]; ``resources`` R
    [resources, columns]; ``capacity`` and ``level_capacity`` e [resources]; ``level`` p and
    ``floor`` b [rows]; ``demands`` [rows] says which rows have a demand; ``level_weight`` gamma
    is 1 where the program maximises z and 0 otherwise. Rate 0 means: does not run there. Gaps are
    relative to the objective, or to ``unit`` where that is larger.
    """

    count: Floats
    rate: Floats
    usage: Floats
    gain: Floats
    resources: Floats
    capacity: Floats
    level: Floats
    floor: Floats
    demands: Bools
    level_weight: float
    level_capacity: Floats
    unit: float = 0.0

    def objective(self, x: Floats, z: float) -> float:
        """The objective of time fractions ``x`` [rows, columns] and level ``z``."""
        return float(self.count @ (self.gain * x).sum(axis=1)) + self.level_weight * z

    def demand(self, z: float) -> Floats:
        """The throughput each row must reach at level ``z`` [rows]; 0 where it asks for none."""
        return np.where(self.demands, self.floor + self.level * z, 0.0)


def max_min_program(
    count: Floats, rate: Floats, scale: Floats, level: Floats, capacity: Floats
) -> FractionProgram:
    """Maximise z with T_m . x_m >= p_m z, where a column is a device type.

    ``rate`` is T [rows, types], ``level`` p [rows], ``scale`` the devices of a job [rows].
    """
    return FractionProgram(
        count=count, rate=rate, usage=np.repeat(scale[:, None], len(capacity), axis=1),
        gain=np.zeros_like(rate), resources=np.eye(len(capacity)), capacity=capacity, level=level,
        floor=np.zeros(len(count)), demands=np.ones(len(count), dtype=bool), level_weight=1.0,
        level_capacity=np.zeros_like(capacity),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Time fractions ``x`` [rows, columns], level z, and prices that prove how good they are.

    ``job_prices`` y [rows] and ``resource_prices`` lambda [resources] are dual values; ``bound``
    is what they prove, by ``dual_bound``; ``time_prices`` u [rows] complete them where rows share;
    ``gap`` is its relative distance to the objective.
    """

    x: Floats
    z: float
    objective: float
    bound: float
    job_prices: Floats
    resource_prices: Floats
    time_prices: Floats | None = None
    gap: float
    method: str


def merge(program: FractionProgram, kind: Ints | None = None) -> tuple[FractionProgram, Ints]:
    """Merge rows with the same numbers into one row with their count: exact, by symmetry.

    ``kind`` [rows] is what else must be equal.

    Returns:
        The smaller program, and for each old row the index of its new one.
    """
    kinds = program.demands if kind is None else kind
    table: Floats = np.column_stack(
        (program.rate, program.usage, program.gain, program.level, program.floor,
         program.demands, kinds)
    ).astype(np.float64)  # fmt: skip
    row_of = equal_rows(table)
    if row_of.max(initial=-1) + 1 == len(table):
        return program, row_of
    # The first of each group's rows stands for it.
    kept = np.unique(row_of, return_index=True)[1]
    return replace(
        program,
        count=np.bincount(row_of, weights=program.count).astype(np.float64),
        rate=program.rate[kept],
        usage=program.usage[kept],
        gain=program.gain[kept],
        level=program.level[kept],
        floor=program.floor[kept],
        demands=program.demands[kept],
    ), row_of


def equal_rows(table: Floats) -> Ints:
    """Numbers rows so that equal ones have one number, in order of their first [rows]."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Columns are scaled by their largest, so that small numbers count as well.
        size = np.maximum(np.abs(table).max(axis=0, initial=0.0), 1e-300)
        total = np.add.reduce(table * (_weights(table.shape[1]) / size), axis=1)  # rows alike
    _, first, of = np.unique(total, return_index=True, return_inverse=True)
    if len(first) == len(table):
        return np.arange(len(table))
    of = of.reshape(-1)
    # Unlike rows may have equal sums by rounding: bytes decide, slowly but surely.
    if not (table[first[of]] == table).all():
        seen: dict[bytes, int] = {}
        return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in table])
    # Numbers in order of the first row, whatever the sums are.
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbers: Ints = rank[of]
    return numbers


@cache
def _weights(columns: int) -> Floats:
    """Pseudo-random weights, independent of any program's numbers."""
    weights: Floats = np.random.default_rng(0).uniform(1.0, 2.0, size=columns)
    return weights


def dual_bound(
    program: FractionProgram, job_prices: Floats, resource_prices: Floats
) -> tuple[float, Floats, Floats]:
    """The upper bound that prices prove by weak duality, whatever method found them.

    Prices are made admissible first: negative ones become 0, and where z is maximised both are
    scaled so that z's own column is balanced.

    Returns:
        The bound (infinite where the prices prove nothing), and the admissible prices.
    """
    y = np.where(program.demands, np.maximum(job_prices, 0.0), 0.0)
    prices = np.maximum(resource_prices, 0.0)
    if program.level_weight:
        # z's column: sum of y p minus what a unit of z gives back has to be its weight.
        balance = program.count @ (y * program.level) - program.level_capacity @ prices
        if balance <= 0:
            # No scale makes these prices a proof.
            return np.inf, y, prices
        y, prices = y * (program.level_weight / balance), prices * (program.level_weight / balance)
    worth = program.gain + y[:, None] * program.rate - program.usage * (prices @ program.resources)
    worth = np.where(program.rate > 0, worth, 0.0)
    # Each row's time is worth its best column's surplus.
    time = np.maximum(worth.max(axis=1), 0.0)
    bound = program.capacity @ prices + program.count @ (time - y * program.floor)
    return float(bound), y, prices


def gap_between(program: FractionProgram, objective: float, bound: float) -> float:
    """Relative distance of an objective to its bound."""
    return abs(bound - objective) / max(abs(objective), abs(bound), program.unit, 1e-300)


def level_of(program: FractionProgram, x: Floats) -> float:
    """The largest z that time fractions ``x`` support."""
    rows = program.demands & (program.level > 0)
    reached = (program.rate * x).sum(axis=1)[rows] - program.floor[rows]
    return float((reached / program.level[rows]).min()) if rows.any() else 0.0


def fit(program: FractionProgram, x: Floats) -> Floats:
    """Scale time fractions down until they obey 5.1 to 5.3 (but for the last bits)."""
    x = np.maximum(x, 0.0)
    # Time first, then resources; either shrinks what it touches.
    x = x / np.maximum(x.sum(axis=1), 1.0)[:, None]
    used = resource_use(program, x)
    limited = (program.level_capacity == 0) & (used > program.capacity)
    if limited.any():
        # A column shrinks by the tightest of its resources.
        share = np.where(limited, program.capacity / np.where(limited, used, 1.0), 1.0)
        x = x * np.where(program.resources > 0, share[:, None], 1.0).min(axis=0)
    return x


def shortfall(program: FractionProgram, x: Floats, z: float) -> float:
    """How far ``x`` and z break a floor or a budget, relative to it; 0 where they hold."""
    rows = program.demands & ((program.floor > 0) | (program.level > 0))
    needed = (program.floor + program.level * z)[rows]
    reached = (program.rate * x).sum(axis=1)[rows]
    lacking = (needed - reached) / np.where(needed > 0, needed, np.inf)
    limit = program.capacity + program.level_capacity * z
    excess = (resource_use(program, x) - limit) / np.maximum(limit, 1e-300)
    return max(0.0, float(lacking.max(initial=0.0)), float(excess.max(initial=0.0)))


def resource_use(program: FractionProgram, x: Floats) -> Floats:
    """What ``x`` uses of each resource [resources]."""
    return program.resources @ (program.count @ (program.usage * x))


def solution_of(
    program: FractionProgram, x: Floats, job_prices: Floats, resource_prices: Floats, method: str
) -> Solution:
    """Time fractions and prices as a feasible solution with the bound that the prices prove."""
    bound, y, price = dual_bound(program, job_prices, resource_prices)
    x = fit(program, x)
    z = level_of(program, x) if program.level_weight else 0.0
    objective = program.objective(x, z)
    return Solution(
        x=x, z=z, objective=objective, bound=bound, job_prices=y, resource_prices=price,
        gap=max(gap_between(program, objective, bound), shortfall(program, x, z)), method=method,
    )  # fmt: skip


# Up to so many columns are cheaper all at once.
FEW = 5_000
# Columns whose cost is within this part of the best way's are likely ones.
LIKELY = 1e-2
# Columns that have a smaller part of the time of a row's first are not.
USED = 0.1
# Columns that join at a time, of each row.
JOINING = 4
MAX_ROUNDS = 500
# What a column must pay, in units of the program in HiGHS.
PAYS = 1e-11


def solve_by_simplex(
    program: FractionProgram, likely: Bools | None = None, should_stop: Callable[[], bool] = never
) -> Solution:
    """Maximise a program without pairs.

    ``likely`` [rows, columns] are the columns to begin with, the fastest ones if None.

    Raises:
        BackendError: HiGHS finds no optimum.
    """
    runs = program.rate > 0
    if runs.sum() <= FEW:
        return _Columns(program, runs).solve(should_stop)
    if likely is None or not likely.any():
        likely = program.rate >= _of_the_best(program.rate)
    try:
        return _Columns(program, likely & runs).solve(should_stop)
    except BackendError:  # floors may be out of reach for these columns
        return _Columns(program, runs).solve(should_stop)


def likely_columns(program: FractionProgram, near: Solution) -> Bools:
    """The columns that a solution uses, or that cost nearly as little at its prices."""
    worth = program.gain + near.job_prices[:, None] * program.rate
    profit = worth - program.usage * (near.resource_prices @ program.resources)
    profit = np.where(program.rate > 0, profit, -np.inf)
    # At the prices, the row's best profit; what is nearly as good may be in an optimum.
    best = np.maximum(profit.max(axis=1), 0.0)
    scale = np.maximum(worth.max(axis=1), 1e-300)
    used = near.x > USED * near.x.max(axis=1, keepdims=True)
    likely: Bools = used | (best[:, None] - profit <= LIKELY * scale[:, None])
    return likely


def _of_the_best(values: Floats) -> Floats:
    """[rows, 1] the least of the ``JOINING`` largest values of each row."""
    best: Floats = np.sort(values, axis=1)[:, -JOINING:][:, :1]
    return best


class _Columns:
    """The program over some columns. Rows: each row's time, resources, then demands; z is first."""

    def __init__(self, program: FractionProgram, kept: Bools) -> None:
        p = self.program = program
        self.kept = np.zeros_like(kept)
        self.row = np.maximum(p.rate.max(axis=1), 1e-300)
        self.gain_unit = float(np.abs(p.gain).max()) or 1.0
        # Rows in units of their best rate, and z of its largest level: HiGHS's tolerances are
        # absolute.
        level = np.where(p.demands, p.count * p.level, 0.0) / self.row
        self.unit = 1.0 / (float(level.max()) or 1.0)
        low = np.where(p.demands, p.count * p.floor / self.row, -np.inf)
        self.session = LinearSession(generates_columns=True)
        self.session.add_rows(np.full(len(p.count), -np.inf), p.count)
        self.session.add_rows(np.full(len(p.capacity), -np.inf), p.capacity)
        self.session.add_rows(low, np.full(len(low), np.inf))
        # z takes what a level asks, and gives back ``level_capacity``.
        z = np.concatenate((-p.level_capacity, -level)) * self.unit * p.level_weight
        asked = np.flatnonzero(z)
        self.session.add_columns(
            np.array([p.level_weight]), np.zeros(1), len(p.count) + asked, z[asked]
        )
        self.m = self.c = np.zeros(0, np.int64)
        self._add(kept)

    def _add(self, fresh: Bools) -> None:
        p, rows = self.program, len(self.program.count)
        m, c = np.nonzero(fresh)
        # Each column's entries: its row's time, what it holds of each resource, its throughput.
        held = p.usage[m, c][:, None] * p.resources[:, c].T
        entries = np.hstack((np.ones((len(m), 1)), held, (p.rate[m, c] / self.row[m])[:, None]))
        place, part = np.nonzero(entries)
        # Part 0 is time, the last part the demand, those between resources.
        row = np.where(part == 0, m[place], rows + part - 1)
        row = np.where(part == entries.shape[1] - 1, rows + len(p.capacity) + m[place], row)
        starts = np.searchsorted(place, np.arange(len(m)))
        self.session.add_columns(p.gain[m, c] / self.gain_unit, starts, row, entries[place, part])
        self.m, self.c = np.concatenate((self.m, m)), np.concatenate((self.c, c))
        self.kept |= fresh

    def solve(self, should_stop: Callable[[], bool]) -> Solution:
        """Solve, with more columns until none would pay."""
        p, rows = self.program, len(self.program.count)
        rounds = 0
        while True:
            rounds += 1
            answer = self.session.solve()
            if answer is None:
                raise BackendError("HiGHS found no optimum of the allocation program")
            # Signs as HiGHS gives them; what rounding turns is 0.
            time = np.maximum(answer.prices[:rows], 0.0)
            price = np.maximum(answer.prices[rows:-rows], 0.0)
            paid = np.maximum(-answer.prices[-rows:], 0.0) / self.row
            pays = p.gain / self.gain_unit + paid[:, None] * p.rate - time[:, None]
            pays -= p.usage * (price @ p.resources)
            pays = np.where(self.kept | (p.rate <= 0), 0.0, pays)
            # The best few of each row join: all at once would be the whole program.
            fresh = (pays > PAYS) & (pays >= _of_the_best(pays))
            if should_stop() or not fresh.any() or rounds >= MAX_ROUNDS:
                break
            self._add(fresh)
        x = np.zeros_like(p.rate)
        x[self.m, self.c] = np.maximum(answer.values[1:], 0.0) / p.count[self.m]
        unit = self.unit if p.level_weight else self.gain_unit
        return solution_of(p, x, paid * unit, price * unit, "HiGHS simplex")
