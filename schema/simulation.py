"""Results of a simulated cluster: outcomes of jobs, use of devices, and metrics."""

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from .errors import HetflowError
from .frames import Rows, Shown, fields_table, frame_of, listed
from .options import option
from .records import Count, Dollars, Index, Name, NonNegative, PositiveSeconds, Seconds, record

if TYPE_CHECKING:
    from pandas import DataFrame

_DERIVED = ("completion_seconds", "queueing_seconds", "finish_time_fairness", "violates_slo")


@record
class JobOutcome:
    """The outcome of one job.

    ``isolated_seconds`` is its duration on 1/n of the cluster, for n jobs present at its arrival
    (thesis 5.4.2). ``dollars`` is None if prices are unknown, and ``slo_seconds`` if the job has no
    SLO. ``slo_given_up`` means that the policy dropped the job's SLO because not all SLOs could be
    met. On a market, ``num_restarts`` counts the job's own moves (``num_moves``) and the launches
    after preemptions (``num_preemptions``); elsewhere the latter two are None.
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
        """JCT: seconds from arrival to finish."""
        return self.finish_seconds - self.arrival_seconds

    @property
    def queueing_seconds(self) -> float:
        """Seconds from arrival to the first step."""
        return self.start_seconds - self.arrival_seconds

    @property
    def finish_time_fairness(self) -> float:
        """rho: completion time / completion time on 1/n of the cluster (thesis 5.4.2)."""
        return self.completion_seconds / self.isolated_seconds

    @property
    def violates_slo(self) -> bool:
        """Whether it finished later than its SLO allows."""
        return self.slo_seconds is not None and self.completion_seconds > self.slo_seconds


@record
class Span:
    """An interval of time in which a job held ``num_devices`` devices of a type.

    ``shared_with`` is the other job on the same devices, or None. ``devices`` names the devices,
    counted from 0: ``server2/V100:1`` is the second V100 of the third server, ``V100:5`` the sixth
    V100 of a flat pool. It is empty in files of earlier versions.
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
    """The metrics that the papers report; dollars are None if prices are unknown.

    All are 0 for a run without jobs. ``num_moves`` and ``num_preemptions`` are for runs on a
    market.
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
class SimulationRun(Shown):
    """One simulated run: its options, its metrics and, if requested, every job.

    ``left_out`` maps each job that does not fit the pool to the reason. ``num_failures`` counts
    failures of single devices, ``num_server_failures`` those of whole servers. ``market_start`` is
    the UTC time of second 0 of a run on a market; None elsewhere.

    Example:
        >>> import hetflow
        >>> jobs = hetflow.Jobs(jobs=(hetflow.Job(id="a", model="m", steps=7200),))
        >>> rates = hetflow.ModelThroughput(model="m", steps_per_second={"V100": 2})
        >>> run = hetflow.simulate(jobs, hetflow.Throughputs(models=(rates,)), "V100")
        >>> run.policy, run.num_rounds
        ('las', 10)
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

    @property
    def title(self) -> str:
        """The trace, the pool, who decided, and the jobs' mean time."""
        of = self.scheduler if self.policy is None else f"{self.policy} by {self.scheduler}"
        hours = self.metrics.average_jct_seconds / 3600
        return (
            f"{self.trace} on {listed(self.num_devices)}, {of}: {self.metrics.num_jobs} jobs, "
            f"{hours:.4g} h each on average"
        )

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each job, in the order of ``jobs``.

        Columns are the keys of an outcome, then ``completion_seconds``, ``queueing_seconds``,
        ``finish_time_fairness`` and ``violates_slo``.

        Raises:
            HetflowError: The run was kept without its jobs.
        """
        if self.metrics.num_jobs and not self.jobs:
            raise HetflowError(
                f"this run of {self.metrics.num_jobs} jobs was kept without them",
                hint=f"simulate it again with its jobs ({option('csv', 'FILE')})",
            )
        return fields_table(self.jobs, JobOutcome, also=_DERIVED)


def frame_of_runs(runs: Iterable[SimulationRun]) -> "DataFrame":
    """Build a pandas table with one row per run: its seed, load and mechanism, then its metrics.

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
