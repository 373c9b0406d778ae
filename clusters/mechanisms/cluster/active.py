"""The jobs present, as arrays with spare capacity."""

import copy

import numpy as np

from ....schema.jobs import Job
from ....schema.simulation import JobOutcome
from .pool import NOWHERE, ClusterPool, Floats, Ints

_ROOM = 64  # places are added and given back by so many


class _Pairs:
    """A [columns, jobs] array: a view of the block, written in place."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __get__(self, active: "Active", _: type | None = None) -> Floats:
        part: Floats = active.pairs[self.number, :, : len(active.jobs)]
        return part

    def __set__(self, active: "Active", values: Floats) -> None:
        active.pairs[self.number, :, : len(active.jobs)] = values


class _PerJob:
    """A [jobs] array of floats, likewise."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __get__(self, active: "Active", _: type | None = None) -> Floats:
        part: Floats = active.floats[self.number, : len(active.jobs)]
        return part

    def __set__(self, active: "Active", values: Floats) -> None:
        active.floats[self.number, : len(active.jobs)] = values


class _Whole:
    """A [jobs] array of whole numbers, likewise."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __get__(self, active: "Active", _: type | None = None) -> Ints:
        part: Ints = active.ints[self.number, : len(active.jobs)]
        return part

    def __set__(self, active: "Active", values: Ints) -> None:
        active.ints[self.number, : len(active.jobs)] = values


class Active:
    """Jobs present in order of arrival.

    ``rate`` steps per second, ``relative`` to the job's best, ``received`` seconds since the last
    allocation, ``share`` the allocation X, ``deficit`` seconds lacking, ``held`` seconds in all
    [columns, jobs]; ``left`` steps to run, ``weight``, ``isolated`` seconds of t^isolated so far,
    ``started`` the second of the first start or -1 [jobs]; ``scale``, ``last_type`` of the last
    round, ``kind`` the number of the (model, scale factor), ``restarts`` how many since [jobs].
    ``given_up`` are ids of jobs whose SLO the policy could not keep. ``capacity`` [types] are the
    devices that are up, and ``consolidated`` how many of them jobs can hold consolidated (None: it
    does not count): what policies share. ``waiting`` are ids of jobs that do not fit in that, in
    what ``only`` shows.

    All stand in blocks (``pairs``, ``floats``, ``ints``) with ``room`` for more jobs. A job may
    ``leave`` before its place is swept; ``present`` counts those who did not.
    """

    rate, relative, received = _Pairs(0), _Pairs(1), _Pairs(2)
    share, deficit, held = _Pairs(3), _Pairs(4), _Pairs(5)
    left, weight, isolated, started = _PerJob(0), _PerJob(1), _PerJob(2), _PerJob(3)
    scale, last_type, kind, restarts = _Whole(0), _Whole(1), _Whole(2), _Whole(3)

    def __init__(self, pool: ClusterPool) -> None:
        """Start empty.

        Args:
            pool: Devices and throughputs.
        """
        self.pool = pool
        self.capacity = pool.capacity
        self.consolidated = pool.consolidated
        self.waiting: frozenset[str] = frozenset()
        self.jobs: list[Job] = []
        self.alone: list[float] = []
        self.kinds: dict[tuple[str, int], int] = {}
        self.given_up: set[str] = set()
        self.present = 0
        self.gone: list[int] = []
        self.speed = [0.0] * len(pool.columns)
        self.room = 0
        self.pairs: Floats = np.ones((6, len(pool.columns), 0))
        self.floats: Floats = np.zeros((4, 0))
        self.ints: Ints = np.zeros((4, 0), dtype=np.int64)
        self._capacity = pool.capacity.astype(float).tolist()
        self._fresh: list[Floats] = []  # what a job of each kind begins with
        self._relative: list[list[float]] = []
        self._make_room(_ROOM)

    def __len__(self) -> int:
        return len(self.jobs)

    def _make_room(self, room: int) -> None:
        number = len(self.jobs)
        pairs = np.ones((6, len(self.pool.columns), room))
        floats, ints = np.zeros((4, room)), np.zeros((4, room), dtype=np.int64)
        pairs[:, :, :number] = self.pairs[:, :, :number]
        floats[:, :number] = self.floats[:, :number]
        ints[:, :number] = self.ints[:, :number]
        self.pairs, self.floats, self.ints, self.room = pairs, floats, ints, room

    def has_room(self, number: int) -> bool:
        """Whether so many jobs may come without the blocks being moved."""
        return len(self.jobs) + number <= self.room

    def fresh(self, kind: int) -> tuple[Floats, Floats]:
        """Rates of a kind of jobs, and these relative to the best [columns]."""
        return self._fresh[kind][0], self._fresh[kind][1]

    def add(self, jobs: list[Job], received_seconds: float) -> None:
        """Add jobs; nothing is allocated to them yet."""
        place, number = len(self.jobs), len(jobs)
        if not self.has_room(number):
            self._make_room(-(-(place + number) // _ROOM) * _ROOM)
        self.present += number
        self.jobs.extend(jobs)
        for i, job in enumerate(jobs, start=place):
            kind = self._kind_of(job)
            self.pairs[:, :, i] = self._fresh[kind]
            self.pairs[2, :, i] = received_seconds
            self.floats[:, i] = (job.steps, job.priority_weight, job.isolated_seconds, -1.0)
            self.ints[:, i] = (job.scale_factor, NOWHERE, kind, 0)
            self.alone.append(job.steps / self._isolated_rate_of(kind, job.scale_factor))
            self._count(kind, 1)

    def only(self, places: Ints) -> "Active":
        """A copy with the jobs at some places alone, for a policy to look at.

        ``present`` counts all jobs all the same: t^isolated is about 1/n of the cluster.
        """
        part = copy.copy(self)
        kept = places.tolist()
        part.jobs = [self.jobs[place] for place in kept]
        part.alone = [self.alone[place] for place in kept]
        part.waiting = frozenset({job.id for job in self.jobs} - {job.id for job in part.jobs})
        part.pairs = self.pairs.take(places, axis=2)
        part.floats, part.ints = self.floats.take(places, axis=1), self.ints.take(places, axis=1)
        part.room = len(kept)
        return part

    def _kind_of(self, job: Job) -> int:
        key = (job.model, job.scale_factor)
        kind = self.kinds.get(key)
        if kind is None:
            rate = self.pool.rate(job)
            fresh = np.zeros((6, len(rate)))
            fresh[0], fresh[1] = rate, rate / rate.max()
            self._fresh.append(fresh)
            self._relative.append(fresh[1].tolist())
            kind = self.kinds[key] = len(self.kinds)
        return kind

    def _isolated_rate_of(self, kind: int, scale: int) -> float:
        """The rate of one job in isolation, as ``isolated_rate`` has it."""
        rate = self._fresh[kind][0].tolist()
        shares = [count / self.present / scale for count in self._capacity]
        whole = alone = 0.0
        for share in shares:
            whole += share
        for one, share in zip(rate, shares, strict=False):
            alone += one * (share / max(whole, 1.0))
        return alone if alone > 0 else max(rate) / self.present

    def isolated_rate(self) -> Floats:
        """throughput(m, X^isolated) with the jobs now present [jobs]."""
        capacity, rate = self.pool.capacity.astype(float), self.rate
        share = capacity[:, None] / self.present / self.scale
        share /= np.maximum(share.sum(axis=0), 1.0)
        alone: Floats = (rate[: len(capacity)] * share).sum(axis=0)
        if alone.all():
            return alone
        answer: Floats = np.where(alone > 0, alone, rate.max(axis=0) / self.present)
        return answer

    def usage(self, i: int) -> Ints:
        """How often a job holds a column's devices: its scale factor, a mix once [columns]."""
        if not self.pool.uses_mixes:
            return np.full(len(self.pool.columns), self.scale[i])
        answer: Ints = np.where(self.pool.is_mix == 1, 1, self.scale[i])
        return answer

    def remove(self, done: Ints, finish: Floats, hourly: Floats | None) -> list[JobOutcome]:
        """Let finished jobs out [indices], with what became of them."""
        outcomes = [
            self.outcome(i, float(f), hourly)
            for i, f in zip(done.tolist(), finish.tolist(), strict=True)
        ]
        self.leave(done.tolist())
        self.sweep()
        return outcomes

    def leave(self, places: list[int]) -> None:
        """Count jobs as gone; their places stay until they are swept."""
        self.gone.extend(places)
        self.present -= len(places)
        for place in places:
            self._count(int(self.ints[2, place]), -1)

    def _count(self, kind: int, number: int) -> None:
        for column, relative in enumerate(self._relative[kind]):
            self.speed[column] += number * relative

    def exact_speed(self) -> Floats:
        """Sums of ``relative`` over the jobs present; ``speed`` keeps them from job to job."""
        relative = self.relative[:, self.here()] if self.gone else self.relative
        speed: Floats = relative.sum(axis=1)
        return speed

    def here(self) -> Ints:
        """Places of the jobs that did not leave."""
        stays = np.ones(len(self.jobs), dtype=bool)
        stays[self.gone] = False
        return stays.nonzero()[0]

    def sweep(self) -> None:
        """Close the gaps of the jobs that left."""
        if not self.gone:
            return
        kept = self.here()
        number = len(kept)
        self.pairs[:, :, :number] = self.pairs.take(kept, axis=2)
        self.pairs[:, :, number:] = 1.0
        self.floats[:, :number] = self.floats.take(kept, axis=1)
        self.ints[:, :number] = self.ints.take(kept, axis=1)
        self.ints[:, number:] = 0
        for i in sorted(self.gone, reverse=True):
            del self.jobs[i], self.alone[i]
        self.gone = []
        if number + 2 * _ROOM <= self.room:
            self._make_room(-(-max(number, 1) // _ROOM) * _ROOM)

    def outcome(self, i: int, finish: float, hourly: Floats | None) -> JobOutcome:
        """What became of the job at a place."""
        job, held = self.jobs[i], self.pairs[5, :, i]
        if self.pool.uses_mixes:
            held = held * self.usage(i)
            devices = float(held @ self.pool.resources.sum(axis=0))
        else:
            held = held * self.ints[0, i]
            devices = float(np.add.reduce(held))
        return JobOutcome(
            id=job.id,
            model=job.model,
            scale_factor=job.scale_factor,
            priority_weight=job.priority_weight,
            arrival_seconds=job.arrival_seconds,
            start_seconds=float(self.floats[3, i]),
            finish_seconds=finish,
            device_seconds=devices,
            isolated_seconds=self.alone[i],
            slo_seconds=job.slo_seconds,
            dollars=None if hourly is None else float(held @ hourly) / 3600.0,
            num_restarts=int(self.ints[3, i]),
            slo_given_up=job.id in self.given_up,
        )
