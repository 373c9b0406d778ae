"""The result of a simulated cluster: outcomes of jobs, spans of devices, and figures."""

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from .errors import HetflowError
from .frames import frame_of
from .records import (
    Count,
    Dollars,
    Index,
    Name,
    NonNegative,
    PositiveSeconds,
    Seconds,
    record,
    register_keys,
)

if TYPE_CHECKING:
    from pandas import DataFrame

_DERIVED = ("completion_seconds", "queueing_seconds", "finish_time_fairness", "violates_slo")


@record
class JobOutcome:
    """What became of one job.

    ``isolated_seconds`` is its duration on 1/n of the cluster, n the jobs present when it
    arrived (thesis 5.4.2). ``dollars`` is None where prices are unknown, ``slo_seconds`` None
    where the job has none. ``slo_given_up`` says that the policy dropped the SLO while the job
    was there, because not all could be met. On a market ``num_restarts`` are ``num_moves``, which
    the job chose, and launches after one of ``num_preemptions``; None elsewhere.
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
    dollars: Dollars | None = None
    num_restarts: Index = 0
    slo_given_up: bool = False
    num_moves: Index | None = None
    num_preemptions: Index | None = None

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

    ``shared_with`` is the job on the same devices, None where it is alone. ``devices`` names them:
    ``server2/V100:1`` is device 1 of the V100s of the third server, ``V100:5`` the sixth of a flat
    pool; files of earlier versions name none.
    """

    job: Name
    device_type: Name
    num_devices: Count
    start_seconds: Seconds
    end_seconds: Seconds
    shared_with: Name | None = None
    devices: tuple[Name, ...] = ()


@record
class SimulationMetrics:
    """The figures that the papers report; dollars are None where prices are unknown.

    Of a run without jobs all are 0. ``num_moves`` and ``num_preemptions`` are of runs on a market.
    """

    num_jobs: Index
    average_jct_seconds: Seconds
    median_jct_seconds: Seconds
    p99_jct_seconds: Seconds
    max_jct_seconds: Seconds
    makespan_seconds: Seconds
    utilisation: NonNegative
    average_queueing_seconds: Seconds
    median_queueing_seconds: Seconds
    average_finish_time_fairness: NonNegative
    max_finish_time_fairness: NonNegative
    dollars: Dollars | None
    num_slos: Index
    num_slo_violations: Index
    num_restarts: Index
    num_slos_given_up: Index = 0
    num_moves: Index | None = None
    num_preemptions: Index | None = None


@record
class SimulationRun:
    """One simulated run: what was asked, the figures, and every job where it was asked for.

    ``left_out`` says of each job that fits nowhere in the pool why. ``num_failures`` counts devices
    that failed one at a time, ``num_server_failures`` servers with all of theirs. ``market_start``
    is the UTC time of second 0 of a run on a market; None elsewhere.
    """

    schema: Literal["hetflow.simulation/1"] = "hetflow.simulation/1"
    trace: Name
    scheduler: Name
    policy: Name | None
    heterogeneity: Literal["aware", "agnostic"] = "aware"
    space_sharing: bool = False
    num_devices: dict[str, Count]
    seed: int
    jobs_per_hour: NonNegative | None = None
    num_rounds: Index
    num_allocations: Index
    num_failures: Index = 0
    num_server_failures: Index = 0
    market_start: Name | None = None
    left_out: dict[Name, str] = Field(default_factory=dict)
    metrics: SimulationMetrics
    jobs: tuple[JobOutcome, ...] = ()
    spans: tuple[Span, ...] = ()
    provenance: dict[str, Any] | None = None

    def to_frame(self) -> "DataFrame":
        """One row for each job, in the order of ``jobs``.

        Columns are the keys of an outcome, then ``completion_seconds``, ``queueing_seconds``,
        ``finish_time_fairness`` and ``violates_slo``.

        Raises:
            HetflowError: pandas is not installed, or the run was kept without its jobs.
        """
        if self.metrics.num_jobs and not self.jobs:
            raise HetflowError(
                f"this run of {self.metrics.num_jobs} jobs was kept without them",
                hint="simulate with -o FILE or --csv FILE (in Python: with_jobs=True)",
            )
        columns = [*(field.name for field in fields(JobOutcome)), *_DERIVED]
        rows = ({name: getattr(job, name) for name in columns} for job in self.jobs)
        return frame_of(rows, columns)


register_keys(JobOutcome, Span, SimulationMetrics, SimulationRun)


def frame_of_runs(runs: Iterable[SimulationRun]) -> "DataFrame":
    """One row for each run of a sweep: its seed, load and mechanism, then its metrics.

    Raises:
        HetflowError: pandas is not installed.
    """
    asked = ("seed", "jobs_per_hour", "scheduler", "policy", "trace")
    metrics = [field.name for field in fields(SimulationMetrics)]
    rows = (
        {name: getattr(run, name) for name in asked}
        | {name: getattr(run.metrics, name) for name in metrics}
        for run in runs
    )
    return frame_of(rows, [*asked, *metrics])
