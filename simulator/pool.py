"""The pool and the throughputs as lookups: how fast a job runs on each device type."""

from dataclasses import dataclass, field

import numpy as np

from ..schema.errors import ProblemError
from ..schema.jobs import Job, ModelThroughput, Throughputs
from ..schema.records import nearest
from .priorities import Floats, Ints


@dataclass(slots=True, kw_only=True)
class Pool:
    """Devices by type, and the rate [types] of every (model, scale factor) asked for so far."""

    throughputs: Throughputs
    num_devices: dict[str, int]
    dollars_per_hour: dict[str, float] = field(default_factory=dict)
    types: tuple[str, ...] = field(init=False)
    capacity: Ints = field(init=False)
    _entries: dict[tuple[str, int], ModelThroughput] = field(init=False)
    _rates: dict[tuple[str, int], Floats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.num_devices:
            raise ProblemError("the pool is empty; give at least one device type")
        self.types = tuple(self.num_devices)
        self.capacity = np.array(list(self.num_devices.values()), dtype=np.int64)
        models = self.throughputs.models
        self._entries = {(entry.model, entry.scale_factor): entry for entry in models}

    def rate(self, job: Job) -> Floats:
        """Steps per second of a job by type; 0 where it does not run or does not fit.

        Raises:
            ProblemError: It runs nowhere in this pool.
        """
        key = (job.model, job.scale_factor)
        if key not in self._rates:
            self._rates[key] = self._look_up(job)
        return self._rates[key]

    def _look_up(self, job: Job) -> Floats:
        entry = self._entries.get((job.model, job.scale_factor))
        if entry is None:
            models = sorted({model for model, _ in self._entries})
            guess = job.model if job.model in models else nearest(job.model, models)
            mend = f"; nearest is {guess!r}" if guess else ""
            raise ProblemError(
                f"job {job.id!r}: no throughput of {job.model!r} with {job.scale_factor} devices"
                f"{mend}"
            )
        known = entry.steps_per_second
        rate = np.array([known.get(name, 0.0) for name in self.types])
        rate = np.where(job.scale_factor <= self.capacity, rate, 0.0)
        if not rate.any():
            raise ProblemError(
                f"job {job.id!r} ({job.model} x{job.scale_factor}) runs nowhere in the pool "
                f"{', '.join(f'{n}x{name}' for name, n in self.num_devices.items())}; add a "
                "device type that fits it, or drop the job"
            )
        return rate

    def rate_per_device(self, job: Job) -> tuple[float, ...]:
        """C_i: mini-batches per second of one of the job's workers on each type.

        An elastic job needs no ``scale_factor`` devices of one type, so a small type counts too.
        """
        self.rate(job)
        known = self._entries[job.model, job.scale_factor].steps_per_second
        return tuple(known.get(name, 0.0) for name in self.types)

    def hourly(self) -> Floats | None:
        """Dollars per hour by type, None where one is unknown [types]."""
        if any(name not in self.dollars_per_hour for name in self.types):
            return None
        return np.array([self.dollars_per_hour[name] for name in self.types])
