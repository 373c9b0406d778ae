"""The requests about files: to show one, to read a foreign format, to write one."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..options import Option
from . import AT, CHECKPOINT_EVERY, MARKET, RATES

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Count, Index, Mapping, Markets, Pool, Profiles, Record, Sequence, WaitSeconds

# What each option is for: kinds of plans, and classes of other records.
DRAWN = ("Profile", "split", "pipeline", "SimulationRun", "Market")
MARKETS = ("Market",)
PIPELINES = ("pipeline",)
PLANS = ("split", "pipeline", "parallel")
RUNS = ("RunRecord", "SimulationRun")


@dataclass(frozen=True, slots=True)
class ShowRequest:
    """What ``show`` needs to know."""

    source: Annotated[
        "Record | Profiles",
        Option(
            argument=True,
            help="A record, profiles, the file of a record, or the folder of profiles or of a run.",
        ),
    ]
    _: KW_ONLY
    plot: Annotated[
        "Path | str | None",
        Option(
            read_by=DRAWN,
            help="Draw profiles, a plan, a simulated run, a market's prices, or when its spot "
            "machines were there, into this .png or .svg.",
        ),
    ] = None
    per_device: Annotated[
        bool, Option(read_by=MARKETS, help="Draw prices per device, not per machine.")
    ] = False
    by_cloud: Annotated[
        bool, Option(read_by=MARKETS, help="Draw the least and the greatest price of each cloud.")
    ] = False
    presence: Annotated[
        bool,
        Option(
            read_by=MARKETS, help="Draw when spot machines were there, in a market with prices too."
        ),
    ] = False
    timeline: Annotated[
        bool, Option(read_by=PIPELINES, help="Draw a pipeline plan's schedule in the terminal.")
    ] = False
    html: Annotated[
        "Path | str | None",
        Option(read_by=PIPELINES, help="Write a pipeline plan's timeline as one HTML file."),
    ] = None
    trace: Annotated[
        "Path | str | None",
        Option(read_by=PIPELINES, help="Write the timeline as a trace file for Perfetto."),
    ] = None
    explain: Annotated[
        bool, Option(read_by=PLANS, help="List the terms of a plan's predicted step.")
    ] = False
    csv: Annotated[
        "Path | str | None",
        Option(read_by=RUNS, help="Write a run's devices, or a simulated run's jobs, as a table."),
    ] = None
    force: Annotated[bool, Option(help="Overwrite an existing output.")] = False


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What ``import`` needs to know."""

    file: Annotated[
        "Path",
        Option(
            argument=True,
            help="A graph.txt of PipeDream's profiler, an input of Piper, a plug-in's file, or "
            "prices or traces (or a folder).",
        ),
    ]
    _: KW_ONLY
    device_type: Annotated[
        str | None, Option(help="The device it was profiled on, such as V100. Layers need it.")
    ] = None
    device_memory: Annotated[
        str | None, Option(help="That device's memory, such as 16GB. Layers need it.")
    ] = None
    model: Annotated[str | None, Option(help="Name of the model; by default the file's.")] = None
    microbatch_size: Annotated[
        "Count", Option(help="Samples of the profiled input; the format does not say.")
    ] = 1
    source: Annotated[
        str,
        Option(
            flag="--format",
            help="pipedream (graph.txt), piper (JSON); aws-spot-prices, azure-spot-prices, "
            "csv-spot-prices; instance-types (a CSV of machines and prices); cant-be-late, "
            "bamboo-trace, parcae-trace; sacct (Slurm's log of jobs); or a plug-in's.",
            default="recognised where it is market data, else pipedream",
        ),
    ] = "pipedream"
    keep_placeholders: Annotated[
        bool, Option(help="Keep Input sources and unused __getitem__ sinks, which PipeDream drops.")
    ] = False
    instance_types: Annotated[
        "Path | None",
        Option(help="For prices: a CSV of machines: Instance, GPU type, # GPUs, prices."),
    ] = None
    throughputs: Annotated[
        "Path | None", Option(help="For sacct: write the jobs' throughputs here.")
    ] = None
    rates: Annotated[
        "Mapping[str, float] | None",
        replace(RATES, help="For sacct: a type's relative speed, v100=3.5; may be repeated."),
    ] = None
    tick_seconds: Annotated[
        "WaitSeconds", Option(help="bamboo-trace: make ticks of this length.")
    ] = 300.0
    time_unit: Annotated[
        str, Option(help="bamboo-trace: what its times are in: seconds or hours.")
    ] = "seconds"
    trace_start: Annotated[
        str | None,
        Option(
            help="For traces: when they begin, as 2023-02-15T00:00:00Z; cant-be-late: the traces "
            "that the windows were cut from. Else times are not known."
        ),
    ] = None
    values: Annotated[
        str | None,
        Option(
            help="cant-be-late: what a file of 0 and 1 means: instances (that there were) or "
            "preempted.",
            default="where the file tells it",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What ``export`` needs to know."""

    plan: Annotated[
        "Path | str",
        Option(
            argument=True,
            metavar="FILE",
            help="A plan; for pipedream a profile with layers; for dcp and safetensors a folder of "
            "checkpoints, or one of them.",
        ),
    ]
    target: Annotated[
        str,
        Option(
            flag="--to",
            other="--format",
            help="slurm, kubernetes, skypilot, torchrun, ray, hosts (hetflow's launcher by hand), "
            "pipedream (graph.txt; the command line's default); of checkpoints dcp "
            "(torch.distributed.checkpoint) and safetensors; or a plug-in's.",
        ),
    ]
    script: Annotated[
        "str | Path",
        Option(
            argument=True,
            help="After --: the training script, or -m and a module.",
            python='With ``"-m"`` the module is the first argument.',
        ),
    ]
    arguments: Annotated["Sequence[str]", Option(argument=True, help="The script's own.")] = ()
    _: KW_ONLY
    hosts: Annotated[
        "str | Pool | None",
        Option(
            help="The hosts, in order of ranks: 1x(2xV100),2x(4xP100).",
            default="the plan's servers, else one for each device type",
        ),
    ] = None
    names: Annotated[
        "Mapping[str, str] | None",
        Option(
            flag="--name",
            help="What the target calls a device type, V100=tesla_v100; may be repeated.",
        ),
    ] = None
    job: Annotated[str | None, Option(help="Name of the job.", default="the model's")] = None
    directory: Annotated[
        str | None, Option(help="Where to start.", default="where the target starts jobs")
    ] = None
    setup: Annotated[
        "Sequence[str]",
        Option(
            help="A line of shell before the launch, such as 'source venv/bin/activate'; may be "
            "repeated."
        ),
    ] = ()
    seed: Annotated["Index", Option(help="As of `hetflow launch`.")] = 0
    determinism: Annotated[str, Option(help="As of `hetflow launch`.")] = "none"
    checkpoint: Annotated[str | None, Option(help="Folder of checkpoints that all hosts see.")] = (
        None
    )
    checkpoint_every: Annotated["Index", CHECKPOINT_EVERY] = 0
    cpus_per_device: Annotated[
        "Count", Option(help="Processors to ask for beside each device.")
    ] = 1
    image: Annotated[str | None, Option(help="Kubernetes: the container image.")] = None
    volume: Annotated[
        str | None, Option(help="Kubernetes: a volume that all pods see, CLAIM:/PATH.")
    ] = None
    directives: Annotated[
        "Sequence[str]",
        Option(
            flag="--directive", help="Slurm: an option of sbatch, --time=2:00:00; may be repeated."
        ),
    ] = ()
    market: Annotated[
        "Markets | None",
        replace(
            MARKET,
            rare=False,
            help="skypilot, hosts: rent machines of this market, cheapest first; may be repeated.",
        ),
    ] = None
    at: Annotated[
        str | None,
        replace(AT, rare=False, help="When, as 2020-03-07T00:00:00Z.", default="the last prices"),
    ] = None
