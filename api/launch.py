"""``hetflow.launch`` and ``hetflow.dry_run``."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from ..schema.files import Plan
from ..schema.run import RunRecord
from .files import plan_of
from .naming import names_arguments

if TYPE_CHECKING:
    from ..launcher.request import LaunchRequest, OnFailure, Rendezvous
    from ..launcher.spawn import WorkerCommand

_log = logging.getLogger("hetflow")
_names_arguments = names_arguments(
    output="folder",
    restart_from_scratch="from_scratch",
    timeout="timeout_seconds",
    grace="grace_seconds",
    nnodes="rendezvous",
    node_rank="rendezvous",
    rdzv_endpoint="rendezvous",
)


class LaunchOptions(TypedDict, total=False):
    """How to launch.

    ``folder`` gets the record, the plan and the logs (default: ``hetflow-runs/<model>-<time>``);
    ``force`` lets it hold something already. ``seed`` is that of order, dropout and augmentation.
    ``determinism`` says what must end in the same bits: ``none``, ``static``, ``elastic`` or
    ``heterogeneous``. ``checkpoint`` is the folder of checkpoints, to go on from the newest, one
    every ``checkpoint_every`` steps (0: at SIGTERM and the end); with ``from_scratch`` what is
    there is kept aside. Parameters are compared every ``compare_every`` steps. ``on_failure``
    says what follows a worker's death: ``stop``, ``shrink`` or ``replace``. ``grace_seconds`` are
    for a checkpoint after SIGTERM, ``timeout_seconds`` for any wait for other workers,
    ``heartbeat_seconds`` of silence get a worker killed. ``rendezvous`` is where several hosts
    meet. ``stdout_to_stderr`` keeps stdout free of the script's output.
    """

    folder: Path | None
    force: bool
    seed: int
    determinism: str
    checkpoint: Path | None
    checkpoint_every: int
    from_scratch: bool
    compare_every: int | None
    on_failure: "OnFailure | None"
    grace_seconds: float
    timeout_seconds: float
    heartbeat_seconds: float
    rendezvous: "Rendezvous | None"
    stdout_to_stderr: bool


@_names_arguments
def launch(
    plan: Plan | Path | str,
    script: str,
    arguments: Sequence[str] = (),
    **options: Unpack[LaunchOptions],
) -> RunRecord | None:
    """Train under a plan: one worker a device, the result of one device.

    It returns when training is over. Signals are taken meanwhile, so call it from the main
    thread.

    Args:
        plan: A plan, or its file.
        script: The training script, or ``"-m"`` with a module as the first argument.
        arguments: The script's own.
        options: As ``LaunchOptions`` says.

    Returns:
        What was predicted and what was measured; None on hosts other than the first.

    Raises:
        LaunchError: A worker failed, with its own exit code, or a signal came.
        HetflowError: The script, the folder or this machine's devices do not fit the plan, or
            torch is too old.

    Example:
        >>> import hetflow
        >>> record = hetflow.launch("plan.json", "train.py", ["--epochs", "3"])
        >>> record.status, record.world_size
        ('done', 1)
    """
    from ..devices.torch_version import check_installed_torch
    from ..launcher.controller import launch as run

    check_installed_torch()
    return run(_request(plan, script, arguments, options), warn=_log.warning)


@_names_arguments
def dry_run(
    plan: Plan | Path | str,
    script: str,
    arguments: Sequence[str] = (),
    **options: Unpack[LaunchOptions],
) -> "list[WorkerCommand]":
    """The command and environment of each worker that a launch would start; nothing is run.

    Args:
        plan: A plan, or its file.
        script: The training script, or ``"-m"`` with a module as the first argument.
        arguments: The script's own.
        options: As ``LaunchOptions`` says.

    Raises:
        HetflowError: The script does not fit the plan.

    Example:
        >>> import hetflow
        >>> commands = hetflow.dry_run("plan.json", "train.py")
        >>> [command.device_type for command in commands]
        ['cpu']
        >>> commands[0].shell().split()[-1]
        'train.py'
    """
    from ..launcher.controller import plan_commands

    return plan_commands(_request(plan, script, arguments, options))


def _request(
    plan: Plan | Path | str,
    script: str,
    arguments: Sequence[str],
    options: LaunchOptions,
) -> "LaunchRequest":
    from ..launcher.request import LaunchRequest, default_folder
    from ..protocol.lower import check_level, lower

    found, rest = plan_of(plan), dict(options)
    seed = options.get("seed", 0)
    level = check_level(options.get("determinism", "none"))
    for name in ("seed", "determinism", "folder"):
        rest.pop(name, None)
    return LaunchRequest(
        plan=found,
        config=lower(found, seed, level),
        script=(script, *arguments),
        folder=options.get("folder") or default_folder(found.model),
        **rest,  # type: ignore[arg-type]
    )
