"""``hetflow.launch`` and ``hetflow.dry_run``."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from ..schema.plan import Plan
from ..schema.records import Index, WaitSeconds
from ..schema.run import RunRecord
from .calls import checks
from .files import plan_of

if TYPE_CHECKING:
    from ..launcher.request import LaunchRequest
    from ..launcher.spawn import WorkerCommand
    from ..schema.choices import OnFailure
    from ..schema.launch import Rendezvous

_log = logging.getLogger("hetflow")


class LaunchOptions(TypedDict, total=False):
    """Options of a launch.

    Attributes:
        folder: Folder for the run record, the plan and the logs; None takes
            ``hetflow-runs/<model>-<time>``.
        force: Whether the folder may already hold files.
        seed: Seed of sample order, dropout and augmentation.
        determinism: Which runs must end in the same bits: ``none``, ``static``, ``elastic`` or
            ``heterogeneous`` (docs/determinism.md).
        checkpoint: Folder of checkpoints; training continues from the newest one in it. None
            writes none.
        checkpoint_every: Steps between checkpoints; 0 writes them at SIGTERM and at the end only.
        from_scratch: Whether to set existing checkpoints aside and start at step 0.
        compare_every: Steps between comparisons of all workers' parameters; None takes 50; 0
            compares only after changes of workers, before checkpoints and at the end.
        on_failure: What to do when a worker dies: ``stop``, ``shrink`` or ``replace``.
        grace_seconds: Seconds that workers have to write a checkpoint after SIGTERM.
        timeout_seconds: Most seconds that a worker waits for others.
        heartbeat_seconds: A worker that sends no heartbeat for so many seconds is killed.
        rendezvous: Where the launchers of several hosts meet.
        stdout_to_stderr: Whether to send the script's output to stderr, to keep stdout free.
        ends_process: Whether this process ends with the launch. Signals that come after the
            launch's end are then ignored, so they do not change the exit code.
    """

    folder: Path | str | None
    force: bool
    seed: Index
    determinism: str
    checkpoint: Path | str | None
    checkpoint_every: Index
    from_scratch: bool
    compare_every: Index | None
    on_failure: "OnFailure | None"
    grace_seconds: WaitSeconds
    timeout_seconds: WaitSeconds
    heartbeat_seconds: WaitSeconds
    rendezvous: "Rendezvous | None"
    stdout_to_stderr: bool
    ends_process: bool


@checks
def launch(
    plan: Plan | Path | str,
    script: Path | str,
    arguments: Sequence[str] = (),
    **options: Unpack[LaunchOptions],
) -> RunRecord | None:
    """Train under a plan, with one worker per device; the result is that of training on one device.

    The call returns when training has ended. It handles signals meanwhile, so it must be made in
    the main thread.

    Args:
        plan: A plan, or its file.
        script: The training script, or ``"-m"`` with a module as the first argument.
        arguments: Arguments of the script.
        options: See ``LaunchOptions``.

    Returns:
        The run record, with predicted and measured times; None on hosts other than the first.

    Raises:
        LaunchError: A worker failed (carries the worker's exit code), or a signal arrived.
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
    from ..launcher.request import run_folder

    check_installed_torch()
    found, given = plan_of(plan), options.get("folder")
    with run_folder(None if given is None else Path(given), found.model) as folder:
        options["folder"] = folder
        return run(_request(found, script, arguments, options), warn=_log.warning)


@checks
def dry_run(
    plan: Plan | Path | str,
    script: Path | str,
    arguments: Sequence[str] = (),
    **options: Unpack[LaunchOptions],
) -> "list[WorkerCommand]":
    """List the command and environment of each worker that a launch would start, without running.

    Args:
        plan: A plan, or its file.
        script: The training script, or ``"-m"`` with a module as the first argument.
        arguments: Arguments of the script.
        options: See ``LaunchOptions``.

    Returns:
        One command per worker, in order of ranks.

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
    script: Path | str,
    arguments: Sequence[str],
    options: LaunchOptions,
) -> "LaunchRequest":
    from ..launcher.request import LaunchRequest, default_folder
    from ..protocol.lower import check_level, lower

    found, rest = plan_of(plan), dict(options)
    folder, checkpoint = options.get("folder"), options.get("checkpoint")
    seed = options.get("seed", 0)
    level = check_level(options.get("determinism", "none"))
    for name in ("seed", "determinism", "folder", "checkpoint"):
        rest.pop(name, None)
    return LaunchRequest(
        plan=found,
        config=lower(found, seed, level),
        script=(str(script), *arguments),
        folder=default_folder(found.model) if folder is None else Path(folder),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        **rest,  # type: ignore[arg-type]
    )
