"""LAS over classes of equal jobs, warm from one call to the next."""

import numpy as np

from ....schema.errors import ProblemError
from ....solvers.allocation.engine import spread
from ....solvers.allocation.las.warm import WarmMaxMin
from ....solvers.allocation.space_sharing.column_generation import PairTimes
from ..arrays import Ints
from ..cluster.active import Active
from .shares import Shares


class WarmLas:
    """LAS over classes of equal jobs; each call starts from the last basis, which is fast.

    Of several optima: the simplex vertex nearest to the last one's basis; equal jobs get equal
    shares. With space sharing every pair of classes that can share is a column too.
    """

    agnostic = False
    leaves_idle = False

    def __init__(self, *, weighted: bool = False, shares_space: bool = False) -> None:
        """Start cold.

        Args:
            weighted: Whether priority weights count.
            shares_space: Whether pairs of jobs may share devices.
        """
        self.name = "las_weighted" if weighted else "las"
        self.weighted, self.shares_space = weighted, shares_space
        self._program: WarmMaxMin | None = None
        self._start(None)

    def _start(self, capacity: Ints | None) -> None:
        """Begin again without classes, where other devices are up than before [types]."""
        self._capacity = capacity
        self._classes: dict[tuple[int, float], int] = {}
        self._keys: list[tuple[str, int]] = []
        self._counts = np.zeros(0, dtype=np.int64)
        self._of_kind = np.zeros(0, dtype=np.int64)  # -1: no class yet; where weights do not count

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Move the counts of classes to the jobs present, and go on from the last basis.

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        program, of, counts = self.count(active)
        self.tell(program, counts)
        _, times = program.solve()
        x = (times[of] / counts[of][:, None]).T
        if not self.shares_space:
            return Shares(x)
        a, b, column, time = program.pair_times()
        kept = (counts[a] > 0) & (counts[b] > 0)  # absent classes may keep a tolerance of time
        totals = PairTimes(a=a[kept], b=b[kept], column=column[kept], time=time[kept])
        return Shares(x, spread(totals, of, counts.astype(float)))

    def count(self, active: Active) -> tuple[WarmMaxMin, Ints, Ints]:
        """The program, the class of each job [jobs], and the jobs of each class [classes].

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        if active.pool.uses_mixes:
            raise ProblemError("the warm solver knows device types only; mixes need columns=True")
        if self._program is None or active.capacity is not self._capacity:
            self._start(active.capacity)
            self._program = WarmMaxMin(active.capacity.astype(float))
        of = self._classes_of(self._program, active)
        return self._program, of, np.bincount(of, minlength=len(self._counts))

    def tell(self, program: WarmMaxMin, counts: Ints) -> None:
        """Bring the program up to date with the jobs of each class [classes]."""
        changed = (counts != self._counts).nonzero()[0]
        program.set_counts(changed, counts[changed])
        self._counts = counts

    def _classes_of(self, program: WarmMaxMin, active: Active) -> Ints:
        """The class of each job [jobs]; new ones are added in the order of their first jobs."""
        kinds = active.kind
        if self.weighted:
            keys = list(zip(kinds.tolist(), active.weight.tolist(), strict=True))
            for i, key in enumerate(keys):
                if key not in self._classes:
                    self._add_class(program, active, i, key)
            return np.array([self._classes[key] for key in keys])
        more = len(active.kinds) - len(self._of_kind)
        self._of_kind = np.append(self._of_kind, np.full(more, -1)) if more else self._of_kind
        of: Ints = self._of_kind[kinds]
        if of.min() >= 0:
            return of
        for i in (of < 0).nonzero()[0].tolist():
            kind = int(kinds[i])
            if self._of_kind[kind] < 0:
                self._add_class(program, active, i, (kind, 1.0))
                self._of_kind[kind] = len(self._counts) - 1
        return self._of_kind[kinds]

    def _add_class(
        self, program: WarmMaxMin, active: Active, i: int, key: tuple[int, float]
    ) -> None:
        scale, capacity = float(active.scale[i]), program.capacity
        rate = np.where(scale <= capacity, active.rate[:, i], 0.0)
        equal = float(np.add.reduce(rate * capacity) / capacity.sum())  # no BLAS, see interior
        number = program.add_class(rate, scale, key[1] * equal / scale)
        job = active.jobs[i]
        self._classes[key] = number
        self._counts = np.append(self._counts, 0)
        self._keys.append((job.model, job.scale_factor))
        if not self.shares_space:
            return
        for other, beside in enumerate(self._keys):
            if beside[1] == job.scale_factor:
                rates = active.pool.pair_rates(self._keys[number], beside)
                program.add_pair(number, other, rates, scale)
