"""The requests for throughputs of jobs, and for an allocation of devices by them."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from ..choices import Placement
from ..options import Option

if TYPE_CHECKING:
    from .kinds import (
        Bytes,
        Count,
        Dollars,
        JobsTable,
        Mapping,
        Markets,
        Pool,
        PositiveSeconds,
        Profiles,
        Sequence,
        ThroughputsTable,
    )

POLICIES = Option(
    names="policies",
    metavar="NAME",
    help="las, las_weighted, las_water_filling, hierarchical, makespan, makespan_budget, "
    "finish_time_fairness, fifo, static_priority, sjf, max_throughput, max_normalised_throughput, "
    "min_cost, min_cost_slo, min_cost_ratio, min_cost_ratio_slo, min_cost_per_job, "
    "min_cost_per_job_slo, min_dollars_slo or a plug-in's.",
)
POOL = Option(
    help="The pool: 2xV100,8xP100, V100:2:16GB, 4x(4xV100).",
    python='Also ``{"V100": 2, "P100": 8}``, a ``Cluster``, or the ``Path`` of a cluster\'s file.',
)
MARKET = Option(
    rare=True,
    help="Prices of the devices, in any form that `hetflow rent` takes (may be repeated); the "
    "cheapest of each type counts.",
    python="Also ``Market`` records.",
)
AT = Option(
    rare=True,
    help="Time of those prices, as 2020-03-07T00:00:00Z.",
    default="the market's last prices",
)


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
    throughputs: Annotated[
        "ThroughputsTable",
        Option(
            help="Throughputs (hetflow.throughputs/1, .csv, or Gavel's table).",
            python="Also ``Throughputs``, or a DataFrame with the CSV file's columns.",
        ),
    ]
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
