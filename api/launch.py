"""``hetflow.launch`` and ``hetflow.dry_run``."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema.errors import ProblemError
from ..schema.options import option
from ..schema.plan import Plan
from ..schema.requests.launch import LaunchingRequest
from ..schema.run import RunRecord
from .calls import takes
from .files import plan_of

if TYPE_CHECKING:
    from ..runtime.launcher.request import LaunchRequest
    from ..runtime.launcher.spawn import WorkerCommand

_log = logging.getLogger("hetflow")


@takes(LaunchingRequest)
def launch(request: LaunchingRequest) -> RunRecord | None:
    """Train under a plan, with one worker per device; the result is that of training on one device.

    The call returns when training has ended. It handles signals meanwhile, so it must be made in
    the main thread.

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
    from ..runtime.launcher.controller import launch as run
    from ..runtime.launcher.request import run_folder

    check_installed_torch()
    found, given = plan_of(request.plan), request.folder
    with run_folder(None if given is None else Path(given), found.model) as folder:
        return run(_lowered(request, found, folder), warn=_log.warning)


@takes(LaunchingRequest)
def dry_run(request: LaunchingRequest) -> "list[WorkerCommand]":
    """List the command and environment of each worker that a launch would start, without running.

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
    from ..runtime.launcher.controller import plan_commands
    from ..runtime.launcher.request import default_folder

    found, given = plan_of(request.plan), request.folder
    folder = default_folder(found.model) if given is None else Path(given)
    return plan_commands(_lowered(request, found, folder))


def _lowered(request: LaunchingRequest, plan: Plan, folder: Path) -> "LaunchRequest":
    from ..runtime.launcher.request import LaunchRequest
    from ..runtime.protocol.lower import check_level, lower

    config = lower(plan, request.seed, check_level(request.determinism))
    copies = request.redundancy
    if copies > 1 or copies and (config.shard is None or request.rendezvous is not None):
        raise ProblemError(
            f"{option('redundancy', copies)}: shares of states can be kept twice, on one host",
            hint=f"give {option('redundancy', 1)} with a plan whose devices share states"
            if config.shard is None or copies > 1
            else f"leave it out, and give {option('checkpoint', 'DIR')}",
        )
    return LaunchRequest(
        plan=plan,
        config=replace(config, redundancy=copies),
        script=(str(request.script), *request.arguments),
        folder=folder,
        force=request.force,
        stdout_to_stderr=request.stdout_to_stderr,
        ends_process=request.ends_process,
        rendezvous=request.rendezvous,
        timeout_seconds=request.timeout_seconds,
        checkpoint=None if request.checkpoint is None else Path(request.checkpoint),
        checkpoint_every=request.checkpoint_every,
        from_scratch=request.from_scratch,
        compare_every=request.compare_every,
        grace_seconds=request.grace_seconds,
        on_failure=request.on_failure,
        heartbeat_seconds=request.heartbeat_seconds,
    )
