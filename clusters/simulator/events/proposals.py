"""EasyScale's schedulers in virtual time (EasyScale 3.4); ``mechanisms.proposals`` decides.

A job's ``scale_factor`` is maxP, the number of ESTs; it runs on any devices, N_i of type i with
at most A_i ESTs each, at maxP / f_overload mini-batches (equations 1a to 1d). Speed-ups are
relative to the job's rate on maxP devices of its fastest type; a job yields to serving jobs where
a device costs it the least.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

from ....schema.errors import ProblemError
from ....schema.jobs import Job
from ...mechanisms.cluster.pool import ClusterPool
from ...mechanisms.cluster.seats import DeviceLayout
from ...mechanisms.easyscale import Variant
from ...mechanisms.proposals import Bidder, Stock, decide
from ..failures import FailureOptions
from ..metrics import Simulation
from .events import Counts, Entry, EventCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalOptions:
    """Which of EasyScale's schedulers, and what else happens.

    ``serving`` lists (from time, devices by
    type that serving jobs hold from then on), in order. ``measured`` is the part of the estimated
    rate that a job really reaches on its devices; where an increment turns out slower than
    before, the job falls back and does not ask again for it. ``resize_seconds`` stop a job whenever
    its devices change, ``restart_seconds`` (None: as many) one that gets devices again after it had
    none. ``failures`` of devices: the job that
    a device costs least yields one.
    Spans name devices on the servers of ``layout``; None: those of ``failures``, else a flat pool.
    """

    variant: Variant = Variant()
    resize_seconds: float = 0.0
    restart_seconds: float | None = None
    serving: tuple[tuple[float, Counts], ...] = ()
    measured: Callable[[Job, Counts], float] | None = None
    failures: FailureOptions | None = None
    layout: DeviceLayout | None = None
    records_spans: bool = True


def simulate_proposals(
    jobs: Iterable[Job],
    pool: ClusterPool,
    options: ProposalOptions | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run jobs to their end.

    ``on_progress`` is called with jobs done and virtual seconds.

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

    Args:
        capability: C_i, mini-batches per second of one EST on a device of each type.
        counts: N_i.
        max_p: Number of ESTs.
    """
    used = [(c, n) for c, n in zip(capability, counts, strict=True) if n and c > 0]
    overloads = sorted({ests / c for c, _ in used for ests in range(1, max_p + 1)})
    for overload in overloads:
        if sum(n * int(overload * c * (1 + 1e-12)) for c, n in used) >= max_p:
            return 1.0 / overload
    return 0.0


class _Proposals(EventCluster):
    def __init__(self, jobs: Iterable[Job], pool: ClusterPool, options: ProposalOptions) -> None:
        super().__init__(
            jobs, pool, options.resize_seconds, options.failures,
            gangs=False, restart_seconds=options.restart_seconds, layout=options.layout,
            records_spans=options.records_spans,
        )  # fmt: skip
        self.options = options
        self.refused: dict[str, set[Counts]] = {}

    def rate_of(self, entry: Entry, counts: Counts) -> float:
        part = 1.0 if self.options.measured is None else self.options.measured(entry.job, counts)
        return self._estimate(entry, counts) * part

    def _estimate(self, entry: Entry, counts: Counts) -> float:
        return est_rate(self.pool.rate_per_device(entry.job), counts, entry.job.scale_factor)

    def capacity(self) -> list[int]:
        held: Counts = self.none
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
