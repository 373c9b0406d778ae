"""A sum of ratios under SLOs, by branch and bound (thesis 6.4.2 with the SLOs of 6.4.3).

The objective is sum_m throughput(m, X) / cost(m, X). A ratio depends on where a job runs, not on
how long. So a job with an SLO may as well run at exactly the throughput f_m that it needs: less of
the same x keeps its ratio and frees devices. With throughput(m, X) = f_m the ratio is f_m / d_m,
d_m the dollars per hour of the job: a convex function, which a linear program cannot maximise.

Each job's polytope P_m of ways to run (throughput f_m within the time there is) has few vertices.
Over P_m the least concave function above f_m / d_m is their convex combination. So one linear
program over weights of vertices bounds the sum; its vertex solution mixes at most as many jobs as
there are resources, and only these are worth less than it thinks. Where that is too much, the range
of one such job's dollars is cut in two.

A job without an SLO counts with its cheapest column, and runs there in what the others leave.

    a job has to do 1 a second; a V100 does 2 for 3 $/h, a K80 1 for 1 $/h
    half its time on the V100 costs 1.5 $/h, ratio 2/3; all of it on the K80 1 $/h, ratio 1
    half of each way costs 1.25, ratio 0.8; the program thinks (2/3 + 1) / 2 = 0.83: a bound
    so dollars are cut in two there: up to 1.25, and from 1.25 on

A node is one linear program; how many there are has no bound but the limit of work.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from ...schema.errors import BackendError
from ..lp import LinearAnswer, LinearSession
from .engine import Outcome, RegionCut, RegionProof, optimise, tighten
from .instance import Instance
from .policy import PRECISION, Total
from .program import Floats

GAP = 5e-7  # relative; below what is called optimal
_WORK = 400_000  # nodes times columns of the program, after which the search stops with its bound
_ASCENTS = 8
_SLACK = 1e-9  # devices


@dataclass(frozen=True, slots=True, kw_only=True)
class SumOfRatios:
    """Maximise the sum over jobs of throughput / dollars per hour, with floors.

    ``dollars`` [columns] per unit of usage; ``floor`` [jobs] is 0 where there is none; ``level``
    [jobs] is what jobs without a floor share fairly in what is left.
    """

    dollars: Floats
    floor: Floats
    level: Floats

    def optimise(self, instance: Instance) -> Outcome:
        """Branch and bound.

        Raises:
            InfeasibleError: The floors cannot be met together.
        """
        return _Search(instance, self).run()


@dataclass(frozen=True, slots=True)
class _Ways:
    """Vertices of a job's ways to run: ``x`` [vertices, columns], ``use`` [vertices, resources]."""

    x: Floats
    use: Floats
    value: Floats


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """A part of the space: ``cuts`` lead to it; ``prices`` prove its ``bound``."""

    minus_bound: float
    number: int
    cuts: tuple[RegionCut, ...] = field(compare=False)
    prices: Floats = field(compare=False)
    x: Floats = field(compare=False)
    cut_job: int = field(compare=False)
    cut_dollars: float = field(compare=False)

    @property
    def bound(self) -> float:
        return -self.minus_bound


class _Search:
    """The jobs with SLOs as polytopes, and the best allocation of them so far."""

    def __init__(self, instance: Instance, goal: SumOfRatios) -> None:
        self.instance, self.goal = instance, goal
        self.paid = instance.usage * goal.dollars  # dollars per hour while held [jobs, columns]
        self.bound_jobs = np.flatnonzero(goal.floor > 0)
        self.cheapest = np.where(instance.rate > 0, instance.rate / self.paid, 0.0)
        best = self.cheapest.max(axis=1)
        self.free_value = float(best[goal.floor <= 0].sum())
        # More than all jobs are worth, so devices that are lacking are bought only where no weights
        # do without: each program has an optimum, and how much it lacks tells whether it is an
        # allocation.
        self.penalty = 1e3 * float(best.sum() + 1.0)
        self.ways: dict[tuple[int, float, float], _Ways] = {}
        self.best, self.best_value = np.zeros_like(instance.rate), -np.inf

    def run(self) -> Outcome:
        dollars, floor = self.goal.dollars, self.goal.floor
        floors = Total(worth=0 * self.instance.rate, charge=dollars, floor=floor)
        if not len(self.bound_jobs):
            return self._outcome([self._node((), 0)], 1)
        # An allocation that meets the floors, whatever it is worth: the search begins with a known
        # value.
        self._offer(floors.optimise(self.instance).x)
        heap = [self._node((), 0)]
        # A good allocation first: what it is worth closes most nodes before they are cut.
        self._ascend(heap[0].x)
        closed: list[_Node] = []
        nodes = 1
        # Work is nodes times columns, as a program's time goes with them: equal on every machine.
        most = max(_WORK // max(sum(len(ways.value) for ways in self.ways.values()), 1), 40)
        while heap and not self._is_close(heap[0]) and nodes < most:
            if self.instance.should_stop():
                break
            node = heapq.heappop(heap)
            for is_at_most in (True, False):
                cut = RegionCut(node.cut_job, node.cut_dollars, is_at_most)
                child = self._node((*node.cuts, cut), nodes)
                nodes += 1
                # Closed children still bound the answer: they stay in the proof.
                if self._is_close(child):
                    closed.append(child)
                else:
                    heapq.heappush(heap, child)
        return self._outcome([*closed, *heap], nodes)

    def _is_close(self, node: _Node) -> bool:
        known = self.best_value + self.free_value
        return node.bound <= known * (1 + GAP) or node.cut_job < 0

    def _offer(self, x: Floats) -> None:
        """Take an allocation for the best if it is, with SLOs met exactly."""
        rows = self.bound_jobs
        reached = (self.instance.rate[rows] * x[rows]).sum(axis=1)
        exact = np.zeros_like(x)
        # Scaled to the floor exactly: less of the same keeps the ratio and frees devices.
        exact[rows] = x[rows] * (self.goal.floor[rows] / reached)[:, None]
        value = float((self.goal.floor[rows] / (self.paid[rows] * exact[rows]).sum(axis=1)).sum())
        if value > self.best_value:
            self.best, self.best_value = exact, value

    def _ranges(self, cuts: tuple[RegionCut, ...]) -> dict[int, tuple[float, float]]:
        ranges: dict[int, tuple[float, float]] = {}
        for cut in cuts:
            low, high = ranges.get(cut.job, (0.0, np.inf))
            ranges[cut.job] = (
                (low, min(high, cut.dollars)) if cut.is_at_most else (max(low, cut.dollars), high)
            )
        return ranges

    def _ways_of(self, job: int, low: float, high: float) -> _Ways:
        key = job, low, high
        if key not in self.ways:
            self.ways[key] = self._vertices(job, low, high)
        return self.ways[key]

    def _vertices(self, job: int, low: float, high: float) -> _Ways:
        """Corners of {x >= 0: T x = f, sum x <= 1, low <= d x <= high}."""
        instance, floor = self.instance, self.goal.floor[job]
        columns = np.flatnonzero(instance.rate[job] > 0)
        # y are parts of the work, x = y T of time; corners are sought in y.
        time = floor / instance.rate[job, columns]  # if all work is done there
        dollars = self.paid[job, columns] * time
        parts = np.array(list(_corners(time, dollars, low, high))).reshape(-1, len(columns))
        x = np.zeros((len(parts), instance.rate.shape[1]))
        x[:, columns] = parts * time
        return _Ways(
            x=x,
            use=(x * instance.usage[job]) @ instance.resources.T,
            value=floor / (x @ self.paid[job]) if len(parts) else np.zeros(0),
        )

    def _node(self, cuts: tuple[RegionCut, ...], number: int) -> _Node:
        ranges = self._ranges(cuts)
        jobs = self.bound_jobs.tolist()
        ways = [self._ways_of(job, *ranges.get(job, (0.0, np.inf))) for job in jobs]
        none = np.zeros(len(self.instance.capacity))
        if not ways or any(not len(way.value) for way in ways):
            bound = self.free_value if not ways else -np.inf
            return _Node(-bound, number, cuts, none, np.zeros_like(self.instance.rate), -1, 0.0)
        values = [way.value for way in ways]
        answer, slack = self._solve(ways, values)
        prices = np.maximum(answer.prices[: len(none)], 0.0)
        # Weak duality: at any prices of devices no allocation is worth more than they and each
        # job's best way at these prices. So the bound holds whatever HiGHS rounded.
        bound = float(prices @ self.instance.capacity) + self.free_value
        bound += sum(float((way.value - way.use @ prices).max()) for way in ways)
        x, thought = self._mixed(ways, answer.values)
        # Only without lacking devices is it an allocation.
        if slack <= _SLACK:
            self._offer(x)
        dollars = (self.paid * x).sum(axis=1)[self.bound_jobs]
        over = thought - self.goal.floor[self.bound_jobs] / dollars
        # The job that the program overrates most: cut where it is now, neither half overrates it
        # there.
        worst = int(np.argmax(over))
        # What is overrated by rounding alone is exact: the node needs no cut.
        splits = over[worst] > 1e-12 * thought[worst]
        return _Node(
            -bound, number, cuts, prices, x,
            int(self.bound_jobs[worst]) if splits else -1, float(dollars[worst]),
        )  # fmt: skip

    def _solve(self, ways: list[_Ways], values: list[Floats]) -> tuple[LinearAnswer, float]:
        """The best weights of vertices, and how many devices they lack."""
        kinds, jobs = len(self.instance.capacity), len(ways)
        session = LinearSession()
        session.add_rows(
            # Each job's weights sum to 1, whatever is lacking is bought at the penalty.
            np.concatenate((np.full(kinds, -np.inf), np.ones(jobs))),
            np.concatenate((self.instance.capacity, np.ones(jobs))),
        )
        use = np.vstack([way.use for way in ways])
        owner = np.repeat(np.arange(jobs), [len(way.value) for way in ways])
        entries = np.hstack((use, np.ones((len(use), 1))))
        rows = np.hstack((np.tile(np.arange(kinds), (len(use), 1)), kinds + owner[:, None]))
        kept = entries != 0
        starts = np.concatenate(([0], np.cumsum(kept.sum(axis=1))[:-1]))
        session.add_columns(np.concatenate(values), starts, rows[kept], entries[kept])
        lack = -np.full(kinds, self.penalty)
        session.add_columns(lack, np.arange(kinds), np.arange(kinds), -np.ones(kinds))
        # So there is an optimum in every node.
        answer = session.solve()
        if answer is None:
            raise BackendError("HiGHS found no optimum of a program that has one")
        return answer, float(answer.values[len(use) :].sum())

    def _mixed(self, ways: list[_Ways], weights: Floats) -> tuple[Floats, Floats]:
        """Time fractions [jobs, columns], and what the program thinks each job is worth."""
        x, thought, start = np.zeros_like(self.instance.rate), np.zeros(len(ways)), 0
        for place, (job, way) in enumerate(zip(self.bound_jobs, ways, strict=True)):
            part = np.maximum(weights[start : start + len(way.value)], 0.0)
            part = part / part.sum()
            x[job], thought[place] = part @ way.x, float(part @ way.value)
            start += len(way.value)
        return x, thought

    def _ascend(self, x: Floats) -> None:
        """From an allocation uphill: a convex function is above its tangents."""
        ways = [self._ways_of(job, 0.0, np.inf) for job in self.bound_jobs.tolist()]
        for _ in range(_ASCENTS):
            dollars = (self.paid * x).sum(axis=1)
            # The slope of f / d at the present dollars, along each way.
            tangents = [
                -self.goal.floor[job] / dollars[job] * (way.x @ self.paid[job] / dollars[job])
                for job, way in zip(self.bound_jobs, ways, strict=True)
            ]
            answer, slack = self._solve(ways, tangents)
            if slack > _SLACK:
                return
            before = self.best_value
            x = self._mixed(ways, answer.values)[0]
            self._offer(x)
            if self.best_value <= before * (1 + PRECISION):
                return

    def _outcome(self, leaves: list[_Node], nodes: int) -> Outcome:
        instance, goal = self.instance, self.goal
        x = self.best + self._left_over()
        x = tighten(instance.program(floor=goal.floor), x)
        rows = self.bound_jobs
        reached = (instance.rate * x).sum(axis=1)
        objective = self.free_value
        objective += float((reached[rows] / (self.paid[rows] * x[rows]).sum(axis=1)).sum())
        bound = max(objective, *(leaf.bound for leaf in leaves))
        top = max(leaves, key=lambda leaf: leaf.bound)
        return Outcome(
            x=x,
            pairs=None,
            throughput=reached,
            objective=objective,
            bound=bound,
            gap=max(0.0, 1 - objective / bound),
            job_prices=np.zeros(instance.num_jobs),
            resource_prices=top.prices,
            method=f"branch and bound over each job's dollars, {nodes} nodes",
            regions=tuple(RegionProof(leaf.cuts, leaf.prices) for leaf in leaves),
        )

    def _left_over(self) -> Floats:
        """What jobs without an SLO get: max-min fair, on their cheapest columns."""
        instance, free = self.instance, self.goal.floor <= 0
        if not free.any():
            return np.zeros_like(instance.rate)
        used = ((self.best * instance.usage) @ instance.resources.T).sum(axis=0)
        # Columns of a device type that is full are left out; remainders by rounding count as full.
        left = np.maximum(instance.capacity - used, 0.0)
        left[left < PRECISION * instance.capacity] = 0.0
        allowed = self.cheapest >= self.cheapest.max(axis=1)[:, None] * (1 - 1e-12)
        whole = (instance.resources[:, None, :] > 0) & (left == 0)[:, None, None]
        allowed &= free[:, None] & ~whole.any(axis=0)
        level = np.where(allowed.any(axis=1), self.goal.level, 0.0)
        if not level.any():
            return np.zeros_like(instance.rate)
        rest = replace(
            instance,
            rate=np.where(allowed, instance.rate, 0.0),
            # Full ones are closed above; their capacity only must not be 0.
            capacity=np.where(left > 0, left, instance.capacity),
        )
        return optimise(rest, rest.program(level=level)).x


def _corners(time: Floats, dollars: Floats, low: float, high: float) -> Iterator[Floats]:
    """Corners of the parts y of a job's work: y >= 0, sum y = 1, within time 1 and the dollars."""
    # As many columns have a part as limits are met exactly, and one more.
    limits = [(time, 1.0)]
    limits += [(dollars, low)] if low > 0 else []
    limits += [(dollars, high)] if np.isfinite(high) else []
    number = len(time)

    def is_inside(y: Floats) -> bool:
        paid = float(y @ dollars)
        return bool(
            (y >= -1e-12).all()
            and y @ time <= 1 + PRECISION
            and low * (1 - PRECISION) <= paid <= high * (1 + PRECISION)
        )

    # k columns need k equations: the sum, and k - 1 limits met; never both dollars.
    for size in range(1, min(len(limits), 2) + 2):
        for chosen in combinations(range(number), size):
            for tight in combinations(limits, size - 1):
                matrix = np.array([np.ones(size), *(row[list(chosen)] for row, _ in tight)])
                right = np.array([1.0, *(value for _, value in tight)])
                # Parallel limits have no corner of their own.
                if abs(np.linalg.det(matrix)) <= 1e-12 * np.abs(matrix).max(axis=1).prod():
                    continue
                y = np.zeros(number)
                y[list(chosen)] = np.linalg.solve(matrix, right)
                if is_inside(y):
                    yield np.maximum(y, 0.0)
