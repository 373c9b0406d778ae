"""LAS as jobs come and go: over classes of equal jobs, from the last answer."""

from collections import Counter

import numpy as np

from ....schema.errors import ProblemError
from ....solvers.allocation.engine import solve_alone, spread
from ....solvers.allocation.las import WarmMaxMin, centre
from ....solvers.allocation.program import max_min_program
from ....solvers.allocation.space_sharing.column_generation import PairTimes
from ..arrays import Floats, Ints
from ..cluster.active import Active
from .shares import Shares

Key = tuple[float, int, tuple[bool, ...]]


class FlatLas:
    """LAS that ignores device types, over classes of jobs that are then equal.

    With one rate on every type a job's row is ``sum_j X_mj >= z w_m / s_m``. So jobs of one weight,
    scale factor and set of types are alike whatever their models. Of several optima: the analytic
    centre of the optimal face, which depends on how many jobs each class has and on nothing else.
    Where the jobs that run anywhere fill the pool it is known: every job gets the same part of each
    type, X_mj = C_j / (N s_m). Elsewhere Newton's method finds it, once for each tuple of counts.
    """

    agnostic = True
    shares_space = False
    leaves_idle = False

    def __init__(self, *, weighted: bool = False, blind: bool = False) -> None:
        """Start with nothing solved.

        Args:
            weighted: Whether priority weights count.
            blind: Whether types that cannot run a job count as if they did, where it fits.
        """
        self.name = "las_weighted" if weighted else "las"
        self.weighted, self.blind = weighted, blind
        self._start(None)

    def _start(self, capacity: Ints | None) -> None:
        """Begin again with nothing solved, where other devices are up than before [types]."""
        self._capacity = capacity
        self._solved: dict[tuple[tuple[Key, int], ...], dict[Key, list[float]]] = {}
        self._last: dict[Key, list[float]] = {}
        self._numbers: dict[tuple[int, float], int] = {}
        self._keys: list[Key] = []

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Count the classes present and give each job its class's share; O(jobs).

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        if active.pool.uses_mixes:
            raise ProblemError("agnostic LAS knows device types only; mixes need columns=True")
        capacity, number = active.capacity, len(active)
        if capacity is not self._capacity:
            self._start(capacity)
        if not self.weighted and number * active.scale.min() >= capacity.sum():
            runs = active.scale <= capacity[:, None]
            runs = runs if self.blind else runs & (active.rate > 0)
            if runs.all():
                return Shares(capacity[:, None] / (number * active.scale))
        group = self._groups(active)
        present = np.bincount(group, minlength=len(self._keys)).tolist()
        counts: Counter[Key] = Counter()
        for key, jobs in zip(self._keys, present, strict=True):
            if jobs:
                counts[key] += jobs
        state = tuple(sorted(counts.items()))
        if state not in self._solved:
            self._solved[state] = self._centre(state, capacity.astype(float))
        found = self._last = self._solved[state]
        table = np.zeros((len(capacity), len(present)))
        for place, (key, jobs) in enumerate(zip(self._keys, present, strict=True)):
            if jobs:
                table[:, place] = found[key]
        return Shares(table[:, group])

    def _groups(self, active: Active) -> Ints:
        """A number for each job, the same for jobs of one kind and weight [jobs]."""
        scales = [scale for _, scale in active.kinds]
        if not self.weighted:
            for kind in range(len(self._keys), len(scales)):
                self._keys.append(self._key(active, kind, 1.0, scales[kind]))
            return active.kind
        group = []
        for pair in zip(active.kind.tolist(), active.weight.tolist(), strict=True):
            number = self._numbers.setdefault(pair, len(self._numbers))
            if number == len(self._keys):
                self._keys.append(self._key(active, *pair, scales[pair[0]]))
            group.append(number)
        return np.array(group)

    def _key(self, active: Active, kind: int, weight: float, scale: int) -> Key:
        rate = active.fresh(kind)[0]
        fits = scale <= active.capacity
        runs = fits if self.blind else fits & (rate > 0)
        return weight, scale, tuple(runs.tolist())

    def _centre(
        self, state: tuple[tuple[Key, int], ...], capacity: Floats
    ) -> dict[Key, list[float]]:
        """Time fractions [types] of a job of each class."""
        keys = [key for key, _ in state]
        counts = [float(number) for _, number in state]
        scale = [float(s) for _, s, _ in keys]
        runs = [mask for *_, mask in keys]
        level = [w / s for w, s, _ in keys]
        if self.blind:  # throughput(m, X^equal) at rate 1 is the part of the pool that fits
            part = [float(capacity[list(mask)].sum() / capacity.sum()) for mask in runs]
            level = [one * fits for one, fits in zip(level, part, strict=True)]
        # A type without a device up runs nobody; a limit of 0 would leave no centre.
        capacity = np.where(capacity > 0, capacity, 1.0)
        start = [self._last.get(key) for key in keys]
        found = centre(counts, scale, runs, level, capacity.tolist(), start)
        if found is None:
            # By the interior point method, which ends before the centre but never fails.
            rate = np.array(runs, dtype=float)
            near = max_min_program(
                np.array(counts), rate, np.array(scale), np.array(level), capacity
            )
            found = solve_alone(near).x.tolist()
        return dict(zip(keys, found, strict=True))


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
