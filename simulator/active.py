"""The jobs present, as arrays that grow and shrink with them."""

from dataclasses import dataclass, field

import numpy as np

from ..schema.jobs import Job
from ..schema.simulation import JobOutcome
from .pool import Pool
from .priorities import NOWHERE, Floats, Ints

_PER_JOB = ("scale", "left", "weight", "isolated", "last_type", "kind")
_PER_PAIR = ("rate", "relative", "received", "share", "deficit", "held")


@dataclass(slots=True)
class Active:
    """Jobs present in order of arrival.

    ``rate`` steps per second, ``relative`` to the job's best, ``received`` seconds since the last
    allocation, ``share`` the
    allocation X, ``deficit`` seconds lacking, ``held`` seconds in all [columns, jobs]; ``left``
    steps to run, ``isolated`` seconds of t^isolated so far, ``last_type`` of the last round,
    ``kind`` the number of the (model, scale factor) [jobs]. ``given_up`` are ids of jobs whose
    SLO the policy could not keep.
    """

    pool: Pool
    jobs: list[Job] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
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

    def __post_init__(self) -> None:
        columns = len(self.pool.columns)
        for name in _PER_PAIR:
            setattr(self, name, np.zeros((columns, 0)))
        for name in _PER_JOB:
            whole = name in ("scale", "last_type", "kind")
            setattr(self, name, np.zeros(0, dtype=np.int64 if whole else np.float64))

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, jobs: list[Job], received_seconds: float) -> None:
        """Let jobs in; nothing is allocated to them yet."""
        columns, number = len(self.pool.columns), len(jobs)
        zeros = np.zeros((columns, number))
        rate = np.array([self.pool.rate(job) for job in jobs]).T
        pairs = {
            "rate": rate,
            "relative": rate / rate.max(axis=0),
            "received": np.full((columns, number), received_seconds),
            "share": zeros, "deficit": zeros, "held": zeros,
        }  # fmt: skip
        keys = [(job.model, job.scale_factor) for job in jobs]
        singles = {
            "scale": [job.scale_factor for job in jobs],
            "left": [job.steps for job in jobs],
            "weight": [job.priority_weight for job in jobs],
            "isolated": [job.isolated_seconds for job in jobs],
            "last_type": [NOWHERE] * number,
            "kind": [self.kinds.setdefault(key, len(self.kinds)) for key in keys],
        }
        for name, values in pairs.items():
            setattr(self, name, np.concatenate((getattr(self, name), values), axis=1))
        for name, column in singles.items():
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.array(column, dtype=old.dtype))))
        self.jobs.extend(jobs)
        self.started.extend([-1.0] * number)
        self.restarts.extend([0] * number)
        isolated = self.isolated_rate()[-number:]
        self.alone.extend((self.left[-number:] / isolated).tolist())

    def isolated_rate(self) -> Floats:
        """throughput(m, X^isolated) with the jobs now present [jobs]."""
        capacity = self.pool.capacity.astype(float)
        share = capacity[:, None] / len(self) / self.scale
        share /= np.maximum(share.sum(axis=0), 1.0)
        alone: Floats = (self.rate[: len(capacity)] * share).sum(axis=0)
        answer: Floats = np.where(alone > 0, alone, self.rate.max(axis=0) / len(self))
        return answer

    def usage(self, i: int) -> Ints:
        """How often a job holds a column's devices: its scale factor, a mix once [columns]."""
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
        for name in _PER_PAIR:
            setattr(self, name, getattr(self, name)[:, kept])
        for name in _PER_JOB:
            setattr(self, name, getattr(self, name)[kept])
        for i in sorted(done.tolist(), reverse=True):
            del self.jobs[i], self.started[i], self.restarts[i], self.alone[i]
        return outcomes

    def _outcome(self, i: int, finish: float, hourly: Floats | None) -> JobOutcome:
        job, held = self.jobs[i], self.held[:, i] * self.usage(i)
        devices = self.pool.resources.sum(axis=0)
        return JobOutcome(
            id=job.id,
            model=job.model,
            scale_factor=job.scale_factor,
            priority_weight=job.priority_weight,
            arrival_seconds=job.arrival_seconds,
            start_seconds=self.started[i],
            finish_seconds=finish,
            device_seconds=float(held @ devices),
            isolated_seconds=self.alone[i],
            slo_seconds=job.slo_seconds,
            dollars=None if hourly is None else float(held @ hourly) / 3600.0,
            num_restarts=self.restarts[i],
            slo_given_up=job.id in self.given_up,
        )
