"""Programs without pairs by the simplex method: a vertex, exact to the last digits.

It answers where the interior point method does not: rows that must keep exactly what is the most
they can have leave no interior. Of many columns only likely ones are in the program at first;
those that would pay at its prices join until none would (column generation). So 2,000 jobs on 200
types need some 6,000 columns, not 400,000.

    type 7 does 3 a second for a job; prices: 1 of its throughput, 0.5 of its time, 2 of the type
    3 x 1 - 0.5 - 2 = 0.5 > 0: the column pays, and joins
"""

from collections.abc import Callable

import numpy as np

from ...schema.errors import BackendError
from ..effort import never
from ..lp import LinearSession
from .program import Bools, Floats, FractionProgram, Solution, solution_of

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


def solve(
    program: FractionProgram, likely: Bools | None = None, should_stop: Callable[[], bool] = never
) -> Solution:
    """Maximise a program without pairs.

    Args:
        program: The program.
        likely: Columns to begin with [rows, columns]; the fastest ones if None.
        should_stop: Asked before columns join; True ends with those at hand.

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
        level = np.where(p.demands, p.count * p.level, 0.0) / self.row
        self.unit = 1.0 / (float(level.max()) or 1.0)
        low = np.where(p.demands, p.count * p.floor / self.row, -np.inf)
        self.session = LinearSession(generates_columns=True)
        self.session.add_rows(np.full(len(p.count), -np.inf), p.count)
        self.session.add_rows(np.full(len(p.capacity), -np.inf), p.capacity)
        self.session.add_rows(low, np.full(len(low), np.inf))
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
        held = p.usage[m, c][:, None] * p.resources[:, c].T
        entries = np.hstack((np.ones((len(m), 1)), held, (p.rate[m, c] / self.row[m])[:, None]))
        place, part = np.nonzero(entries)
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
            time = np.maximum(answer.prices[:rows], 0.0)
            price = np.maximum(answer.prices[rows:-rows], 0.0)
            paid = np.maximum(-answer.prices[-rows:], 0.0) / self.row
            pays = p.gain / self.gain_unit + paid[:, None] * p.rate - time[:, None]
            pays -= p.usage * (price @ p.resources)
            pays = np.where(self.kept | (p.rate <= 0), 0.0, pays)
            fresh = (pays > PAYS) & (pays >= _of_the_best(pays))
            if should_stop() or not fresh.any() or rounds >= MAX_ROUNDS:
                break
            self._add(fresh)
        x = np.zeros_like(p.rate)
        x[self.m, self.c] = np.maximum(answer.values[1:], 0.0) / p.count[self.m]
        unit = self.unit if p.level_weight else self.gain_unit
        return solution_of(p, x, paid * unit, price * unit, "HiGHS simplex")
