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

from ...mechanisms.cluster.layout import Layout
from ...mechanisms.cluster.pool import Pool
from ...schema.errors import ProblemError
from ...schema.jobs import Job
from ..cluster.failures import FailureOptions
from ..outcomes import Simulation
from .events import Counts, Entry, EventCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShareOptions:
    """``elastic`` is algorithm 1; ``static_priority`` never resizes and never lets pass.

    ``resize_seconds`` stop a job whenever it is resized. ``efficiency`` maps (devices, demand)
    to the part of the full rate. ``failures`` of devices: an elastic job goes on with fewer, any
    other starts again, once it has all its devices, from where it was. Spans name devices on the
    servers of ``layout``; None: those of ``failures``, else a flat pool.
    """

    scheduler: Literal["elastic", "static_priority"] = "elastic"
    resize_seconds: float = 0.0
    efficiency: Callable[[int, int], float] = field(default=lambda n, demand: n / demand)
    failures: FailureOptions | None = None
    layout: Layout | None = None
    records_spans: bool = True


def simulate_fair_share(
    jobs: Iterable[Job],
    pool: Pool,
    options: FairShareOptions | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run jobs to their end on one device type.

    ``on_progress`` is called with jobs done and virtual seconds.

    Raises:
        ProblemError: The pool has several types, or the trace makes no sense.
    """
    if len(pool.types) != 1:
        raise ProblemError(
            f"fair sharing runs on one device type, the pool has {', '.join(pool.types)}"
        )
    return _FairShare(jobs, pool, options or FairShareOptions()).run(on_progress)


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


class _FairShare(EventCluster):
    def __init__(self, jobs: Iterable[Job], pool: Pool, options: FairShareOptions) -> None:
        gangs = options.scheduler == "static_priority"
        super().__init__(
            jobs, pool, options.resize_seconds, options.failures,
            gangs=gangs, layout=options.layout, records_spans=options.records_spans,
        )  # fmt: skip
        self.options = options

    def rate_of(self, entry: Entry, counts: Counts) -> float:
        full = float(self.pool.rate(entry.job)[0])
        return full * self.options.efficiency(counts[0], entry.job.scale_factor)

    def schedule(self) -> None:
        self.waiting.sort(key=lambda e: (-e.job.priority_weight, e.job.arrival_seconds))
        if self.options.scheduler == "elastic":
            self._share()
        else:
            self._admit()

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
            self.resize(entry, (share,))

    def _shares(self, entries: list[Entry]) -> list[int]:
        weights = [entry.job.priority_weight for entry in entries]
        demands = [entry.job.scale_factor for entry in entries]
        return fair_shares(weights, demands, self.capacity()[0])

    def _admit(self) -> None:
        """Static priority: the highest priority first, whole; it waits where it does not fit."""
        free = self.free()[0]
        while self.waiting and self.waiting[0].job.scale_factor <= free:
            entry = self.waiting.pop(0)
            self.running.append(entry)
            self.resize(entry, (entry.job.scale_factor,))
            free -= entry.devices
