"""EasyScale's schedulers: jobs propose, the cluster accepts greedily (EasyScale 3.4).

A job's ``scale_factor`` is maxP, the number of ESTs; it runs on any devices, N_i of type i with
at most A_i ESTs each, at maxP / f_overload mini-batches (equations 1a to 1d). Each job proposes
its ``top`` plans, each an increment of devices of one type, by speed-up per device; the cluster
accepts the highest, of equals the one with more devices, then the earlier job, until none is
left. Where the text is silent: speed-up is the gain over the job's rate on maxP devices of its
fastest type, so that it is finite for a job that holds nothing; a job yields to serving jobs where
a device costs it the least.

With ``takes``, proposals may also name a device that another job holds: it changes hands where
the product of both rates grows (the taker's speed-up is more than the giver's slow-down; a job
that holds nothing has the first claim, the longest waiting one before others). A giver keeps one
device. The product of all rates grows with each exchange, so this ends.

YARN's capacity scheduler stands beside it: first in, first out, a whole gang of one type at once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ...mechanisms.cluster.layout import Layout
from ...mechanisms.cluster.pool import Pool
from ...schema.errors import ProblemError
from ...schema.jobs import Job
from ..cluster.failures import FailureOptions
from ..outcomes import Simulation
from .events import Counts, Entry, EventCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalOptions:
    """``heterogeneous`` jobs may mix types; ``homogeneous`` ones keep to the type they start on.

    ``takes`` lets jobs take devices from each other. ``serving`` lists (from time, devices by
    type that serving jobs hold from then on), in order. ``measured`` is the part of the estimated
    rate that a job really reaches on its devices; where an increment turns out slower than
    before, the job falls back and does not ask again for it. ``resize_seconds`` stop a job whenever
    its devices change, ``restart_seconds`` (None: as many) one that gets devices again after it had
    none. ``failures`` of devices: the job that
    a device costs least yields one, a gang of ``yarn`` starts again from where it was.
    Spans name devices on the servers of ``layout``; None: those of ``failures``, else a flat pool.
    """

    scheduler: Literal["heterogeneous", "homogeneous", "yarn"] = "heterogeneous"
    top: int = 3
    takes: bool = False
    resize_seconds: float = 0.0
    restart_seconds: float | None = None
    serving: tuple[tuple[float, Counts], ...] = ()
    measured: Callable[[Job, Counts], float] | None = None
    failures: FailureOptions | None = None
    layout: Layout | None = None
    records_spans: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """More devices of one type for a job; ``gain`` is its speed-up per device."""

    gain: float
    kind: int
    number: int


def simulate_proposals(
    jobs: Iterable[Job],
    pool: Pool,
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
    def __init__(self, jobs: Iterable[Job], pool: Pool, options: ProposalOptions) -> None:
        gangs = options.scheduler == "yarn"
        super().__init__(
            jobs, pool, options.resize_seconds, options.failures,
            gangs=gangs, restart_seconds=options.restart_seconds, layout=options.layout,
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
        if self.options.scheduler == "yarn":
            self._admit()
            return
        self._yield_what_is_lacking()
        while self._accept_best():
            pass
        if self.options.takes:
            while self._take_one():
                pass

    def _admit(self) -> None:
        """FIFO, gang-scheduled: the head waits for all its devices of one type."""
        free = self.free()
        while self.waiting:
            entry = self.waiting[0]
            need, rate = entry.job.scale_factor, self.pool.rate(entry.job)
            fits = [kind for kind, left in enumerate(free) if left >= need and rate[kind] > 0]
            if not fits:
                return
            best = max(fits, key=lambda kind: (rate[kind], -kind))
            self.running.append(self.waiting.pop(0))
            self.resize(entry, tuple(need if kind == best else 0 for kind in range(len(free))))
            free[best] -= need

    def _yield_what_is_lacking(self) -> None:
        for kind, lacking in enumerate(self.free()):
            for _ in range(-lacking):
                holders = [entry for entry in self.running if entry.counts[kind]]
                victim = min(holders, key=lambda entry: self._loss(entry, kind))
                self.resize(victim, _plus(victim.counts, kind, -1))
        idle = [entry for entry in self.running if not entry.devices]
        self.running = [entry for entry in self.running if entry.devices]
        self.waiting = sorted([*idle, *self.waiting], key=lambda e: e.job.arrival_seconds)

    def _loss(self, entry: Entry, kind: int) -> float:
        after = self._estimate(entry, _plus(entry.counts, kind, -1))
        return (self._estimate(entry, entry.counts) - after) / self._full(entry)

    def _full(self, entry: Entry) -> float:
        return max(self.pool.rate_per_device(entry.job))

    def _accept_best(self) -> bool:
        """Accept the best proposal of all jobs; False where there is none."""
        free = self.free()
        entries = [*self.running, *self.waiting]
        offers = [(p, entry) for entry in entries for p in self.proposals(entry, free)]
        if not offers:
            return False
        proposal, entry = max(
            offers,
            key=lambda offer: (offer[0].gain, offer[0].number, -offer[1].job.arrival_seconds),
        )
        before, rate = entry.counts, entry.rate
        counts = _plus(before, proposal.kind, proposal.number)
        if self.rate_of(entry, counts) < rate:
            self.refused.setdefault(entry.job.id, set()).add(counts)  # slower: fall back
            return True
        if entry in self.waiting:
            self.waiting.remove(entry)
            self.running.append(entry)
        self.resize(entry, counts)
        return True

    def _take_one(self) -> bool:
        """Let the device change hands that gains most; False where none gains."""
        best: tuple[float, int, Entry, Entry] | None = None
        for kind in range(len(self.none)):
            givers = sorted(
                (self._kept(entry, kind), i, entry)
                for i, entry in enumerate(self.running)
                if entry.counts[kind] and entry.devices > 1
            )
            if not givers:
                continue
            for taker in [*self.running, *self.waiting[:1]]:
                giver = next((one for one in reversed(givers) if one[2] is not taker), None)
                if giver is None:
                    continue
                gain = self._gain(taker, kind) * giver[0]
                if gain > 1 + 1e-9 and (best is None or gain > best[0]):
                    best = gain, kind, taker, giver[2]
        if best is None:
            return False
        _, kind, taker, giver_ = best
        self.resize(giver_, _plus(giver_.counts, kind, -1))
        if not taker.devices:
            self.waiting.remove(taker)
            self.running.append(taker)
        self.resize(taker, _plus(taker.counts, kind, 1))
        return True

    def _kept(self, entry: Entry, kind: int) -> float:
        """The part of its rate that a job keeps without one of its devices."""
        now = self._estimate(entry, entry.counts)
        return self._estimate(entry, _plus(entry.counts, kind, -1)) / now if now else 1.0

    def _gain(self, entry: Entry, kind: int) -> float:
        """The factor by which one more device speeds a job up; infinite where it holds none."""
        fixed = self.options.scheduler == "homogeneous" and entry.devices
        counts = _plus(entry.counts, kind, 1)
        if (fixed and not entry.counts[kind]) or entry.devices >= entry.job.scale_factor:
            return 0.0
        if counts in self.refused.get(entry.job.id, set()):
            return 0.0
        now, then = self._estimate(entry, entry.counts), self._estimate(entry, counts)
        if not now:
            return float("inf") if then else 0.0
        return then / now

    def proposals(self, entry: Entry, free: list[int]) -> list[Proposal]:
        """The job's top increments by speed-up per device, as far as devices are free."""
        max_p, now = entry.job.scale_factor, self._estimate(entry, entry.counts)
        refused = self.refused.get(entry.job.id, set())
        found = []
        for kind, left in enumerate(free):
            fixed = self.options.scheduler == "homogeneous" and entry.devices
            if fixed and not entry.counts[kind]:
                continue
            for number in range(1, min(left, max_p - entry.devices) + 1):
                counts = _plus(entry.counts, kind, number)
                gain = (self._estimate(entry, counts) - now) / self._full(entry) / number
                if gain > 1e-12 and counts not in refused:
                    found.append(Proposal(gain=gain, kind=kind, number=number))
        found.sort(key=lambda p: (-p.gain, -p.number, p.kind))
        return found[: self.options.top]


def _plus(counts: Counts, kind: int, number: int) -> Counts:
    return tuple(n + number if k == kind else n for k, n in enumerate(counts))
