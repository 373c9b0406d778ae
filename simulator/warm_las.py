"""LAS over classes of equal jobs, warm from one call to the next."""

import numpy as np

from ..schema.errors import ProblemError
from ..solvers.allocation.engine import spread
from ..solvers.allocation.shared import PairTimes
from ..solvers.allocation.warm import WarmMaxMin
from .active import Active
from .shares import Shares


class WarmLas:
    """LAS over classes of equal jobs, warm from one call to the next: fast.

    Of several optima: the simplex vertex nearest to the last one's basis; equal jobs get equal
    shares. With space sharing every pair of classes that can share is a column too.
    """

    agnostic = False

    def __init__(self, *, weighted: bool = False, shares_space: bool = False) -> None:
        """Start cold.

        Args:
            weighted: Whether priority weights count.
            shares_space: Whether pairs of jobs may share devices.
        """
        self.name = "las_weighted" if weighted else "las"
        self.weighted, self.shares_space = weighted, shares_space
        self._program: WarmMaxMin | None = None
        self._classes: dict[tuple[int, float], int] = {}
        self._keys: list[tuple[str, int]] = []
        self._counts: list[int] = []

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Move the counts of classes to the jobs present, and go on from the last basis.

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        if active.pool.uses_mixes:
            raise ProblemError("the warm solver knows device types only; mixes need warm=False")
        if self._program is None:
            self._program = WarmMaxMin(active.pool.capacity.astype(float))
        weights = active.weight if self.weighted else np.ones(len(active))
        keys = list(zip(active.kind.tolist(), weights.tolist(), strict=True))
        for i, key in enumerate(keys):
            if key not in self._classes:
                self._add_class(self._program, active, i, key)
        of = np.array([self._classes[key] for key in keys])
        counts = np.bincount(of, minlength=len(self._counts)).tolist()
        for number, (old, new) in enumerate(zip(self._counts, counts, strict=True)):
            if old != new:
                self._program.set_count(number, new)
        self._counts = counts
        _, times = self._program.solve()
        x = (times[of] / np.array(counts)[of][:, None]).T
        if not self.shares_space:
            return Shares(x)
        a, b, column, time = self._program.pair_times()
        present = np.array(counts)
        kept = (present[a] > 0) & (present[b] > 0)  # absent classes may keep a tolerance of time
        totals = PairTimes(a=a[kept], b=b[kept], column=column[kept], time=time[kept])
        return Shares(x, spread(totals, of, present.astype(float)))

    def _add_class(
        self, program: WarmMaxMin, active: Active, i: int, key: tuple[int, float]
    ) -> None:
        rate, scale = active.rate[:, i], float(active.scale[i])
        capacity = program.capacity
        equal = float(rate @ capacity / capacity.sum())
        number = program.add_class(rate, scale, key[1] * equal / scale)
        job = active.jobs[i]
        self._classes[key] = number
        self._counts.append(0)
        self._keys.append((job.model, job.scale_factor))
        if not self.shares_space:
            return
        for other, beside in enumerate(self._keys):
            if beside[1] == job.scale_factor:
                rates = active.pool.pair_rates(self._keys[number], beside)
                program.add_pair(number, other, rates, scale)
