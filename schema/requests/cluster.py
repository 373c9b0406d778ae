"""The requests to a live cluster: to run it, to give it jobs, to look after both."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..options import Option
from . import POLICIES, POOL, RATES

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import (
        Count,
        GraceSeconds,
        Index,
        Mapping,
        Pool,
        RoundSeconds,
        Sequence,
        WaitSeconds,
    )


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What ``cluster start`` needs to know."""

    pool: Annotated[
        "Pool", replace(POOL, help="The devices, e.g. 2xV100,2xP100 or 1xcpu:fast,2xcpu:slow.")
    ]
    _: KW_ONLY
    engine: Annotated[
        str, Option(help="Where jobs run: local (this host), slurm or ray (their nodes).")
    ] = "local"
    policy: Annotated[
        str,
        Option(
            help="How devices are shared: a policy of `hetflow allocate`; elastic, weighted fair "
            "sharing that changes how many devices jobs hold; or easyscale, easyscale-taking or "
            "easyscale-homogeneous, which also change their types."
        ),
    ] = "las_weighted"
    round_seconds: Annotated[
        "RoundSeconds", Option(flag="--round", help="Seconds between decisions.")
    ] = 360.0
    grace_seconds: Annotated[
        "GraceSeconds",
        Option(flag="--grace", help="Seconds that a job has to save before it is killed."),
    ] = 30
    entities: Annotated[
        "Path | None",
        Option(help="The tree of entities that share the devices, for policy hierarchical."),
    ] = None
    on_change: Annotated[
        str | None,
        Option(
            metavar="PROGRAM|URL",
            help="Tell this program (on its stdin), or this http(s) address, when a job's state "
            "changes. No shell runs it.",
        ),
    ] = None
    group: Annotated[
        str | None,
        Option(
            help="Let this Unix group's users submit, too, and look after their own jobs, which "
            "run as them. Needs root and the engine local."
        ),
    ] = None
    dashboard: Annotated[
        str | None,
        Option(metavar="ADDRESS:PORT", help="Serve a web page too, e.g. 127.0.0.1:8080."),
    ] = None
    print_unit: Annotated[bool, Option(help="Print a systemd unit that runs this; stop.")] = False


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
        str | None, Option(help="As for `hetflow launch`.", default="elastic with {virtual_nodes}")
    ] = None
    checkpoint_every: Annotated[
        "Index | None",
        Option(help="Steps between checkpoints.", default="only when it has to stop"),
    ] = None
    priority_weight: Annotated[
        float | None, Option(flag="--weight", help="Priority weight.", default="1")
    ] = None
    deadline_seconds: Annotated[
        float | None, Option(flag="--deadline", help="Seconds from now until it should be done.")
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
    environment: Annotated[
        "Sequence[str]",
        Option(
            flag="--env",
            metavar="NAME[=VALUE]",
            help="A variable of the job's environment; without a value, yours. It gets no other of "
            "yours, but those of the scheduler.",
        ),
    ] = ()
    array: Annotated[
        str | None,
        Option(
            metavar="INDICES",
            help="A job for each index, such as 0-9 or 1,3,5-7; each has its own in the variable "
            "HETFLOW_ARRAY_INDEX.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRequest:
    """What ``queue`` needs to know."""

    watch: Annotated[bool, Option(help="Repeat every second.")] = False
    finished: Annotated["Index", Option(help="Number of ended jobs to show.")] = 10


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What ``cancel``, ``hold`` and ``release`` need to know."""

    job: Annotated[str, Option(argument=True, help="Its number, or its name.")]


@dataclass(frozen=True, slots=True)
class LogsRequest(JobRequest):
    """What ``logs`` needs to know."""

    _: KW_ONLY
    follow: Annotated[bool, Option(other="-f", help="Keep printing until the job is over.")] = False


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """What ``cluster drain`` needs to know."""

    named: Annotated[
        str,
        Option(
            argument=True,
            metavar="TYPE|SERVER",
            help="The device type or server that jobs shall leave.",
        ),
    ]
    _: KW_ONLY
    undo: Annotated[bool, Option(help="Let jobs use it again.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRequest:
    """What ``cluster usage`` needs to know."""

    per: Annotated[
        str, Option(help="Periods of the calendar, in UTC: hour, day, month, or all.")
    ] = "day"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardRequest:
    """What ``dashboard`` needs to know."""

    listen: Annotated[
        str, Option(metavar="ADDRESS:PORT", help="Where to listen; port 0 is any that is free.")
    ] = "127.0.0.1:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What ``cluster replay`` needs to know."""

    policy: Annotated[
        str | None, Option(names=POLICIES.names, help="Another policy than the live one.")
    ] = None
    restart_seconds: Annotated[
        "WaitSeconds", Option(help="Seconds that a job loses when it starts or restarts.")
    ] = 0.0
    resize_seconds: Annotated[
        "WaitSeconds | None",
        Option(
            help="Seconds that a job loses when it changes devices while it runs.",
            default="{restart_seconds}",
        ),
    ] = None
    sacct: Annotated[
        "Path | str | None",
        Option(
            help="What `sacct` says of a Slurm cluster's jobs, instead of a state folder: "
            "--parsable2 or --json."
        ),
    ] = None
    gpus: Annotated[
        str | None, Option(help="With {sacct}: the pool.", default="the most GPUs held at once")
    ] = None
    rates: Annotated["Mapping[str, float] | None", RATES] = None
    round_seconds: Annotated["RoundSeconds", Option(help="With {sacct}: length of a round.")] = (
        360.0
    )
