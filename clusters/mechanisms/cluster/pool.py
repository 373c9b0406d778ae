"""The pool and the throughputs as lookups: how fast a job runs on each column.

A column is a place where a job may spend a round: a device type, or, where mixes count, several
types held at once (VirtualFlow 6.5.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ....schema.errors import ProblemError
from ....schema.jobs import Job, MixThroughput, ModelThroughput, Throughputs, no_throughput
from ....solvers.allocation.instance import UNCONSOLIDATED, mix_name

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

    def limits(self, free: Ints, consolidated: tuple[int, ...] | None) -> tuple[Ints, Ints]:
        """What columns use [limits, columns] of how much: devices, and consolidated devices.

        Args:
            free: Devices of each type [types].
            consolidated: How many of them can be held consolidated; None: it does not count.
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
        """Steps per second with the devices on separate servers, by type (thesis 5.3.1).

        Where they are not known, those of consolidated devices.
        """
        entry = self._entries[job.model, job.scale_factor]
        return self._apart(entry, self.rate(job)[: len(self.types)])

    def _apart(self, entry: ModelThroughput, rate: Floats) -> Floats:
        apart = entry.unconsolidated_steps_per_second or {}
        if entry.scale_factor == 1:
            apart = {}
        known = np.array([apart.get(name, np.nan) for name in self.types])
        return np.where(np.isnan(known) | (rate == 0), rate, known)

    def rate_per_device(self, job: Job) -> tuple[float, ...]:
        """C_i: mini-batches per second of one of the job's workers on each type.

        An elastic job needs no ``scale_factor`` devices of one type, so a small type counts too.
        """
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
