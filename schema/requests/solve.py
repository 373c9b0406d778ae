"""The requests for a plan, and to judge one or an allocation."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from ..options import (
    AnyObjective,
    AnyShard,
    CostModelName,
    Method,
    Option,
    Placement,
    StageCost,
    Strategy,
)
from ..schedule import DEFAULT_SCHEDULE
from . import AT, MARKET, POOL

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import (
        Allocation,
        Bytes,
        Count,
        Dollars,
        Fraction,
        JobsTable,
        Markets,
        OptimizerState,
        Plan,
        Pool,
        PositiveRate,
        PositiveSeconds,
        Profiles,
        ThroughputsTable,
    )

SPLITS = ("split", "milp", "waste", "sharded")
PIPELINES = ("pipeline", "repetitive", "stages")
ALL = (*SPLITS, *PIPELINES, "parallel")
SPLIT = "Options of splits"
PIPELINE = "Options of pipelines"
PARALLEL = "Options of pipeline, tensor and data parallelism together"

PROFILES = Option(help="Folder of profiles (hetflow profile).", python="Also ``Profile`` records.")
MODEL = Option(help="The model, where profiles hold several.")
OPTIMIZER = Option(
    read_by=ALL,
    help="The optimizer that will train: sgd, sgd-momentum, adam, adamw, ...",
    python="Also an ``OptimizerState``.",
    default="the profiles'",
)
MEMORY_RESERVE = Option(
    flag="--memory-reserve",
    read_by=ALL,
    help="Bytes of each device to leave free, such as 2GiB, besides what profiles measured beside "
    "tensors.",
)


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """What ``solve`` needs to know.

    ``stated`` names the options that were given: who gives one expects it to be read, also if it
    is given the value that it has anyway.
    """

    profiles: Annotated["Profiles", PROFILES]
    pool: Annotated["Pool", POOL]
    _: KW_ONLY
    batch_size: Annotated["Count", Option(help="Global batch: samples of a step over all devices.")]
    model: Annotated[str | None, MODEL] = None
    strategy: Annotated[
        Strategy,
        Option(help="Kind of plan; auto takes the fastest of the three if profiles hold layers."),
    ] = "auto"
    objective: Annotated[
        AnyObjective,
        Option(
            help="step_seconds: a whole step; waste: the speed that a split leaves unused "
            "(EasyScale 3.4); bottleneck: a pipeline's slowest stage (thesis 2.4.1), which "
            "schedules without flushes always take.",
            values={"waste": ("waste",), "bottleneck": ("pipeline",), "step_seconds": ALL},
            open_values=("step_seconds",),
        ),
    ] = "step_seconds"
    optimizer: Annotated["OptimizerState | str | None", OPTIMIZER] = None
    memory_reserve_bytes: Annotated["Bytes", MEMORY_RESERVE] = 0
    fastest: Annotated[
        bool,
        Option(
            read_by=("split", "pipeline"),
            narrows=False,
            rare=True,
            help="Take the fastest plan on paper, even if the measurements cannot tell a simpler "
            "one from it.",
        ),
    ] = False
    time_limit_seconds: Annotated[
        "PositiveSeconds | None",
        Option(
            flag="--time-limit",
            read_by=("milp", "pipeline", "stages", "parallel"),
            narrows=False,
            help="Wall seconds for all searches. A plan that is then not proved within {gap} ends "
            "with exit code 4.",
        ),
    ] = None
    gap: Annotated[
        "Fraction | None",
        Option(
            read_by=("pipeline", "stages", "parallel"),
            narrows=False,
            rare=True,
            help="Stop at a plan proved within this fraction of the best.",
            default="0 with {time_limit_seconds}",
        ),
    ] = None
    runs: Annotated[
        "Path | str | None",
        Option(
            rare=True,
            help="Folder of runs (hetflow launch). Those of the model first correct the profiles; "
            "with {cost_model=measured} they are the costs.",
        ),
    ] = None
    virtual_nodes: Annotated[
        "Count | None",
        Option(
            read_by=SPLITS,
            panel=SPLIT,
            help="Cut the batch B into N equal virtual nodes of B/N samples (maxP for waste).",
        ),
    ] = None
    interpolate: Annotated[
        bool,
        Option(
            read_by=SPLITS,
            panel=SPLIT,
            rare=True,
            help="Allow sizes between profiled ones; they are marked.",
        ),
    ] = False
    shard: Annotated[
        AnyShard,
        Option(
            read_by=("sharded", "stages", "parallel"),
            values={"none": ALL},
            open_values=("none",),
            panel=SPLIT,
            help="What devices share of the states, by their memory: the optimizer's, also "
            "gradients, or all, weights too (ZeRO 1 to 3); auto: the fastest that fits. In plans "
            "with stages the replicas of each stage share them.",
        ),
    ] = "none"
    masters: Annotated[
        bool,
        Option(
            read_by=("sharded",),
            panel=SPLIT,
            rare=True,
            help="Count masters of twice the weights' bits, which hf.prepare(masters=) keeps, with "
            "the optimizer's state and gradients of that type.",
        ),
    ] = False
    method: Annotated[
        Method,
        Option(
            read_by=("milp",),
            values={"exact": ("split",)},
            panel=SPLIT,
            rare=True,
            help="The fast exact method, or the MILP through CBC or HiGHS.",
        ),
    ] = "exact"
    top: Annotated[
        "Count",
        Option(
            read_by=("waste", "parallel"),
            open_values=(1,),
            rare=True,
            help="With {objective=waste}: keep the K best configurations. With "
            "{strategy=parallel}: show up to K points of time against devices and memory.",
        ),
    ] = 1
    schedule: Annotated[
        str,
        Option(
            read_by=PIPELINES,
            values={"auto": ("pipeline", "stages", "parallel")},
            open_values=("auto",),
            panel=PIPELINE,
            metavar="NAME",
            names="schedules",
            help="gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, pipedream, "
            "pipedream-vertical-sync, 2bw or a plug-in's; auto: the fastest of those that flush.",
        ),
    ] = DEFAULT_SCHEDULE
    microbatch_size: Annotated[
        "Count | None",
        Option(
            read_by=(*PIPELINES, "parallel"),
            narrows=False,
            recorded=True,
            panel=PIPELINE,
            help="Samples of a microbatch.",
            default="the fastest profiled",
        ),
    ] = None
    num_stages: Annotated[
        "Count | None",
        Option(
            read_by=("pipeline",), recorded=True, panel=PIPELINE, help="Exact number of stages."
        ),
    ] = None
    replication: Annotated[
        bool,
        Option(
            read_by=("pipeline",),
            open_values=(True,),
            recorded=True,
            panel=PIPELINE,
            rare=True,
            help="Whether stages may have replicas.",
            default="they may",
        ),
    ] = True
    num_model_chunks: Annotated[
        "Count | None",
        Option(
            flag="--chunks-per-device",
            read_by=("pipeline", "stages", "parallel"),
            values={1: ("stages", "parallel")},
            narrows=False,
            recorded=True,
            panel=PIPELINE,
            rare=True,
            help="Stages of each device, for interleaved.",
            default="2 to 4; parallel plans also try 1",
        ),
    ] = None
    link_bytes_per_second: Annotated[
        "PositiveRate | None",
        Option(
            read_by=(*PIPELINES, "parallel"),
            narrows=False,
            panel=PIPELINE,
            help="Bandwidth of links that the pool does not state.",
        ),
    ] = None
    stage_cost: Annotated[
        StageCost,
        Option(
            read_by=("pipeline",),
            panel=PIPELINE,
            rare=True,
            help="How a stage is priced (docs/pipeline.md).",
        ),
    ] = "ring"
    repetitive: Annotated[
        bool,
        Option(
            read_by=("repetitive",),
            panel=PIPELINE,
            rare=True,
            help="With {schedule=2bw}: equal stages of layers that repeat; chooses degrees, "
            "microbatch and recomputation (thesis 3.3).",
        ),
    ] = False
    cost_model: Annotated[
        CostModelName,
        Option(
            read_by=("repetitive",),
            panel=PIPELINE,
            rare=True,
            help="With {repetitive}: every layer's profile, the closed forms of thesis 3.3.3, or "
            "measured runs ({runs}).",
        ),
    ] = "profiled"
    recompute: Annotated[
        bool,
        Option(
            read_by=("stages", "parallel"),
            narrows=False,
            recorded=True,
            panel=PARALLEL,
            help="Whether stages may recompute activations, of attention's cores or all.",
            default="they may",
        ),
    ] = True
    sequence_parallel: Annotated[
        bool | None,
        Option(
            read_by=("parallel",),
            narrows=False,
            panel=PARALLEL,
            rare=True,
            help="Whether the devices of a tensor-parallel group compute and keep norms and "
            "residuals for a part of the tokens each.",
            default="only if no plan fits otherwise",
        ),
    ] = None
    shard_optimizer: Annotated[
        bool,
        Option(
            read_by=("parallel",),
            panel=PARALLEL,
            help="Let each replica of a stage keep and update a share of the optimizer's state, as "
            "--shard optimizer does: less memory, more communication.",
        ),
    ] = False
    market: Annotated["Markets | None", MARKET] = None
    at: Annotated[str | None, AT] = None
    spot: Annotated[
        bool | None,
        Option(
            rare=True,
            help="Count only spot prices, or only those on demand.",
            default="the cheapest",
        ),
    ] = None
    stated: frozenset[str] = field(default=frozenset(), init=False, compare=False)


PLANS = "For a plan"
ALLOCATIONS = "For an allocation"
AS_STATED = "what it states"


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What ``check`` needs to know."""

    claim: Annotated[
        "Plan | Allocation | Path | str",
        Option(argument=True, help="A plan or an allocation, or its file."),
    ]
    profiles: Annotated[
        "Profiles | None",
        replace(
            PROFILES,
            help="Folder of profiles to check a plan against; without them only what a split plan "
            "says of itself is judged.",
        ),
    ] = None
    pool: Annotated["Pool | None", replace(POOL, default="what a plan states or uses")] = None
    _: KW_ONLY
    model: Annotated[str | None, replace(MODEL, panel=PLANS)] = None
    link_bytes_per_second: Annotated[
        "PositiveRate | None",
        Option(
            panel=PLANS, help="Bandwidth of links that the pool does not state.", default=AS_STATED
        ),
    ] = None
    optimizer: Annotated[
        "OptimizerState | str | None", replace(OPTIMIZER, panel=PLANS, default=AS_STATED)
    ] = None
    memory_reserve_bytes: Annotated[
        "Bytes | None", replace(MEMORY_RESERVE, panel=PLANS, default=AS_STATED)
    ] = None
    jobs: Annotated[
        "JobsTable | None", Option(panel=ALLOCATIONS, help="The jobs that it is for.")
    ] = None
    throughputs: Annotated[
        "ThroughputsTable | None", Option(panel=ALLOCATIONS, help="The throughputs of these.")
    ] = None
    space_sharing: Annotated[
        bool | None,
        Option(
            panel=ALLOCATIONS, help="Whether pairs of jobs may share devices.", default=AS_STATED
        ),
    ] = None
    placement: Annotated[
        Placement | None,
        Option(
            panel=ALLOCATIONS,
            help="Which throughputs of jobs with several devices count.",
            default=AS_STATED,
        ),
    ] = None
    budget_dollars: Annotated[
        "Dollars | None",
        Option(flag="--budget", panel=ALLOCATIONS, help="Its budget.", default=AS_STATED),
    ] = None
    market: Annotated["Markets | None", replace(MARKET, panel=ALLOCATIONS)] = None
    at: Annotated[str | None, replace(AT, panel=ALLOCATIONS)] = None
