"""A cluster in virtual time that reallocates when a job arrives or finishes, without rounds.

``mechanisms.elastic`` decides elastic fair sharing and static priority (VirtualFlow 6.4),
``mechanisms.easyscale`` EasyScale's proposals (3.4).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Literal

import numpy as np

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.jobs import Job
from ...schema.simulation import JobOutcome
from ..mechanisms.easyscale import Bidder, Stock, Variant, decide
from ..mechanisms.elastic import Claim, admit_whole, share_elastically
from ..mechanisms.pool import ClusterPool, outcome_of
from ..mechanisms.seats import DeviceLayout, Placement
from .arrivals import Queue
from .failures import FailureEvents, FailureOptions
from .metrics import Simulation, SpanBook

Counts = tuple[int, ...]
_DONE = 1e-9
_MOST_FAILURES = 100_000  # without a job that ends between them


@dataclass(slots=True)
class Entry:
    """A job that waits or runs: its devices by type, its rate on them, its steps left."""

    job: Job
    left: float
    alone: float
    counts: Counts
    rate: float = 0.0
    started: float | None = None
    held: list[float] = field(default_factory=list)
    paused_until: float = 0.0
    resizes: int = 0
    resized_at: float = -1.0

    @property
    def devices(self) -> int:
        """Devices it holds, of all types."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """What happens besides decisions.

    ``resize_seconds`` stop a job whenever its devices change, ``restart_seconds`` (None: as many)
    one that gets devices again after it had none. ``failures`` are of devices. Spans name devices
    on the servers of ``layout``; None: those of ``failures``, else a flat pool.
    """

    resize_seconds: float = 0.0
    restart_seconds: float | None = None
    failures: FailureOptions | None = None
    layout: DeviceLayout | None = None
    records_spans: bool = True


class EventCluster:
    """Keeps virtual time and all records; subclasses allocate the devices in ``schedule``."""

    def __init__(
        self, jobs: Iterable[Job], pool: ClusterPool, options: EventOptions, *, gangs: bool
    ) -> None:
        resize_seconds, restart_seconds = options.resize_seconds, options.restart_seconds
        restart_seconds = resize_seconds if restart_seconds is None else restart_seconds
        failures = options.failures
        for what, seconds in (("resize", resize_seconds), ("restart", restart_seconds)):
            if not 0 <= seconds < float("inf"):
                raise ProblemError(f"a {what} must take a finite time of >= 0 s, got {seconds} s")
        self.queue, self.pool = Queue(jobs, pool), pool
        self.resize_seconds, self.restart_seconds = resize_seconds, restart_seconds
        self.none: Counts = (0,) * len(pool.types)
        self.running: list[Entry] = []
        self.waiting: list[Entry] = []
        self.now = 0.0
        self.busy = [0.0] * len(pool.types)
        self.outcomes: list[JobOutcome] = []
        self.book: SpanBook | None = None
        if options.records_spans:
            layout = options.layout or (None if failures is None else failures.layout)
            self.book = SpanBook(pool.types, pool.capacity.tolist(), layout)
        self.events = 0
        self.hourly = pool.hourly()
        self.gangs = gangs  # whether a job runs on all its devices or on none
        self.failures: FailureEvents | None = None
        if failures is not None:
            failures.refuse_hopeless()
            self.failures = FailureEvents(
                failures, failures.layout or DeviceLayout.flat(pool.capacity)
            )
        self._since_an_end = 0

    def schedule(self) -> None:
        """Move jobs between ``waiting`` and ``running`` and ``resize`` them."""
        raise AssertionError("a mechanism overrides this")

    def rate_of(self, entry: Entry, counts: Counts) -> float:
        """Steps per second of a job on devices by type."""
        raise AssertionError("a mechanism overrides this")

    def capacity(self) -> list[int]:
        """Devices by type that may be used now."""
        return self.pool.capacity.tolist() if self.failures is None else self.failures.up()

    def next_change_seconds(self) -> float:
        """When the capacity changes next; infinite where it never does."""
        return float("inf") if self.failures is None else self.failures.next_seconds

    def free(self) -> list[int]:
        """Free devices by type."""
        free = self.capacity()
        for entry in self.running:
            free = [left - held for left, held in zip(free, entry.counts, strict=True)]
        return free

    def run(self, on_progress: Callable[[int, float], None] | None = None) -> Simulation:
        """Run all jobs to their end; ``on_progress`` hears of jobs done and virtual seconds."""
        told = 0
        while self._step():
            if on_progress is not None and len(self.outcomes) > told:
                told = len(self.outcomes)
                on_progress(told, self.now)
        return Simulation(
            jobs=tuple(self.outcomes),
            num_devices=dict(self.pool.num_devices),
            busy_seconds=dict(zip(self.pool.types, self.busy, strict=True)),
            end_seconds=max((job.finish_seconds for job in self.outcomes), default=0.0),
            num_rounds=self.events,
            num_allocations=self.events,
            num_failures=0 if self.failures is None else self.failures.fleet.num_devices_failed,
            num_server_failures=(
                0 if self.failures is None else self.failures.fleet.num_servers_failed
            ),
            left_out=dict(self.queue.left_out),
            spans=() if self.book is None else self.book.spans(),
        )

    def _step(self) -> bool:
        # The next event: a job ends, one arrives, or the capacity changes while anybody is there.
        finish = min((self._finish(entry) for entry in self.running), default=float("inf"))
        until = min(finish, self.queue.next_seconds)
        if self.running or self.waiting:
            until = min(until, self.next_change_seconds())
        if until == float("inf"):
            return False
        self._advance(until)
        self.events += 1
        if self.failures is not None:
            self._fail(self.failures)
        self.waiting.extend(self._enter(job) for job in self.queue.until(self.now))
        self.schedule()
        return True

    def _fail(self, failures: FailureEvents) -> None:
        # In order of time, all until now.
        for devices in failures.until(self.now):
            self._since_an_end += 1
            if self._since_an_end > _MOST_FAILURES:
                raise InfeasibleError(
                    f"{_MOST_FAILURES} failures of devices and no job that ended between them; "
                    "make failures rarer or resizes shorter"
                )
            hit = self._holders(devices)
            if self.book is not None:
                self.book.strike(entry.job.id for entry in hit)
            for entry in hit:
                # Its state is with its other devices, or in a checkpoint that is as new.
                if self.gangs:
                    self._stop(entry)
                else:
                    self._pause(entry, self.resize_seconds)

    def _holders(self, devices: list[tuple[int, int]]) -> list[Entry]:
        """Who holds any of the devices, given by type and place; jobs hold them in their order."""
        hit: list[Entry] = []
        for kind, place in devices:
            for entry in self.running:
                # Jobs hold the places of a type one after another, in their order; only those
                # count here.
                if place < entry.counts[kind]:
                    if entry not in hit:
                        hit.append(entry)
                    break
                place -= entry.counts[kind]
        return hit

    def _enter(self, job: Job) -> Entry:
        number = len(self.running) + len(self.waiting) + 1
        rate = self.pool.rate(job)
        # As if the jobs present shared the pool equally: what an isolated job would get.
        share = self.pool.capacity / number / job.scale_factor
        share = share / max(1.0, float(share.sum()))
        alone = job.steps / float(np.dot(rate, share))
        return Entry(job, job.steps, alone, self.none, held=[0.0] * len(self.none))

    def _finish(self, entry: Entry) -> float:
        if entry.rate == 0:
            return float("inf")
        return max(self.now, entry.paused_until) + entry.left / entry.rate

    def _advance(self, until: float) -> None:
        if self.book is not None and until > self.now:
            self._hold(self.book, until)
        for entry in self.running:
            worked = max(0.0, until - max(self.now, entry.paused_until))
            # By the time itself, not by what is left: rounding must not leave a job for another
            # event.
            ends = self._finish(entry) <= until
            entry.left = 0.0 if ends else entry.left - worked * entry.rate
            for kind, number in enumerate(entry.counts):
                entry.held[kind] += (until - self.now) * number
                self.busy[kind] += (until - self.now) * number
        self.now = until
        done = [entry for entry in self.running if entry.left <= _DONE]
        self.running = [entry for entry in self.running if entry.left > _DONE]
        self._since_an_end = 0 if done else self._since_an_end
        for entry in done:
            self.outcomes.append(self._outcome(entry))

    def resize(self, entry: Entry, counts: Counts) -> None:
        """Give a job other devices; unless it just starts, it stops for what that costs."""
        if counts == entry.counts:
            return
        if any(counts) and entry.started is None:
            entry.started = self.now
        elif any(counts):
            held_some = any(entry.counts)
            self._pause(entry, self.resize_seconds if held_some else self.restart_seconds)
        # It lost a device, and now the others too: one resize, as a live cluster makes it.
        elif entry.resized_at == self.now:
            entry.resizes, entry.resized_at = entry.resizes - 1, -1.0
        entry.counts = counts
        entry.rate = self.rate_of(entry, counts) if any(counts) else 0.0

    def _pause(self, entry: Entry, seconds: float) -> None:
        entry.resizes += entry.resized_at != self.now  # what happens at once is one resize
        entry.resized_at, entry.paused_until = self.now, self.now + seconds

    def _stop(self, entry: Entry) -> None:
        """Send a running job back to those that wait, in order of arrival."""
        self.resize(entry, self.none)
        self.running.remove(entry)
        self.waiting = sorted([entry, *self.waiting], key=lambda e: e.job.arrival_seconds)

    def _hold(self, book: SpanBook, until: float) -> None:
        """Record the jobs' devices from now on."""
        placements = [
            Placement(
                (entry.job.id,),
                tuple((kind, number) for kind, number in enumerate(entry.counts) if number),
            )
            for entry in self.running
        ]
        standing = None if self.failures is None else self.failures.standing
        book.hold(placements, self.now, [(until,)] * len(placements), standing)

    def _outcome(self, entry: Entry) -> JobOutcome:
        job, hourly = entry.job, self.hourly
        return outcome_of(
            job,
            start_seconds=self.now if entry.started is None else entry.started,
            finish_seconds=self.now,
            device_seconds=sum(entry.held),
            isolated_seconds=entry.alone,
            dollars=None if hourly is None else float(np.dot(entry.held, hourly)) / 3600.0,
            num_restarts=entry.resizes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShareOptions(EventOptions):
    """``elastic`` is algorithm 1; under ``static_priority`` no job is resized or overtaken.

    ``efficiency`` maps (devices, demand) to the part of the full rate. When devices fail, an
    elastic job goes on with fewer, any other starts again, once it has all its devices, from where
    it was.
    """

    scheduler: Literal["elastic", "static_priority"] = "elastic"
    efficiency: Callable[[int, int], float] = field(default=lambda n, demand: n / demand)


def simulate_fair_share(
    jobs: Iterable[Job],
    pool: ClusterPool,
    options: FairShareOptions | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run jobs to their end on one device type, in order of weight and then of arrival.

    A job's rate on n of the d devices it asks for is its full rate times n / d, unless
    ``efficiency`` says otherwise: its virtual nodes are redistributed, and each device runs more of
    them in turn. ``on_progress`` is called with jobs done and virtual seconds.

    Raises:
        ProblemError: The pool has several types, or the trace makes no sense.
    """
    if len(pool.types) != 1:
        raise ProblemError(
            f"fair sharing runs on one device type, the pool has {', '.join(pool.types)}"
        )
    return _FairShare(jobs, pool, options or FairShareOptions()).run(on_progress)


class _FairShare(EventCluster):
    def __init__(self, jobs: Iterable[Job], pool: ClusterPool, options: FairShareOptions) -> None:
        gangs = options.scheduler == "static_priority"
        super().__init__(jobs, pool, options, gangs=gangs)
        self.options = options

    def rate_of(self, entry: Entry, counts: Counts) -> float:
        full = float(self.pool.rate(entry.job)[0])
        return full * self.options.efficiency(counts[0], entry.job.scale_factor)

    def schedule(self) -> None:
        # Of equal weights the earlier job goes first; the sort is stable.
        self.waiting.sort(key=lambda e: (-e.job.priority_weight, e.job.arrival_seconds))
        if self.options.scheduler == "elastic":
            self._share()
        else:
            demands = [entry.job.scale_factor for entry in self.waiting]
            for _ in range(admit_whole(demands, self.free()[0])):
                entry = self.waiting.pop(0)
                self.running.append(entry)
                self.resize(entry, (entry.job.scale_factor,))

    def _share(self) -> None:
        """Algorithm 1."""
        running = [_claim(entry) for entry in self.running]
        waiting = [_claim(entry) for entry in self.waiting]
        wanted = share_elastically(running, waiting, self.capacity()[0])
        admitted = len(wanted) - len(running)
        self.running += self.waiting[:admitted]
        del self.waiting[:admitted]
        for entry, share in zip(self.running, wanted, strict=True):
            self.resize(entry, (share,))


def _claim(entry: Entry) -> Claim:
    return Claim(entry.job.priority_weight, entry.job.scale_factor, entry.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalOptions(EventOptions):
    """Which of EasyScale's schedulers, and what else happens.

    ``serving`` lists (from time, devices by type that serving jobs hold from then on), in order.
    ``measured`` is the part of the estimated rate that a job really reaches on its devices; where
    an increment turns out slower than before, the job falls back and does not ask again for it.
    When a device fails, the job that a device costs least yields one.
    """

    variant: Variant = Variant()
    serving: tuple[tuple[float, Counts], ...] = ()
    measured: Callable[[Job, Counts], float] | None = None


def simulate_proposals(
    jobs: Iterable[Job],
    pool: ClusterPool,
    options: ProposalOptions | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run jobs to their end.

    A job's ``scale_factor`` is maxP, the number of ESTs; it runs on any devices, N_i of type i with
    at most A_i ESTs each, at maxP / f_overload mini-batches (equations 1a to 1d). Speed-ups are
    relative to its rate on maxP devices of its fastest type. A job yields to serving jobs where a
    device costs it the least. ``on_progress`` is called with jobs done and virtual seconds.

    Raises:
        ProblemError: The trace or the serving jobs make no sense.
    """
    options = options or ProposalOptions()
    times = [time for time, _ in options.serving]
    if times != sorted(times) or any(len(held) != len(pool.types) for _, held in options.serving):
        raise ProblemError("serving: give (seconds, devices of each type), in order of time")
    return _Proposals(jobs, pool, options).run(on_progress)


@cache
def est_rate(capability: tuple[float, ...], counts: Counts, max_p: int) -> float:
    """Mini-batches per second of maxP ESTs on N_i devices: 1 / f_overload, at the best A_i.

    ``capability`` C_i is the rate of one EST on a device of each type, ``counts`` N_i.
    """
    used = [(c, n) for c, n in zip(capability, counts, strict=True) if n and c > 0]
    # All overloads at which some device gets one more EST: the least of them that holds all is the
    # best.
    overloads = sorted({ests / c for c, _ in used for ests in range(1, max_p + 1)})
    for overload in overloads:
        # Each device takes as many ESTs as end within the overload, beyond rounding.
        if sum(n * int(overload * c * (1 + 1e-12)) for c, n in used) >= max_p:
            return 1.0 / overload
    return 0.0


class _Proposals(EventCluster):
    def __init__(self, jobs: Iterable[Job], pool: ClusterPool, options: ProposalOptions) -> None:
        super().__init__(jobs, pool, options, gangs=False)
        self.options = options
        self.refused: dict[str, set[Counts]] = {}

    def rate_of(self, entry: Entry, counts: Counts) -> float:
        part = 1.0 if self.options.measured is None else self.options.measured(entry.job, counts)
        return self._estimate(entry, counts) * part

    def _estimate(self, entry: Entry, counts: Counts) -> float:
        return est_rate(self.pool.rate_per_device(entry.job), counts, entry.job.scale_factor)

    def capacity(self) -> list[int]:
        held: Counts = self.none
        # The last entry that has begun; the list is in order of time.
        for time, counts in self.options.serving:
            if time <= self.now:
                held = counts
        return [
            max(0, total - taken) for total, taken in zip(super().capacity(), held, strict=True)
        ]

    def next_change_seconds(self) -> float:
        later = (time for time, _ in self.options.serving if time > self.now)
        return min([super().next_change_seconds(), *later])

    def schedule(self) -> None:
        entries = {entry.job.id: entry for entry in (*self.running, *self.waiting)}
        found = decide(
            [Stock(kind, 0) for kind in range(len(self.none))],
            self.capacity(),
            [self._bidder(entry) for entry in self.running],
            [self._bidder(entry) for entry in self.waiting],
            trade=self.options.variant.trade,
        )
        for job, counts in found.refused:
            self.refused.setdefault(job, set()).add(counts)
        # Who lost all its devices waits again, in order of arrival.
        idle = [entry for entry in self.running if entry.job.id not in found.held]
        self.waiting = sorted(
            [*idle, *(entry for entry in self.waiting if entry.job.id not in found.held)],
            key=lambda entry: entry.job.arrival_seconds,
        )
        self.running = [entries[job] for job in found.held]
        for entry in (*self.waiting, *self.running):
            self.resize(entry, found.held.get(entry.job.id, self.none))

    def _bidder(self, entry: Entry) -> Bidder:
        measured = self.options.measured
        return Bidder(
            id=entry.job.id,
            arrival_seconds=entry.job.arrival_seconds,
            held=entry.counts,
            most=entry.job.scale_factor,
            rate=partial(self._estimate, entry),
            full_rate=max(self.pool.rate_per_device(entry.job)),
            mixes=self.options.variant.mixes,
            actual=None if measured is None else partial(self.rate_of, entry),
            refused=frozenset(self.refused.get(entry.job.id, ())),
        )
