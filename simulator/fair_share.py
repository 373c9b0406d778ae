"""Elastic weighted fair sharing, and static priority beside it (VirtualFlow 4.2, 6.4).

Event driven: jobs change devices when one arrives or finishes. One device type. A job's rate on
n of the d devices it asks for is its full rate times n / d: its virtual nodes are redistributed
and each device runs more of them in turn (``efficiency`` can say otherwise).

Where algorithm 1 is silent: "expand current allocations" gives free devices by weighted fair
share to running jobs below their demand; fair shares are whole devices, at least one a job where
there are enough, at most the demand, the largest remainder first, then the higher weight, then
the earlier job; "no higher priority job allocations are affected" means that no running job of a
higher weight than the queue's head would hold fewer devices than now. The queue is ordered by
weight, then arrival.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..schema.errors import ProblemError
from ..schema.jobs import Job
from .arrivals import Queue
from .outcomes import JobOutcome, Simulation, Span
from .pool import Pool

_DONE = 1e-9


@dataclass(slots=True)
class _Running:
    job: Job
    full_rate: float
    left: float
    devices: int = 0
    started: float | None = None
    held: float = 0.0
    since: float = 0.0
    paused_until: float = 0.0
    resizes: int = 0
    alone: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShareOptions:
    """``elastic`` is algorithm 1; ``static_priority`` never resizes and never lets pass.

    ``resize_seconds`` stop a job whenever it is resized. ``efficiency`` maps (devices, demand)
    to the part of the full rate.
    """

    scheduler: Literal["elastic", "static_priority"] = "elastic"
    resize_seconds: float = 0.0
    efficiency: Callable[[int, int], float] = field(default=lambda n, demand: n / demand)


def simulate_fair_share(
    jobs: Iterable[Job], pool: Pool, options: FairShareOptions | None = None
) -> Simulation:
    """Run jobs to their end on one device type.

    Raises:
        ProblemError: The pool has several types, or the trace makes no sense.
    """
    if len(pool.types) != 1:
        raise ProblemError(
            f"fair sharing runs on one device type, the pool has {', '.join(pool.types)}"
        )
    cluster = _FairShare(Queue(jobs), pool, options or FairShareOptions())
    while cluster.step():
        pass
    return cluster.result()


def fair_shares(weights: list[float], demands: list[int], free: int) -> list[int]:
    """Whole devices by weight, each job at most its demand (weighted max-min with water filling).

    Args:
        weights: Weight of each job.
        demands: Devices each asks for.
        free: Devices to share.
    """
    exact = [0.0] * len(weights)
    open_ = set(range(len(weights)))
    left = float(free)
    while open_ and left > 1e-12:
        level = min(
            left / sum(weights[i] for i in open_),
            min((demands[i] - exact[i]) / weights[i] for i in open_),
        )
        for i in open_:
            exact[i] += level * weights[i]
        left -= level * sum(weights[i] for i in open_)
        open_ = {i for i in open_ if demands[i] - exact[i] > 1e-9}
    return _whole(exact, weights, free)


def _whole(exact: list[float], weights: list[float], free: int) -> list[int]:
    shares = [int(value + 1e-9) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: (-(exact[i] - shares[i]), -weights[i], i))
    for i in sorted(range(len(exact)), key=lambda i: (-weights[i], i)):
        if shares[i] == 0 and sum(shares) < free:
            shares[i] = 1
    for i in order:
        if sum(shares) < free and shares[i] < exact[i] - 1e-9:
            shares[i] += 1
    for i in sorted(range(len(exact)), key=lambda i: (weights[i], -i)):
        while sum(shares) > free and shares[i] > 1:
            shares[i] -= 1
    return shares


class _FairShare:
    def __init__(self, queue: Queue, pool: Pool, options: FairShareOptions) -> None:
        self.queue, self.pool, self.options = queue, pool, options
        self.capacity = int(pool.capacity[0])
        self.hourly = pool.hourly()
        self.running: list[_Running] = []
        self.waiting: list[_Running] = []
        self.now = self.busy = 0.0
        self.outcomes: list[JobOutcome] = []
        self.spans: list[Span] = []
        self.events = 0

    def step(self) -> bool:
        """Go on to the next arrival or finish, and schedule; False when all is done."""
        finish = min((self._finish(entry) for entry in self.running), default=float("inf"))
        until = min(finish, self.queue.next_seconds)
        if until == float("inf"):
            return False
        self._advance(until)
        self.events += 1
        for job in self.queue.until(self.now):
            self.waiting.append(self._enter(job))
        self.waiting.sort(key=lambda e: (-e.job.priority_weight, e.job.arrival_seconds))
        if self.options.scheduler == "elastic":
            self._share()
        else:
            self._admit()
        return True

    def _enter(self, job: Job) -> _Running:
        rate = float(self.pool.rate(job)[0])
        number = len(self.running) + len(self.waiting) + 1
        part = min(1.0, self.capacity / number / job.scale_factor)
        return _Running(job, rate, job.steps, alone=job.steps / rate / part)

    def _rate(self, entry: _Running) -> float:
        if entry.devices == 0:
            return 0.0
        return entry.full_rate * self.options.efficiency(entry.devices, entry.job.scale_factor)

    def _finish(self, entry: _Running) -> float:
        rate = self._rate(entry)
        if rate == 0:
            return float("inf")
        return max(self.now, entry.paused_until) + entry.left / rate

    def _advance(self, until: float) -> None:
        for entry in self.running:
            worked = max(0.0, until - max(self.now, entry.paused_until))
            finishes = self._finish(entry) <= until
            entry.left = 0.0 if finishes else entry.left - worked * self._rate(entry)
            entry.held += (until - self.now) * entry.devices
            self.busy += (until - self.now) * entry.devices
        self.now = until
        for entry in [e for e in self.running if e.left <= _DONE]:
            self.running.remove(entry)
            self._resize(entry, 0)
            self.outcomes.append(self._outcome(entry))

    def _share(self) -> None:
        """Algorithm 1."""
        wanted = self._shares(self.running)
        while self.waiting:
            head = self.waiting[0]
            fair = self._shares([*self.running, head])
            weight = head.job.priority_weight
            hurt = any(
                share < entry.devices and entry.job.priority_weight > weight
                for entry, share in zip(self.running, fair, strict=False)
            )
            if hurt or fair[-1] == 0:
                break
            wanted = fair
            self.running.append(self.waiting.pop(0))
        for entry, share in zip(self.running, wanted, strict=True):
            self._resize(entry, share)

    def _shares(self, entries: list[_Running]) -> list[int]:
        weights = [entry.job.priority_weight for entry in entries]
        return fair_shares(weights, [e.job.scale_factor for e in entries], self.capacity)

    def _admit(self) -> None:
        """Static priority: the highest priority first, whole; it waits where it does not fit."""
        free = self.capacity - sum(entry.devices for entry in self.running)
        while self.waiting and self.waiting[0].job.scale_factor <= free:
            entry = self.waiting.pop(0)
            self.running.append(entry)
            self._resize(entry, entry.job.scale_factor)
            free -= entry.devices

    def _resize(self, entry: _Running, devices: int) -> None:
        if devices == entry.devices:
            return
        if entry.devices and self.now > entry.since:
            self.spans.append(
                Span(
                    job=entry.job.id, device_type=self.pool.types[0], num_devices=entry.devices,
                    start_seconds=entry.since, end_seconds=self.now,
                )
            )  # fmt: skip
        if devices and entry.started is None:
            entry.started = self.now
        elif devices:
            entry.resizes += 1
            entry.paused_until = self.now + self.options.resize_seconds
        entry.devices, entry.since = devices, self.now

    def _outcome(self, entry: _Running) -> JobOutcome:
        job = entry.job
        hourly = None if self.hourly is None else float(self.hourly[0])
        return JobOutcome(
            id=job.id,
            model=job.model,
            scale_factor=job.scale_factor,
            priority_weight=job.priority_weight,
            arrival_seconds=job.arrival_seconds,
            start_seconds=self.now if entry.started is None else entry.started,
            finish_seconds=self.now,
            device_seconds=entry.held,
            isolated_seconds=entry.alone,
            slo_seconds=job.slo_seconds,
            dollars=None if hourly is None else entry.held * hourly / 3600.0,
            num_restarts=entry.resizes,
        )

    def result(self) -> Simulation:
        """What the run leaves behind."""
        return Simulation(
            jobs=tuple(self.outcomes),
            num_devices=dict(self.pool.num_devices),
            busy_seconds={self.pool.types[0]: self.busy},
            end_seconds=max((job.finish_seconds for job in self.outcomes), default=0.0),
            num_rounds=self.events,
            num_allocations=self.events,
            spans=tuple(self.spans),
        )
