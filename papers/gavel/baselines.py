"""Schedulers that Gavel is compared with: AlloX, Gandiva's packing, and queues (thesis 5.7.3)."""

import numpy as np

from ...clusters.mechanisms.allocators import BASELINES, Baseline, Shares
from ...clusters.mechanisms.pool import Active
from ...schema.errors import ProblemError
from ...solvers.allocation.program import Floats
from ...solvers.allocation.space_sharing.column_generation import PairTimes
from ...solvers.lp import assign


class AlloX:
    """AlloX for jobs of one device, as Gavel's experiments use it.

    A job that is k-th from the end of a device's queue delays k jobs, itself included, by its
    time there; the assignment of jobs to (device, k) of least total delay is the schedule of least
    average completion time. The first job of each queue gets its device and keeps it; the others
    are matched anew next time. Devices of a type are alike, so ceil(jobs / devices) places of each
    suffice: the assignment has at most types * (jobs + devices) columns.
    """

    name, agnostic, shares_space, leaves_idle = "allox", False, False, False

    def __init__(self) -> None:
        """Start empty."""
        self._type: dict[str, int] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Keep what runs, and match waiting jobs to free devices.

        Raises:
            ProblemError: A job asks for several devices.
        """
        if active.scale.max() > 1:
            job = active.jobs[int(active.scale.argmax())]
            raise ProblemError(
                f"AlloX schedules jobs of one device, and job {job.id!r} asks for "
                f"{job.scale_factor}; take another policy"
            )
        here = [job.id for job in active.jobs]
        self._type = {id_: self._type[id_] for id_ in here if id_ in self._type}
        free = active.capacity.copy()
        for id_, kind in list(self._type.items()):
            if free[kind] > 0:
                free[kind] -= 1
            else:  # fewer devices are up than ran jobs: the last to come waits again
                del self._type[id_]
        waiting = [i for i, id_ in enumerate(here) if id_ not in self._type]
        if free.any() and waiting:
            self._match(active, waiting, free)
        share = np.zeros_like(active.rate)
        for i, id_ in enumerate(here):
            if id_ in self._type:
                share[self._type[id_], i] = 1.0
        return Shares(share)

    def _match(self, active: Active, waiting: list[int], free: np.ndarray) -> None:
        kinds = np.flatnonzero(free)
        places = [-(-len(waiting) // int(free[kind])) for kind in kinds]
        kind = np.concatenate([np.full(p * free[k], k) for k, p in zip(kinds, places, strict=True)])
        behind = np.concatenate(
            [np.repeat(np.arange(1, p + 1), free[k]) for k, p in zip(kinds, places, strict=True)]
        )
        rate = active.rate[:, waiting]
        slowest = active.left[waiting] / np.where(rate > 0, rate, np.inf).min(axis=0)
        never = 1e3 * len(waiting) * float(slowest.max())  # dearer than any queue
        seconds = np.where(rate > 0, active.left[waiting] / np.where(rate > 0, rate, 1.0), never)
        rows, columns = assign(seconds[kind].T * behind)
        # Each device's queue starts with the job that is farthest from its end.
        order = np.lexsort((rows, -behind[columns]))
        left = free.copy()
        for place in order.tolist():
            job, where = waiting[int(rows[place])], int(kind[columns[place]])
            if left[where] and active.rate[where, job] > 0:
                self._type[active.jobs[job].id] = where
                left[where] -= 1


class GreedyFifo:
    """FIFO as Gavel's code has it: in order of arrival, each job on its fastest free type.

    The first job that fits nowhere stops the queue. Unlike the policy ``fifo`` this is no
    linear program: no job gets a part of the time only.
    """

    name, agnostic, shares_space = "fifo_greedy", False, False
    leaves_idle = True  # it never overtakes

    def __init__(self) -> None:
        """Start empty."""
        self._seen: Active | None = None
        self._fastest: list[list[int]] = []  # types of each kind of jobs, fastest first

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Give each job all of the time on one type, or none."""
        if active is not self._seen:
            self._seen, self._fastest = active, []
        for number in range(len(self._fastest), len(active.kinds)):
            rate = active.fresh(number)[0].tolist()
            ranked = sorted(range(len(rate)), key=lambda kind: -rate[kind])
            self._fastest.append([kind for kind in ranked if rate[kind] > 0])
        free = active.capacity.tolist()
        scales = active.scale.tolist()
        least, most = min(scales), max(free)
        kinds, jobs = list[int](), list[int]()
        for job, (need, number) in enumerate(zip(scales, active.kind.tolist(), strict=True)):
            if need > most:
                break
            for kind in self._fastest[number]:
                if free[kind] >= need:
                    free[kind] -= need
                    kinds.append(kind)
                    jobs.append(job)
                    most = max(free)
                    break
            if most < least:
                break
        share = np.zeros_like(active.rate)
        share[kinds, jobs] = 1.0
        return Shares(share)


class FifoAnyType:
    """FIFO that ignores device types: a waiting job takes a random type with room and keeps it.

    YARN's capacity scheduler in one queue, and the published agnostic FIFO with its fixes.
    """

    name, agnostic, shares_space = "fifo_any_type", True, False
    leaves_idle = True  # it never overtakes

    def __init__(self, seed: int = 0) -> None:
        """Start empty.

        Args:
            seed: Of the random draws.
        """
        self._random = np.random.default_rng(seed)
        self._type: dict[str, int] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Keep what runs, and admit from the head of the queue while it fits."""
        here = [job.id for job in active.jobs]
        self._type = {id_: self._type[id_] for id_ in here if id_ in self._type}
        free = active.capacity.copy()
        for job, id_ in enumerate(here):
            if id_ in self._type:
                free[self._type[id_]] -= active.scale[job]
                if free[self._type[id_]] < 0:  # not so many are up: it waits again
                    free[self._type[id_]] += active.scale[job]
                    del self._type[id_]
        for job, id_ in enumerate(here):
            if id_ in self._type:
                continue
            runs = np.flatnonzero((free >= active.scale[job]) & (active.rate[:, job] > 0))
            if not len(runs):
                break
            self._type[id_] = int(self._random.choice(runs))
            free[self._type[id_]] -= active.scale[job]
        share = np.zeros_like(active.rate)
        for job, id_ in enumerate(here):
            if id_ in self._type:
                share[self._type[id_], job] = 1.0
        return Shares(share)


class Gandiva:
    """Gandiva's ad-hoc packing: random pairs, kept while they gain (thesis 5.7.3, 5.8).

    Every pair, and every job alone, gets equal time.

    While all jobs fit in the cluster no jobs share. Otherwise jobs that are in no pair are paired
    at random, where their scale factors are equal; a pair is broken up when it makes less than
    one of its jobs alone would: when the sum of both rates, each relative to alone, is below 1 on
    average over the types that run both.

    The published code adds the types up instead. So it keeps whatever runs on all of them (on three
    a third of one job's rate is enough), and breaks up what does not run on one.
    """

    name, agnostic, shares_space, leaves_idle = "gandiva", False, True, False

    def __init__(self, seed: int = 0, *, sums_types: bool = False) -> None:
        """Start without pairs.

        Args:
            seed: Of the random pairs.
            sums_types: Judge pairs as the published code does.
        """
        self._random = np.random.default_rng(seed)
        self._partner: dict[str, str] = {}
        self.sums_types = sums_types

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Update the pairs, and give all the same time."""
        place = {job.id: i for i, job in enumerate(active.jobs)}
        if int(active.scale.sum()) <= int(active.capacity.sum()):
            return Shares(self._equal(active, np.arange(len(active)), len(active)))
        self._partner = {
            one: two
            for one, two in self._partner.items()
            if one in place and two in place and self._gain(active, place[one], place[two]) >= 1.0
        }
        self._explore(active)
        first = [place[one] for one, two in self._partner.items() if place[one] < place[two]]
        first.sort()
        second = [place[self._partner[active.jobs[i].id]] for i in first]
        single = np.array([i for i in range(len(active)) if active.jobs[i].id not in self._partner])
        number = len(first) + len(single)
        x = np.zeros_like(active.rate)
        if len(single):
            x[:, single] = self._equal(active, single.astype(np.int64), number)
        each = self._equal(active, np.array(first, dtype=np.int64), number)
        types = len(each)
        return Shares(
            x,
            PairTimes(
                a=np.repeat(np.array(first, dtype=np.int64), types),
                b=np.repeat(np.array(second, dtype=np.int64), types),
                column=np.tile(np.arange(types), len(first)),
                time=each.T.ravel(),
            ),
        )

    def _explore(self, active: Active) -> None:
        alone = [i for i, job in enumerate(active.jobs) if job.id not in self._partner]
        for _ in range(len(alone)):
            if len(alone) < 2:
                return
            one, two = self._random.choice(len(alone), size=2, replace=False).tolist()
            a, b = alone[one], alone[two]
            if active.scale[a] != active.scale[b]:
                continue
            alone = [i for i in alone if i not in (a, b)]
            first, second = active.jobs[a].id, active.jobs[b].id
            self._partner[first], self._partner[second] = second, first

    def _gain(self, active: Active, a: int, b: int) -> float:
        """Sum of a pair's rates relative to the jobs' rates alone; 0 where one of them has none."""
        keys = [(active.jobs[i].model, active.jobs[i].scale_factor) for i in (a, b)]
        rates = active.pool.pair_rates(keys[0], keys[1])
        alone = active.rate[:, [a, b]].T
        runs = (alone > 0).all(axis=0)
        counted = np.ones_like(runs) if self.sums_types else runs
        if not runs.any() or (rates[:, counted] <= 0).any():
            return 0.0
        gain = float((rates[:, runs] / alone[:, runs]).sum())
        return gain if self.sums_types else gain / int(runs.sum())

    def _equal(self, active: Active, jobs: np.ndarray, number: int) -> Floats:
        """1 / ``number`` of each type, at most all of the time in total [types, jobs]."""
        share = active.capacity[:, None] / number / active.scale[jobs]
        answer: Floats = share / np.maximum(share.sum(axis=0), 1.0)
        return answer


for _name, _baseline in {
    "allox": Baseline(lambda seed: AlloX(), most_devices=1),
    "gandiva": Baseline(Gandiva, shares_space=True),
    "fifo_greedy": Baseline(lambda seed: GreedyFifo()),
    "fifo_any_type": Baseline(FifoAnyType),
}.items():
    BASELINES.add(_name, _baseline, __name__)
