"""A cluster in virtual time that reallocates when a job arrives or finishes, without rounds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from ....schema.errors import InfeasibleError, ProblemError
from ....schema.jobs import Job
from ....schema.simulation import JobOutcome
from ...mechanisms.cluster.pool import ClusterPool
from ...mechanisms.cluster.seats import DeviceLayout, Placement
from ..arrivals import Queue
from ..failures import FailureEvents, FailureOptions
from ..metrics import Simulation
from ..span_book import SpanBook

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


class EventCluster:
    """Keeps virtual time and all records; subclasses allocate the devices in ``schedule``."""

    def __init__(
        self,
        jobs: Iterable[Job],
        pool: ClusterPool,
        resize_seconds: float,
        failures: FailureOptions | None,
        *,
        gangs: bool,
        restart_seconds: float | None = None,
        layout: DeviceLayout | None = None,
        records_spans: bool = True,
    ) -> None:
        restart_seconds = resize_seconds if restart_seconds is None else restart_seconds
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
        if records_spans:
            layout = layout or (None if failures is None else failures.layout)
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
                if place < entry.counts[kind]:
                    if entry not in hit:
                        hit.append(entry)
                    break
                place -= entry.counts[kind]
        return hit

    def _enter(self, job: Job) -> Entry:
        entry = Entry(
            job, job.steps, 1.0, self.none, held=[0.0] * len(self.none)
        )  # fmt: skip
        number = len(self.running) + len(self.waiting) + 1
        rate = self.pool.rate(job)
        share = self.pool.capacity / number / job.scale_factor
        share = share / max(1.0, float(share.sum()))
        entry.alone = job.steps / float(np.dot(rate, share))
        return entry

    def _finish(self, entry: Entry) -> float:
        if entry.rate == 0:
            return float("inf")
        return max(self.now, entry.paused_until) + entry.left / entry.rate

    def _advance(self, until: float) -> None:
        if self.book is not None and until > self.now:
            self._hold(self.book, until)
        for entry in self.running:
            worked = max(0.0, until - max(self.now, entry.paused_until))
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
        """Give a job other devices; unless it just starts, it stops for what that costs.

        That is ``restart_seconds`` where it held none, else ``resize_seconds``.
        """
        if counts == entry.counts:
            return
        if any(counts) and entry.started is None:
            entry.started = self.now
        elif any(counts):
            held_some = any(entry.counts)
            self._pause(entry, self.resize_seconds if held_some else self.restart_seconds)
        elif entry.resized_at == self.now:  # it lost a device, and now the others too
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
        return JobOutcome(
            id=job.id,
            model=job.model,
            scale_factor=job.scale_factor,
            priority_weight=job.priority_weight,
            arrival_seconds=job.arrival_seconds,
            start_seconds=self.now if entry.started is None else entry.started,
            finish_seconds=self.now,
            device_seconds=sum(entry.held),
            isolated_seconds=entry.alone,
            slo_seconds=job.slo_seconds,
            dollars=None if hourly is None else float(np.dot(entry.held, hourly)) / 3600.0,
            num_restarts=entry.resizes,
        )
