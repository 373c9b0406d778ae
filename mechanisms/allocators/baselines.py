"""Schedulers that Gavel is compared with: AlloX (thesis 5.7.3) and queues without a program."""

import numpy as np

from ...schema.errors import ProblemError
from ...solvers.lp import assign
from ..cluster.active import Active
from .shares import Shares


class AlloX:
    """AlloX for jobs of one device, as Gavel's experiments use it.

    A job that is k-th from the end of a device's queue delays k jobs, itself included, by its
    time there; the assignment of jobs to (device, k) of least total delay is the schedule of least
    average completion time. The first job of each queue gets its device and keeps it; the others
    are matched anew next time. Only the longest waiting ``alpha`` of the jobs, but at least one
    for each free device, are looked at; below 1, the default of Gavel's runs, long ones are not
    put off for ever. Devices of a
    type are alike, so ceil(jobs / devices) places of each suffice: the assignment has at most
    types * (jobs + devices) columns.
    """

    name, agnostic, shares_space, leaves_idle = "allox", False, False, False
    most_devices = 1  # of a job

    def __init__(self, alpha: float = 1.0) -> None:
        """Start empty.

        Args:
            alpha: Part of the waiting jobs that are looked at.
        """
        self.alpha = alpha
        self._type: dict[str, int] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Keep what runs, and match waiting jobs to free devices.

        Raises:
            ProblemError: A job asks for several devices.
        """
        if active.scale.max() > self.most_devices:
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
        devices = int(free.sum())
        waiting = waiting[: max(devices, int(self.alpha * len(waiting)))]
        if devices and waiting:
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
