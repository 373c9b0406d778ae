"""The pool with its throughputs as lookups, and the jobs present as arrays with spare capacity.

A column is a place where a job may spend a round: a device type, or, where mixes count, several
types held at once (VirtualFlow 6.5.2).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from ...schema.jobs import Job, MixThroughput, ModelThroughput, Throughputs, no_throughput
from ...schema.simulation import JobOutcome
from ...solvers.allocation.instance import UNCONSOLIDATED, mix_name

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOWHERE = -1
"""The device type of a job that does not run."""


Key = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class ClusterPool:
    """Devices by type, and the rates of every (model, scale factor) asked for so far.

    ``columns`` are the device types, then, with ``uses_mixes``, the mixes that fit the pool, or,
    with ``consolidated``, each type once more unconsolidated (thesis 5.3.1); ``resources``
    [types, columns] are the devices that a column holds: 1 of its type, times the job's scale
    factor, or those of the mix. ``consolidated`` [types] is how many devices jobs can hold
    consolidated at once; None: policies do not look at placement.
    """

    throughputs: Throughputs
    num_devices: dict[str, int]
    dollars_per_hour: dict[str, float] = field(default_factory=dict)
    uses_mixes: bool = False
    consolidated: tuple[int, ...] | None = None
    types: tuple[str, ...] = field(init=False)
    capacity: Ints = field(init=False)
    columns: tuple[str, ...] = field(init=False)
    resources: Ints = field(init=False)
    _entries: dict[Key, ModelThroughput] = field(init=False)
    _mixes: dict[Key, list[MixThroughput]] = field(init=False, default_factory=dict)
    _rates: dict[Key, Floats] = field(init=False, default_factory=dict)
    _pairs: dict[tuple[str, str, int], dict[str, tuple[float, float]]] = field(init=False)

    def __post_init__(self) -> None:
        if not self.num_devices:
            raise ProblemError("the pool is empty; give at least one device type")
        self.types = tuple(self.num_devices)
        self.capacity = np.array(list(self.num_devices.values()), dtype=np.int64)
        models = self.throughputs.models
        self._entries = {(entry.model, entry.scale_factor): entry for entry in models}
        self._pairs = {}
        for pair in self.throughputs.pairs:
            (a, b), scale = pair.models, pair.scale_factor
            self._pairs[a, b, scale] = pair.steps_per_second
            if a != b:
                both = pair.steps_per_second.items()
                # In both orders, so that a look-up needs none.
                self._pairs[b, a, scale] = {name: (two, one) for name, (one, two) in both}
        self._add_columns()

    def _add_columns(self) -> None:
        mixes: dict[str, dict[str, int]] = {}
        for mix in self.throughputs.mixes if self.uses_mixes else ():
            counts = mix.devices.items()
            if all(number <= self.num_devices.get(name, 0) for name, number in counts):
                mixes[mix_name(mix.devices)] = mix.devices
                self._mixes.setdefault((mix.model, mix.scale_factor), []).append(mix)
        if self.consolidated is not None:
            if mixes:
                raise ProblemError("mixes of device types are not placed; leave placement out")
            self.columns = (*self.types, *(name + UNCONSOLIDATED for name in self.types))
            # Unconsolidated columns hold the same devices.
            self.resources = np.tile(np.eye(len(self.types), dtype=np.int64), 2)
            return
        self.columns = (*self.types, *mixes)
        held = [[mix.get(name, 0) for mix in mixes.values()] for name in self.types]
        eye = np.eye(len(self.types), dtype=np.int64)
        self.resources = np.hstack((eye, np.array(held, dtype=np.int64).reshape(len(eye), -1)))

    @property
    def is_mix(self) -> Ints:
        """1 for columns that hold several types, 0 for device types [columns]."""
        if self.consolidated is not None:
            return np.zeros(len(self.columns), dtype=np.int64)
        return (np.arange(len(self.columns)) >= len(self.types)).astype(np.int64)

    def column_of(self, held: Mapping[int, int]) -> int:
        """The column of the devices that a job holds, by place of their type.

        Raises:
            ProblemError: They are of several types, and no such mix is known.
        """
        if len(held) == 1:
            return next(iter(held))
        counts = np.array([held.get(kind, 0) for kind in range(len(self.types))])
        same = (self.resources == counts[:, None]).all(axis=0) & (self.is_mix == 1)
        if not same.any():
            raise ProblemError("a job holds several device types, and no job has a rate on these")
        return int(same.argmax())

    @property
    def devices_of(self) -> Ints:
        """The column whose devices a column holds: its type where placement counts [columns]."""
        places = np.arange(len(self.columns))
        return places if self.consolidated is None else places % len(self.types)

    def times(self, column: Ints, scale: Ints) -> Ints:
        """How often jobs hold the devices of their columns: a mix once [jobs]."""
        answer: Ints = np.where(self.is_mix[column] == 1, 1, scale)
        return answer

    def limits(self, free: Ints, consolidated: tuple[int, ...] | None) -> tuple[Ints, Ints]:
        """What columns use [limits, columns] of how much: devices, and consolidated devices.

        ``consolidated`` is how many of ``free`` [types] can be held consolidated; None: it does
        not count.
        """
        if consolidated is None:
            return self.resources, free
        types = len(self.types)
        close = np.hstack((np.eye(types, dtype=np.int64), np.zeros((types, types), dtype=np.int64)))
        return np.vstack((self.resources, close)), np.concatenate((free, consolidated))

    def has_pairs(self) -> bool:
        """Whether throughputs of pairs are known."""
        return bool(self._pairs)

    def rate(self, job: Job) -> Floats:
        """Steps per second of a job by column; 0 where it does not run or does not fit.

        Raises:
            ProblemError: The throughputs do not know it, or it runs nowhere in this pool.
        """
        key = (job.model, job.scale_factor)
        if key not in self._rates:
            rate = self._table(job)
            if not rate.any():
                raise ProblemError(f"job {job.id!r} runs nowhere in the pool {self._named()}")
            self._rates[key] = rate
        return self._rates[key]

    def why_left_out(self, job: Job) -> str | None:
        """Why a job fits nowhere in this pool, however empty it is; None where it fits.

        Raises:
            ProblemError: The throughputs do not know it.
        """
        key = (job.model, job.scale_factor)
        if key in self._rates:
            return None
        most = int(self.capacity.max())
        if job.scale_factor > most and key not in self._mixes:
            return (
                f"it asks for {job.scale_factor} devices of one type, but the pool has at most "
                f"{most}; lower its scale_factor or grow the pool"
            )
        rate = self._table(job)
        if rate.any():
            self._rates[key] = rate
            return None
        return (
            f"{job.model} x{job.scale_factor} runs nowhere in the pool {self._named()}; add a "
            "device type that fits it, or drop the job"
        )

    def _named(self) -> str:
        return ", ".join(f"{number}x{name}" for name, number in self.num_devices.items())

    def _table(self, job: Job) -> Floats:
        entry = self._entries.get((job.model, job.scale_factor))
        if entry is None:
            raise ProblemError(no_throughput(job, list(self._entries)))
        known = entry.steps_per_second
        rate = np.array([known.get(name, 0.0) for name in self.types])
        rate = np.where(job.scale_factor <= self.capacity, rate, 0.0)
        if self.consolidated is not None:
            rate = np.concatenate((rate, self._apart(entry, rate)))
        mixed = np.zeros(len(self.columns) - len(rate))
        for mix in self._mixes.get((job.model, job.scale_factor), ()):
            place = self.columns.index(mix_name(mix.devices)) - len(self.types)
            mixed[place] = mix.steps_per_second
        return np.concatenate((rate, mixed))

    def pair_rates(self, first: Key, second: Key) -> Floats:
        """Steps per second of both jobs where they share devices [2, columns]; 0 where not.

        Only jobs of equal scale factor share, and only on one device type.
        """
        rates = np.zeros((2, len(self.columns)))
        known = self._pairs.get((first[0], second[0], first[1]))
        if known is None or first[1] != second[1]:
            return rates
        for c, name in enumerate(self.types):
            if name in known and first[1] <= self.capacity[c]:
                rates[:, c] = known[name]
        return rates

    def apart_rate(self, job: Job) -> Floats:
        """Steps per second with the devices on separate servers, by type (thesis 5.3.1)."""
        # Where they are not known, those of consolidated devices.
        entry = self._entries[job.model, job.scale_factor]
        return self._apart(entry, self.rate(job)[: len(self.types)])

    def _apart(self, entry: ModelThroughput, rate: Floats) -> Floats:
        apart = entry.unconsolidated_steps_per_second or {}
        # One device is never spread.
        if entry.scale_factor == 1:
            apart = {}
        known = np.array([apart.get(name, np.nan) for name in self.types])
        return np.where(np.isnan(known) | (rate == 0), rate, known)

    def rate_per_device(self, job: Job) -> tuple[float, ...]:
        """C_i: mini-batches per second of one of the job's workers on each type."""
        # An elastic job needs no ``scale_factor`` devices of one type, so a small type counts too.
        self.rate(job)
        known = self._entries[job.model, job.scale_factor].steps_per_second
        return tuple(known.get(name, 0.0) for name in self.types)

    def hourly(self) -> Floats | None:
        """Dollars per hour by column, None where a type's price is unknown [columns]."""
        if any(name not in self.dollars_per_hour for name in self.types):
            return None
        prices = np.array([self.dollars_per_hour[name] for name in self.types])
        answer: Floats = prices @ self.resources
        return answer


_ROOM = 64  # places are added and given back by so many


A = TypeVar("A", Floats, Ints)


class _PerJob(Generic[A]):
    """A row of a block of ``Active`` for the jobs present: a view, written in place."""

    def __init__(self, block: str, number: int) -> None:
        self._block, self._number = attrgetter(block), number

    def __get__(self, active: "Active", _: type | None = None) -> A:
        part: A = self._block(active)[self._number, ..., : len(active.jobs)]
        return part

    def __set__(self, active: "Active", values: A) -> None:
        self._block(active)[self._number, ..., : len(active.jobs)] = values


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

    rate, relative, received, share, deficit, held = (
        _PerJob[Floats]("pairs", number) for number in range(6)
    )
    left, weight, isolated, started = (_PerJob[Floats]("floats", number) for number in range(4))
    scale, last_type, kind, restarts = (_PerJob[Ints]("ints", number) for number in range(4))

    def __init__(self, pool: ClusterPool) -> None:
        """Start empty."""
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
        """A copy with the jobs at some places alone, for a policy to look at."""
        # ``present`` counts all jobs all the same: t^isolated is about 1/n of the cluster.
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
        # From the back, so that places in front stay.
        for i in sorted(self.gone, reverse=True):
            del self.jobs[i], self.alone[i]
        self.gone = []
        # Twice the step, so that one job more does not move the blocks again.
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
        return outcome_of(
            job,
            start_seconds=float(self.floats[3, i]),
            finish_seconds=finish,
            device_seconds=devices,
            isolated_seconds=self.alone[i],
            dollars=None if hourly is None else float(held @ hourly) / 3600.0,
            num_restarts=int(self.ints[3, i]),
            slo_given_up=job.id in self.given_up,
        )


def outcome_of(job: Job, **facts: Any) -> JobOutcome:
    """What became of a job: what it asked for, and the other fields of its outcome."""
    return JobOutcome(
        id=job.id,
        model=job.model,
        scale_factor=job.scale_factor,
        priority_weight=job.priority_weight,
        arrival_seconds=job.arrival_seconds,
        slo_seconds=job.slo_seconds,
        **facts,
    )
