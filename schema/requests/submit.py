"""The request to add a job to a cluster's queue, under the names of a job's .toml file."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated

from ..options import Option

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Count, Index, Sequence


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """What ``submit`` needs to know; None leaves a value to the job's file, or to its default."""

    script: Annotated[
        "Path | str",
        Option(argument=True, metavar="JOB.toml|SCRIPT", help="A job's file, or its script."),
    ]
    arguments: Annotated[
        "Sequence[str]", Option(argument=True, help="The script's own arguments.")
    ] = ()
    _: KW_ONLY
    name: Annotated[str | None, Option(help="The job's name.", default="the script's")] = None
    profiles: Annotated["Path | str | None", Option(help="Profiles of its model.")] = None
    throughputs: Annotated[
        "Path | str | None",
        Option(
            help="Instead of profiles: throughputs (hetflow.throughputs/1, .csv, or Gavel's table) "
            "with each number of devices that it may hold; its batch is split evenly."
        ),
    ] = None
    model: Annotated[
        str | None, Option(help="The model, where profiles or throughputs hold several.")
    ] = None
    batch_size: Annotated["Count | None", Option(help="Global batch: samples of a step.")] = None
    steps: Annotated["Count | None", Option(help="Steps of the whole job.")] = None
    devices: Annotated[
        "Count | None", Option(help="Number of devices, all of one type.", default="1")
    ] = None
    devices_at_least: Annotated[
        "Count | None",
        Option(help="Instead: a range, for policies elastic, easyscale*.", default="1"),
    ] = None
    devices_at_most: Annotated[
        "Count | None",
        Option(help="Its end; other policies give the job the most that can run it."),
    ] = None
    gpus: Annotated[
        str | None, Option(help="Instead: just these devices, at once, such as 1xV100,2xP100.")
    ] = None
    virtual_nodes: Annotated[
        "Count | None",
        Option(help="Number of virtual nodes; the result then does not depend on devices."),
    ] = None
    strategy: Annotated[
        str | None,
        Option(
            help="Kind of its plans: split, pipeline, parallel, or auto, on each turn the fastest "
            "of the three.",
            default="split",
        ),
    ] = None
    microbatch_size: Annotated[
        "Count | None", Option(help="Samples of a microbatch, for all but splits.")
    ] = None
    determinism: Annotated[
        str | None,
        Option(help="As for `hetflow launch`.", default="elastic with {virtual_nodes}"),
    ] = None
    checkpoint_every: Annotated[
        "Index | None",
        Option(help="Steps between checkpoints.", default="only when it has to stop"),
    ] = None
    priority_weight: Annotated[
        float | None, Option(flag="--weight", help="Priority weight.", default="1")
    ] = None
    deadline_seconds: Annotated[
        float | None,
        Option(flag="--deadline", help="Seconds from now until it should be done."),
    ] = None
    entity: Annotated[
        str | None,
        Option(help="The node of `hetflow cluster start --entities` that it belongs to."),
    ] = None
    time_limit_seconds: Annotated[
        float | None,
        Option(
            flag="--time-limit",
            help="Seconds that it may hold devices, over all its turns; it is held then.",
        ),
    ] = None
    after: Annotated[
        "Sequence[str]",
        Option(metavar="JOB[:ok]", help="Begin when this job is over; with :ok, when it is done."),
    ] = ()
