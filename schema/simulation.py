"""What a simulated cluster did: one outcome a job, who held what, and the figures of the run."""

from typing import Any, Literal

from .records import Count, Index, Name, PositiveSeconds, Seconds, record, register_keys


@record
class JobOutcome:
    """What became of one job.

    ``isolated_seconds`` is its duration on 1/n of the cluster, n the jobs present when it
    arrived (thesis 5.4.2). ``dollars`` is None where prices are unknown, ``slo_seconds`` None
    where the job has none. ``slo_given_up`` says that the policy dropped the SLO while the job
    was there, because not all could be met.
    """

    id: Name
    model: Name
    scale_factor: Count
    priority_weight: float
    arrival_seconds: Seconds
    start_seconds: Seconds
    finish_seconds: Seconds
    device_seconds: Seconds
    isolated_seconds: PositiveSeconds
    slo_seconds: PositiveSeconds | None = None
    dollars: Seconds | None = None
    num_restarts: Index = 0
    slo_given_up: bool = False

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


@record
class Span:
    """A stretch of time for which a job held ``num_devices`` devices of a type.

    ``shared_with`` is the job on the same devices at its start, None where it is alone.
    """

    job: Name
    device_type: Name
    num_devices: Count
    start_seconds: Seconds
    end_seconds: Seconds
    shared_with: Name | None = None


@record
class SimulationMetrics:
    """The figures that the papers report; dollars are None where prices are unknown."""

    num_jobs: Count
    average_jct_seconds: Seconds
    median_jct_seconds: Seconds
    p99_jct_seconds: Seconds
    max_jct_seconds: Seconds
    makespan_seconds: Seconds
    utilisation: Seconds
    average_queueing_seconds: Seconds
    median_queueing_seconds: Seconds
    average_finish_time_fairness: Seconds
    max_finish_time_fairness: Seconds
    dollars: Seconds | None
    num_slos: Index
    num_slo_violations: Index
    num_restarts: Index
    num_slos_given_up: Index = 0


@record
class SimulationRun:
    """One simulated run: what was asked, the figures, and every job where it was asked for."""

    schema: Literal["hetflow.simulation/1"] = "hetflow.simulation/1"
    trace: Name
    scheduler: Name
    policy: Name | None
    heterogeneity: Literal["aware", "agnostic"] = "aware"
    space_sharing: bool = False
    num_devices: dict[str, Count]
    seed: int
    jobs_per_hour: Seconds | None = None
    num_rounds: Index
    num_allocations: Index
    num_failures: Index = 0
    metrics: SimulationMetrics
    jobs: tuple[JobOutcome, ...] = ()
    spans: tuple[Span, ...] = ()
    provenance: dict[str, Any] | None = None


register_keys(JobOutcome, Span, SimulationMetrics, SimulationRun)
