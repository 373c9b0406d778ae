"""What the papers report of a run: completion times, makespan, utilisation, fairness, cost."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...schema.errors import ProblemError
from ...schema.simulation import JobOutcome, SimulationMetrics, Span
from ..mechanisms.seats import (
    Device,
    DeviceLayout,
    Placement,
    Seat,
    Sizes,
    device_name,
    devices_down,
    seat,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of every job in order of completion, and what the pool did.

    ``busy_seconds`` are device-seconds of work by type, from 0 to ``end_seconds``. ``left_out``
    says of each job that fits nowhere in the pool why.
    """

    jobs: tuple[JobOutcome, ...]
    num_devices: dict[str, int]
    busy_seconds: dict[str, float]
    end_seconds: float
    num_rounds: int = 0
    num_allocations: int = 0
    num_failures: int = 0
    num_server_failures: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    spans: tuple[Span, ...] = field(default=())


_NOTHING = SimulationMetrics(
    num_jobs=0, average_jct_seconds=0.0, median_jct_seconds=0.0, p99_jct_seconds=0.0,
    max_jct_seconds=0.0, makespan_seconds=0.0, utilisation=0.0, average_queueing_seconds=0.0,
    median_queueing_seconds=0.0, average_finish_time_fairness=0.0, max_finish_time_fairness=0.0,
    dollars=None, num_slos=0, num_slo_violations=0, num_restarts=0,
)  # fmt: skip


def summarise(run: Simulation, jobs: Sequence[JobOutcome] | None = None) -> SimulationMetrics:
    """Summarise a run.

    Args:
        run: The run; makespan and utilisation are its own.
        jobs: The jobs to average over (a steady-state window), all by default.

    Raises:
        ProblemError: There is no job to average over, though some ran.
    """
    jobs = run.jobs if jobs is None else jobs
    if not run.jobs:
        return _NOTHING
    if not jobs:
        raise ProblemError("no job finished within the window; widen it")
    times = sorted(job.completion_seconds for job in jobs)
    waits = sorted(job.queueing_seconds for job in jobs)
    unfair = [job.finish_time_fairness for job in jobs]
    costs = [job.dollars for job in jobs if job.dollars is not None]
    return SimulationMetrics(
        num_jobs=len(jobs),
        average_jct_seconds=_mean(times),
        median_jct_seconds=percentile(times, 50),
        p99_jct_seconds=percentile(times, 99),
        max_jct_seconds=times[-1],
        makespan_seconds=run.end_seconds,
        utilisation=utilisation(run),
        average_queueing_seconds=_mean(waits),
        median_queueing_seconds=percentile(waits, 50),
        average_finish_time_fairness=_mean(unfair),
        max_finish_time_fairness=max(unfair),
        dollars=math.fsum(costs) if len(costs) == len(jobs) else None,
        num_slos=sum(job.slo_seconds is not None for job in jobs),
        num_slo_violations=sum(job.violates_slo for job in jobs),
        num_restarts=sum(job.num_restarts for job in jobs),
        num_slos_given_up=sum(job.slo_given_up for job in jobs),
        num_moves=_total([job.num_moves for job in jobs]),
        num_preemptions=_total([job.num_preemptions for job in jobs]),
    )


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def utilisation(run: Simulation) -> float:
    """Busy device-seconds over all device-seconds until the last job finished."""
    total = sum(run.num_devices.values()) * run.end_seconds
    return math.fsum(run.busy_seconds.values()) / total if total > 0 else 0.0


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, interpolated linearly between neighbours."""
    place = (len(ordered) - 1) * percent / 100.0
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(slots=True)
class _Open:
    """A span that the next stretch may lengthen."""

    job: str
    kind: int
    devices: Seat
    shared_with: str | None
    start_seconds: float
    end_seconds: float
    stretch: int  # number of the last one


class SpanBook:
    """Collects the spans of a run, stretch by stretch (a round, or the time between events)."""

    def __init__(
        self, types: Sequence[str], num_devices: Sequence[int], layout: DeviceLayout | None
    ):
        """Start with no spans."""
        self._types, self._layout = types, layout
        self._sizes: Sizes = [[n] for n in num_devices] if layout is None else layout.sizes
        self._held: dict[str, Seat] = {}
        self._down: list[Device] = []
        self._struck: set[str] = set()
        self._all: list[_Open] = []
        self._last: dict[tuple[str, int], _Open] = {}
        self._names: dict[Seat, tuple[str, ...]] = {}
        self._stretch = 0

    def hold(
        self,
        placements: Sequence[Placement],
        start_seconds: float,
        ends: Sequence[Sequence[float]],
        standing: Sizes | None = None,
    ) -> None:
        """Note a stretch of time.

        ``ends`` [placements][jobs] is when each job lets go, in seconds; ``standing``
        [types][servers] what works.
        """
        self._stretch += 1
        if standing is not None:
            self._see(standing, placements)
        seats = seat(self._sizes, placements, self._held, frozenset(self._down))
        self._held = {}
        for placement, devices, until in zip(placements, seats, ends, strict=True):
            for place, (job, end) in enumerate(zip(placement.jobs, until, strict=True)):
                self._held[job] = devices
                others = placement.jobs[:place] + placement.jobs[place + 1 :]
                partner = others[0] if others else None
                for kind, _ in placement.counts:
                    own = tuple(device for device in devices if device[0] == kind)
                    self._note(job, kind, own, partner, start_seconds, end)

    def strike(self, jobs: Iterable[str]) -> None:
        """A failure hit these in, or at the end of, the last stretch."""
        self._struck.update(jobs)

    def spans(self) -> tuple[Span, ...]:
        """All of them, by their start."""
        return tuple(
            Span(
                job=one.job,
                device_type=self._types[one.kind],
                num_devices=len(one.devices),
                start_seconds=one.start_seconds,
                end_seconds=one.end_seconds,
                shared_with=one.shared_with,
                devices=self._named(one.devices),
            )
            for one in self._all
        )

    def _see(self, standing: Sizes, placements: Sequence[Placement]) -> None:
        stay = {job for one in placements for job in one.jobs} - self._struck
        struck = [d for job in sorted(self._struck) for d in self._held.get(job, ())]
        held = {device for job in stay for device in self._held.get(job, ())}
        self._down = devices_down(self._sizes, standing, self._down, struck, held)
        self._struck.clear()

    def _note(
        self, job: str, kind: int, devices: Seat, partner: str | None, start: float, end: float
    ) -> None:
        last = self._last.get((job, kind))
        if (
            last is not None
            and last.stretch == self._stretch - 1
            and (last.devices, last.shared_with) == (devices, partner)
        ):
            last.end_seconds, last.stretch = end, self._stretch
            return
        new = _Open(job, kind, devices, partner, start, end, self._stretch)
        self._last[job, kind] = new
        self._all.append(new)

    def _named(self, devices: Seat) -> tuple[str, ...]:
        if devices not in self._names:
            self._names[devices] = tuple(
                device_name(self._types, self._layout, device) for device in devices
            )
        return self._names[devices]
