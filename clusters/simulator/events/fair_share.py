"""Elastic weighted fair sharing, and static priority beside it, in virtual time (VirtualFlow 6.4).

Event driven: jobs change devices when one arrives or finishes. One device type. A job's rate on
n of the d devices it asks for is its full rate times n / d: its virtual nodes are redistributed
and each device runs more of them in turn (``efficiency`` can say otherwise). Who gets what is
decided by ``mechanisms.fair_share``; the queue is ordered by weight, then arrival.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ....schema.errors import ProblemError
from ....schema.jobs import Job
from ...mechanisms.cluster.pool import ClusterPool
from ...mechanisms.cluster.seats import DeviceLayout
from ...mechanisms.fair_share import Claim, admit_whole, share_elastically
from ..failures import FailureOptions
from ..metrics import Simulation
from .events import Counts, Entry, EventCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShareOptions:
    """``elastic`` is algorithm 1; under ``static_priority`` no job is resized or overtaken.

    ``resize_seconds`` stop a job whenever it is resized, ``restart_seconds`` (None: as many) one
    that gets devices again after it had none. ``efficiency`` maps (devices, demand)
    to the part of the full rate. ``failures`` of devices: an elastic job goes on with fewer, any
    other starts again, once it has all its devices, from where it was. Spans name devices on the
    servers of ``layout``; None: those of ``failures``, else a flat pool.
    """

    scheduler: Literal["elastic", "static_priority"] = "elastic"
    resize_seconds: float = 0.0
    restart_seconds: float | None = None
    efficiency: Callable[[int, int], float] = field(default=lambda n, demand: n / demand)
    failures: FailureOptions | None = None
    layout: DeviceLayout | None = None
    records_spans: bool = True


def simulate_fair_share(
    jobs: Iterable[Job],
    pool: ClusterPool,
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


class _FairShare(EventCluster):
    def __init__(self, jobs: Iterable[Job], pool: ClusterPool, options: FairShareOptions) -> None:
        gangs = options.scheduler == "static_priority"
        super().__init__(
            jobs, pool, options.resize_seconds, options.failures,
            gangs=gangs, restart_seconds=options.restart_seconds, layout=options.layout,
            records_spans=options.records_spans,
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
