"""The request to train under a plan."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ..options import OnFailure, Option
from . import ARGUMENTS, CHECKPOINT_EVERY, POOL, SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import (
        Count,
        HeartbeatSeconds,
        Index,
        Plan,
        Pool,
        Profiles,
        Rendezvous,
        Sequence,
        TimeoutSeconds,
        WaitSeconds,
    )


@dataclass(frozen=True, slots=True)
class LaunchingRequest:
    """What ``launch`` and ``dry_run`` need to know."""

    plan: Annotated["Plan | Path | str", Option(argument=True, help="A plan (hetflow.plan/2).")]
    script: Annotated["str | Path", SCRIPT]
    arguments: Annotated["Sequence[str]", ARGUMENTS] = ()
    _: KW_ONLY
    folder: Annotated[
        "Path | str | None",
        Option(flag="--output", help="Folder of the run.", default="hetflow-runs/<model>-<time>"),
    ] = None
    force: Annotated[bool, Option(help="Whether the folder may already hold files.")] = False
    seed: Annotated["Index", Option(help="Seed of data order, dropout and augmentation.")] = 0
    rendezvous: Annotated[
        "Rendezvous | None",
        Option(flag="--nnodes", help="Where the launchers of several hosts meet."),
    ] = None
    determinism: Annotated[
        str,
        Option(
            help="What must end in the same bits: none, static (same devices), elastic (any "
            "mapping), heterogeneous (also unlike types)."
        ),
    ] = "none"
    checkpoint: Annotated[
        "Path | str | None",
        Option(help="Folder of checkpoints; goes on from the newest one there."),
    ] = None
    checkpoint_every: Annotated["Index", CHECKPOINT_EVERY] = 0
    from_scratch: Annotated[
        bool,
        Option(
            flag="--restart-from-scratch",
            help="Start at step 0; move what is in the {checkpoint} folder aside.",
        ),
    ] = False
    compare_every: Annotated[
        "Index | None",
        Option(
            help="Steps between comparisons of all workers' parameters.",
            default="50; 0: only after changes of workers, before checkpoints and at the end",
        ),
    ] = None
    grace_seconds: Annotated[
        "WaitSeconds",
        Option(
            flag="--grace",
            help="Seconds that workers have to write a checkpoint after SIGTERM, and scripts to "
            "handle the KeyboardInterrupt of Ctrl-C.",
        ),
    ] = 30.0
    timeout_seconds: Annotated[
        "TimeoutSeconds",
        Option(flag="--timeout", help="Longest wait for other workers, in seconds."),
    ] = 600.0
    on_failure: Annotated[
        OnFailure | None,
        Option(
            help="When a worker dies or hangs: stop the launch, shrink to the others, or also "
            "replace it.",
            default="shrink for split plans on one host, replace (from the last checkpoint) for "
            "pipelines, shared states and several hosts with {checkpoint}, else stop",
        ),
    ] = None
    heartbeat_seconds: Annotated[
        "HeartbeatSeconds",
        Option(
            flag="--heartbeat", help="Kill a worker that sends no heartbeat for so many seconds."
        ),
    ] = 30.0
    redundancy: Annotated[
        "Index",
        Option(
            help="How many others (0 or 1) keep a copy of each worker's share of the states, so "
            "that the rest goes on without it. A device without room for it is refused."
        ),
    ] = 0
    stdout_to_stderr: Annotated[
        bool, Option(help="Whether to send the script's output to stderr, to keep stdout free.")
    ] = False
    ends_process: Annotated[
        bool,
        Option(
            help="Whether this process ends with the launch. Signals that come after the launch's "
            "end are then ignored, so they do not change the exit code."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class LaunchCommandRequest(LaunchingRequest):
    """What the command ``launch`` needs to know: how hosts meet is stated by flags."""

    _: KW_ONLY
    nnodes: Annotated["Count", Option(help="Number of hosts in the launch.")] = 1
    node_rank: Annotated[
        int | None,
        Option(help="Rank of this host, 0 to nnodes - 1. Host 0 runs the rendezvous store."),
    ] = None
    rdzv_endpoint: Annotated[
        str | None, Option(help="HOST:PORT on node 0 where the hosts meet.")
    ] = None
    devices: Annotated[
        str | None,
        Option(help="Several hosts: what this one gives, e.g. 2xV100 [default: its CUDA devices]."),
    ] = None
    dry_run: Annotated[bool, Option(help="Print what would run on this host; run nothing.")] = False


@dataclass(frozen=True, slots=True)
class ResizingRequest:
    """What ``resize`` needs to know."""

    run: Annotated[
        "Path | str",
        Option(argument=True, help="The folder of a running launch, or its name in hetflow-runs."),
    ]
    pool: Annotated[
        "Pool | None", replace(POOL, help="All devices from now on: 2xV100,8xP100.")
    ] = None
    _: KW_ONLY
    plan: Annotated[
        "Plan | Path | str | None",
        Option(help="Instead of {pool}: a plan of the same virtual nodes or microbatches."),
    ] = None
    profiles: Annotated[
        "Profiles | None",
        Option(
            help="Folder of profiles: solve for the best mapping on {pool}. A pipeline needs them."
        ),
    ] = None
    wait: Annotated[
        bool, Option(help="Wait until it is done, and say what happened.", default="wait")
    ] = True
    timeout_seconds: Annotated[
        "WaitSeconds", Option(flag="--timeout", help="Seconds to wait for the answer.")
    ] = 600.0
