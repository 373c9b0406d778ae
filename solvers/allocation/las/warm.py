"""LAS solved repeatedly as jobs come and go: one program over classes of equal jobs.

A simulator allocates thousands of times, each time with one job more or less. The program has a row
of time and a row of demand for each class that ever appeared. A job that arrives or leaves changes
two numbers of its class, and the simplex method starts from its last basis (a warm start).
"""

import numpy as np

from ....schema.errors import BackendError, ProblemError
from ...lp import LinearSession
from ..program import Floats, Ints


class WarmMaxMin:
    """Maximise the least throughput over ``level`` among the classes present.

    The allocation is the vertex of the optimal face that the simplex method reaches from the
    previous one: deterministic for a sequence of calls, but another than ``solve`` returns.
    """

    def __init__(self, capacity: Floats) -> None:
        """Start with no classes.

        Args:
            capacity: Devices of each type [types].
        """
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

        Args:
            rate: Steps per second of one job [types]; 0 where it does not run.
            scale: Devices a job asks for.
            level: Throughput of one job that one unit of the objective asks for.

        Raises:
            ProblemError: The class runs nowhere.
        """
        runs = np.flatnonzero((rate > 0) & (scale <= self.capacity))
        if not len(runs):
            raise ProblemError("a class of jobs runs on no device type of the pool")
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

        Args:
            a: A class.
            b: A class of the same scale factor.
            rates: Steps per second of either beside the other [2, types]; 0 where they cannot.
            scale: Devices that they share.
        """
        types = len(self.capacity)
        first, second = types + 2 * a, types + 2 * b
        for kind in np.flatnonzero((rates > 0).all(axis=0) & (scale <= self.capacity)).tolist():
            one, two = rates[0, kind] / self.best[a], rates[1, kind] / self.best[b]
            if a == b:
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
        for number, count in zip(classes.tolist(), counts.tolist(), strict=True):
            row = len(self.capacity) + 2 * number
            self.session.set_coefficient(row + 1, 0, -count * self.level[number])
            for column in self.twins.get(number, ()):  # nobody shares with itself
                self.session.set_column(column, np.inf if count > 1 else 0.0)

    def solve(self, *, with_prices: bool = False) -> tuple[float, Floats]:
        """The objective, and each class's total time on each type [classes, types].

        Args:
            with_prices: Whether ``prices`` will be read.

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
