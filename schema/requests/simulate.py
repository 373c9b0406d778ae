"""The requests about the jobs of a cluster: throughputs, an allocation, a simulation, a sweep."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from ..options import Option, Placement
from . import AT, MARKET, POLICIES, POOL

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import (
        Bytes,
        Callable,
        Count,
        Dollars,
        Index,
        JobCount,
        JobsTable,
        Mapping,
        Markets,
        Pool,
        PositiveSeconds,
        Profiles,
        Sequence,
        ThroughputsTable,
    )


THROUGHPUTS = Option(
    help="Throughputs (hetflow.throughputs/1, .csv, or Gavel's table).",
    python="Also ``Throughputs``, or a DataFrame with the CSV file's columns.",
)

# The requests for throughputs of jobs, and for an allocation of devices by them.


@dataclass(frozen=True, slots=True)
class ThroughputsRequest:
    """What ``throughputs`` needs to know."""

    profiles: Annotated[
        "Profiles",
        Option(
            argument=True,
            help="Folder of profiles (hetflow profile -o).",
            python="Also ``Profile`` records, of one or more models.",
        ),
    ]
    _: KW_ONLY
    batch_size: Annotated[
        "Count | Mapping[str, Count]",
        Option(help="Samples of a job's step: one number, or resnet50=256,gpt=64 by model."),
    ]
    scale_factors: Annotated[
        "Sequence[Count]", Option(help="Numbers of devices that jobs ask for, such as 1,2,4.")
    ] = (1,)
    mixes: Annotated[bool, Option(help="Add jobs that hold several device types at once.")] = False
    memory_reserve_bytes: Annotated[
        "Bytes",
        Option(
            flag="--memory-reserve",
            help="Memory of each device to leave free, such as 2GiB, as for solve.",
        ),
    ] = 0


@dataclass(frozen=True, slots=True)
class AllocateRequest:
    """What ``allocate`` needs to know."""

    jobs: Annotated[
        "JobsTable",
        Option(
            argument=True,
            help="Jobs: hetflow.jobs/1, .csv, or a Gavel .trace.",
            python="Also ``Jobs``, or a DataFrame with the CSV file's columns.",
        ),
    ]
    throughputs: Annotated["ThroughputsTable", THROUGHPUTS]
    pool: Annotated["Pool", POOL]
    _: KW_ONLY
    policy: Annotated[str, POLICIES] = "las"
    space_sharing: Annotated[bool, Option(help="Let pairs of jobs share devices.")] = False
    agnostic: Annotated[bool, Option(help="Ignore what device types differ in.")] = False
    placement: Annotated[
        Placement,
        Option(
            help="Which throughputs of jobs with several devices count: with the devices on one "
            "server, on several, or both (mixed; servers as in 9x(4xv100) hold as many "
            "consolidated jobs as they can)."
        ),
    ] = "consolidated"
    budget_dollars: Annotated[
        "Dollars | None", Option(flag="--budget", help="Dollars, for {policy=makespan_budget}.")
    ] = None
    fill: Annotated[
        bool,
        Option(
            help="Share out what a max-min policy's optimum leaves idle, lexicographically, or "
            "keep to the bare optimum of the thesis.",
            default="share it out",
        ),
    ] = True
    time_limit_seconds: Annotated[
        "PositiveSeconds | None",
        Option(
            flag="--time-limit",
            help="Wall seconds, before the check: the best that is proved by then. What is not "
            "optimal ends with exit code 4.",
        ),
    ] = None
    market: Annotated["Markets | None", MARKET] = None
    at: Annotated[str | None, AT] = None


TRACE = Option(
    argument=True,
    help="Jobs (hetflow.jobs/1, .csv), a Gavel .trace, Philly's cluster_job_log, or a kind to "
    "draw: continuous-single, continuous-multiple, static-single, static-multiple.",
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What both need to know; the defaults are those of a case of the simulator."""

    trace: Annotated["JobsTable", TRACE]
    throughputs: Annotated["ThroughputsTable", THROUGHPUTS]
    pool: Annotated["Pool", replace(POOL, help="The pool, e.g. 36xv100,36xp100.")]
    _: KW_ONLY
    policy: Annotated[
        str,
        replace(
            POLICIES,
            metavar="",
            help="As of `hetflow allocate`, or fifo_greedy, fifo_any_type, allox, gandiva; in "
            "rounds.",
        ),
    ] = "las"
    scheduler: Annotated[
        str | None,
        Option(
            names="schedulers",
            help="rounds, published-rounds, elastic, static-priority, easyscale, "
            "easyscale-taking, easyscale-homogeneous, yarn, or market with {market}.",
            default="rounds",
        ),
    ] = None
    agnostic: Annotated[bool, Option(help="Ignore what device types differ in.")] = False
    space_sharing: Annotated[bool, Option(help="Let pairs of jobs share devices, in rounds.")] = (
        False
    )
    placement: Annotated[
        Literal["consolidated", "mixed"],
        Option(help="mixed: policies weigh spread devices too; needs servers."),
    ] = "consolidated"
    optimum: Annotated[
        Literal["vertex", "centre"],
        Option(help="Which of LAS's optima: a simplex vertex (fast) or the centre."),
    ] = "vertex"
    seed: Annotated["Index", Option(help="Seed of all random draws.")] = 0
    num_jobs: Annotated["JobCount", Option(help="Number of jobs in a drawn trace.")] = 1000
    window: Annotated[
        "tuple[Index, Index] | None",
        Option(help="Average over jobs FROM:TO of the trace, e.g. 4000:5000."),
    ] = None
    round_seconds: Annotated[float, Option(help="Length of a round, in seconds.")] = 360.0
    restart_seconds: Annotated[
        float, Option(help="Seconds that a job loses when it starts or restarts.")
    ] = 0.0
    resize_seconds: Annotated[
        float | None,
        Option(
            help="Seconds that a job loses when it goes over to other devices of its server.",
            default="{restart_seconds}",
        ),
    ] = None
    early_rounds: Annotated[
        bool, Option(help="A round ends when no job holds a device any more, as on a live cluster.")
    ] = False
    failure_seconds: Annotated[
        float | None, Option(unit="hours", help="Mean time between failures of a device.")
    ] = None
    server_failure_seconds: Annotated[
        float | None, Option(unit="hours", help="Mean time between failures of a whole server.")
    ] = None
    repair_seconds: Annotated[
        float, Option(unit="hours", help="Time until a failed device or server works again.")
    ] = 3600.0
    market: Annotated[
        "Markets | None",
        Option(
            help="Jobs rent machines of this market (hetflow.market/1), the pool is their quota; "
            "may be repeated.",
            python="Also ``Market`` records.",
        ),
    ] = None
    start: Annotated[
        str | None,
        Option(help="Market: second 0, as 2020-03-07T00:00:00Z; else once all is known."),
    ] = None
    preemption_seconds: Annotated[
        float | None,
        Option(
            unit="hours", help="Market: mean time until a spot machine is taken away, at random."
        ),
    ] = None
    checkpoint_seconds: Annotated[
        float,
        Option(help="Market: between checkpoints; 0: written when a machine is announced to go."),
    ] = 0.0
    cloud_move_dollars: Annotated[
        float, Option(help="Market: egress of a move between clouds.")
    ] = 0.0
    rent_policy: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Market: the policy of `hetflow rent` for jobs with a deadline: on_demand, "
            "greedy, time_sliced or uniform_progress.",
            default="the cheapest way to end in time at today's prices",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SimulateRequest(Simulated):
    """What ``simulate`` needs to know."""

    _: KW_ONLY
    jobs_per_hour: Annotated[
        float | None, Option(flag="--loads", help="Jobs per hour of a drawn trace.")
    ] = None
    with_jobs: Annotated[bool, Option(help="Whether to keep the outcome of every job.")] = True
    with_spans: Annotated[
        bool, Option(help="Whether to keep which job held which devices when; takes longer.")
    ] = False
    progress: Annotated[
        "Callable[[int, float], None] | None",
        Option(help="Called with the number of completed jobs and the virtual seconds."),
    ] = None


@dataclass(frozen=True, slots=True)
class SweepRequest(Simulated):
    """What ``sweep`` needs to know."""

    trace: Annotated[str, TRACE]
    _: KW_ONLY
    seeds: Annotated[
        "Count", Option(help="Number of traces to draw, with seeds from {seed} on.")
    ] = 1
    loads: Annotated[
        "Sequence[float]", Option(help="Jobs per hour of drawn traces, e.g. 2,4,5.6.")
    ] = ()
    processes: Annotated["Count", Option(help="Number of processes that share a sweep.")] = 1


@dataclass(frozen=True, slots=True)
class SweepCommandRequest(SweepRequest):
    """What the command ``simulate`` needs to know: it also draws a run, and writes tables."""

    _: KW_ONLY
    plot: Annotated[
        "Path | None",
        Option(help="Draw which job held each device, and the CDF of JCT (.png, .svg)."),
    ] = None
    csv: Annotated[
        "Path | None",
        Option(help="Write a table here: one row for each job, or for each run of a sweep."),
    ] = None
