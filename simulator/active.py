"""The jobs present, as arrays that grow and shrink with them."""

from dataclasses import dataclass, field

import numpy as np

from ..schema.jobs import Job
from ..schema.simulation import JobOutcome
from .pool import Pool
from .priorities import NOWHERE, Floats, Ints

_PER_JOB = ("scale", "left", "weight", "isolated", "last_type", "kind", "started", "restarts")
_PER_PAIR = ("rate", "relative", "received", "share", "deficit", "held")


@dataclass(slots=True)
class Active:
    """Jobs present in order of arrival.

    ``rate`` steps per second, ``relative`` to the job's best, ``received`` seconds since the last
    allocation, ``share`` the
    allocation X, ``deficit`` seconds lacking, ``held`` seconds in all [columns, jobs]; ``left``
    steps to run, ``isolated`` seconds of t^isolated so far, ``last_type`` of the last round,
    ``kind`` the number of the (model, scale factor), ``started`` the second of the first start or
    -1, ``restarts`` how many since [jobs]. ``given_up`` are ids of jobs whose
    SLO the policy could not keep.
    """

    pool: Pool
    jobs: list[Job] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    kinds: dict[tuple[str, int], int] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    rate: Floats = field(init=False)
    relative: Floats = field(init=False)
    received: Floats = field(init=False)
    share: Floats = field(init=False)
    deficit: Floats = field(init=False)
    held: Floats = field(init=False)
    scale: Ints = field(init=False)
    left: Floats = field(init=False)
    weight: Floats = field(init=False)
    isolated: Floats = field(init=False)
    last_type: Ints = field(init=False)
    kind: Ints = field(init=False)
    started: Floats = field(init=False)
    restarts: Ints = field(init=False)
    _pairs: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._keep_pairs(np.zeros((len(_PER_PAIR), len(self.pool.columns), 0)))
        for name in _PER_JOB:
            whole = name in ("scale", "last_type", "kind", "restarts")
            setattr(self, name, np.zeros(0, dtype=np.int64 if whole else np.float64))

    def __len__(self) -> int:
        return len(self.jobs)

    def _keep_pairs(self, block: Floats) -> None:
        """Store [columns, jobs] arrays as one block, so that jobs come and go at one stroke."""
        self._pairs = block
        for number, name in enumerate(_PER_PAIR):
            setattr(self, name, block[number])

    def _together(self) -> Floats:
        """The block, with what was assigned to its parts since."""
        for number, name in enumerate(_PER_PAIR):
            part = getattr(self, name)
            if part.base is not self._pairs:
                self._pairs[number] = part
        return self._pairs

    def add(self, jobs: list[Job], received_seconds: float) -> None:
        """Let jobs in; nothing is allocated to them yet."""
        columns, number = len(self.pool.columns), len(jobs)
        fresh = np.zeros((len(_PER_PAIR), columns, number))
        rate = fresh[_PER_PAIR.index("rate")]
        rate[:] = np.array([self.pool.rate(job) for job in jobs]).T
        fresh[_PER_PAIR.index("relative")] = rate / rate.max(axis=0)
        fresh[_PER_PAIR.index("received")] = received_seconds
        keys = [(job.model, job.scale_factor) for job in jobs]
        singles = {
            "scale": [job.scale_factor for job in jobs],
            "left": [job.steps for job in jobs],
            "weight": [job.priority_weight for job in jobs],
            "isolated": [job.isolated_seconds for job in jobs],
            "last_type": [NOWHERE] * number,
            "kind": [self.kinds.setdefault(key, len(self.kinds)) for key in keys],
            "started": [-1.0] * number,
            "restarts": [0] * number,
        }
        self._keep_pairs(np.concatenate((self._together(), fresh), axis=2))
        for name, column in singles.items():
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.array(column, dtype=old.dtype))))
        self.jobs.extend(jobs)
        isolated = self.isolated_rate(len(self) - number)
        self.alone.extend((self.left[-number:] / isolated).tolist())

    def isolated_rate(self, start: int = 0) -> Floats:
        """throughput(m, X^isolated) with the jobs now present, from place ``start`` on [jobs]."""
        capacity, rate = self.pool.capacity.astype(float), self.rate[:, start:]
        share = capacity[:, None] / len(self) / self.scale[start:]
        share /= np.maximum(share.sum(axis=0), 1.0)
        alone: Floats = (rate[: len(capacity)] * share).sum(axis=0)
        if alone.all():
            return alone
        answer: Floats = np.where(alone > 0, alone, rate.max(axis=0) / len(self))
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
            self._outcome(i, float(f), hourly)
            for i, f in zip(done.tolist(), finish.tolist(), strict=True)
        ]
        kept = np.ones(len(self), dtype=bool)
        kept[done] = False
        self._keep_pairs(self._together()[:, :, kept])
        for name in _PER_JOB:
            setattr(self, name, getattr(self, name)[kept])
        for i in sorted(done.tolist(), reverse=True):
            del self.jobs[i], self.alone[i]
        return outcomes

    def _outcome(self, i: int, finish: float, hourly: Floats | None) -> JobOutcome:
        job, held = self.jobs[i], self.held[:, i] * self.usage(i)
        devices = held.sum() if not self.pool.uses_mixes else held @ self.pool.resources.sum(axis=0)
        return JobOutcome(
            id=job.id,
            model=job.model,
            scale_factor=job.scale_factor,
            priority_weight=job.priority_weight,
            arrival_seconds=job.arrival_seconds,
            start_seconds=float(self.started[i]),
            finish_seconds=finish,
            device_seconds=float(devices),
            isolated_seconds=self.alone[i],
            slo_seconds=job.slo_seconds,
            dollars=None if hourly is None else float(held @ hourly) / 3600.0,
            num_restarts=int(self.restarts[i]),
            slo_given_up=job.id in self.given_up,
        )
