"""The request to write what starts a plan elsewhere."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..options import Option
from .allocate import AT, MARKET
from .launch import CHECKPOINT_EVERY

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Count, Index, Mapping, Markets, Pool, Sequence


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What ``export`` needs to know."""

    plan: Annotated[
        "Path | str",
        Option(argument=True, metavar="FILE", help="A plan; for pipedream a profile with layers."),
    ]
    target: Annotated[
        str,
        Option(
            flag="--to",
            other="--format",
            help="slurm, kubernetes, skypilot, torchrun, ray, hosts (hetflow's launcher by hand), "
            "pipedream (graph.txt; the command line's default), or a plug-in's.",
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
