"""What a simulation leaves behind: one line a job, and totals of the pool."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """What became of one job.

    ``isolated_seconds`` is its duration on 1/n of the cluster, n the jobs present when it
    arrived (thesis 5.4.2). ``dollars`` is None where prices are unknown, ``slo_seconds`` None
    where the job has none.
    """

    id: str
    model: str
    scale_factor: int
    priority_weight: float
    arrival_seconds: float
    start_seconds: float
    finish_seconds: float
    device_seconds: float
    isolated_seconds: float
    slo_seconds: float | None = None
    dollars: float | None = None
    num_restarts: int = 0

    @property
    def completion_seconds(self) -> float:
        """JCT: from arrival to finish."""
        return self.finish_seconds - self.arrival_seconds

    @property
    def queueing_seconds(self) -> float:
        """From arrival to the first step."""
        return self.start_seconds - self.arrival_seconds

    @property
    def finish_time_fairness(self) -> float:
        """rho: completion time over the completion time on 1/n of the cluster."""
        return self.completion_seconds / self.isolated_seconds

    @property
    def violates_slo(self) -> bool:
        """Whether it finished later than its SLO allows."""
        return self.slo_seconds is not None and self.completion_seconds > self.slo_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time for which a job held ``num_devices`` devices of a type."""

    job: str
    device_type: str
    num_devices: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of every job in order of completion, and what the pool did.

    ``busy_seconds`` are device-seconds of work by type, from 0 to ``end_seconds``.
    """

    jobs: tuple[JobOutcome, ...]
    num_devices: dict[str, int]
    busy_seconds: dict[str, float]
    end_seconds: float
    num_rounds: int = 0
    num_allocations: int = 0
    num_failures: int = 0
    spans: tuple[Span, ...] = field(default=())
