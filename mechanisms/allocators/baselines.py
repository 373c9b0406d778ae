"""Schedulers that Gavel is compared with: they serve a queue instead of solving a program."""

import numpy as np

from ..cluster.active import Active
from .shares import Shares


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
