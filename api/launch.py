"""``hetflow.launch``, ``hetflow.dry_run`` and ``hetflow.resize``."""

import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema import files
from ..schema.errors import ProblemError
from ..schema.launch import LaunchConfig, ResizeAnswer
from ..schema.options import option, told
from ..schema.plan import Plan
from ..schema.requests.kinds import Pool, Profiles
from ..schema.requests.launch import LaunchingRequest, ResizingRequest
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
    from ..devices.torch_support import check_installed_torch
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
    is_split = config.shard is not None and config.pipeline is None
    if copies > 1 or copies and not (is_split and request.rendezvous is None):
        raise ProblemError(
            f"{option('redundancy', copies)}: shares of a split's states can be kept twice, on one "
            "host",
            hint=f"give {option('redundancy', 1)} with a split whose devices share states"
            if config.shard is None or copies > 1
            else f"leave it out, and give {option('checkpoint', 'DIR')}",
        )
    asked = {field.name: getattr(request, field.name) for field in fields(request)}
    asked |= {"plan": plan, "config": replace(config, redundancy=copies), "folder": folder}
    asked["checkpoint"] = None if request.checkpoint is None else Path(request.checkpoint)
    return LaunchRequest(**asked)


@takes(ResizingRequest)
def resize(request: ResizingRequest) -> ResizeAnswer | None:
    """Change the devices of a running launch. Training continues and has the same result.

    Returns:
        The answer of the launch, with ``status`` ``done``, ``refused`` or ``failed``; None without
        ``wait``.

    Raises:
        TargetError: There is no such run, or it has ended.
        ProblemError: The change would change what the job computes.
        LaunchError: The run ended, or it did not answer in time.

    Example:
        >>> import hetflow
        >>> hetflow.resize("hetflow-runs/m-20250101-120000", "4xV100").status  # doctest: +SKIP
        'done'
    """
    from ..runtime.launcher.request import RUNS_FOLDER
    from ..runtime.protocol import control

    folder = Path(request.run)
    if not folder.is_dir() and (Path(RUNS_FOLDER) / folder).is_dir():
        folder = Path(RUNS_FOLDER) / folder
    config = _mapping(folder, request.pool, request.plan, request.profiles)
    asked = control.ask(folder, config, wants_answer=request.wait)
    if not request.wait:
        return None
    _log.info("waiting for the joining workers and the end of a step")
    return control.wait_for(folder, asked, request.timeout_seconds)


def _mapping(
    run: Path, pool: Pool | None, plan: Plan | Path | str | None, profiles: Profiles | None
) -> LaunchConfig:
    """Map the launch's virtual nodes to the requested devices."""
    from ..planning.inputs import pool_of
    from ..planning.resize import seconds_a_sample, split_again
    from ..runtime.launcher.generations import check_not_parallel
    from ..runtime.launcher.mapping import renumbered, spread
    from ..runtime.protocol import control
    from ..runtime.protocol.lower import lower

    if (pool is None) == (plan is None):
        raise ProblemError(
            f"give either {option('pool')} or {option('plan')}",
            hint=f"for example {option('pool', '2xV100')}",
        )
    now = control.current(run)
    check_not_parallel(now)
    if now.pipeline is not None:
        return _recut(run, now, pool, plan, profiles)
    if plan is not None:
        return renumbered(now, lower(_plan_of(plan, "split"), now.seed, now.determinism))
    assert pool is not None
    devices = pool_of(pool)
    before = files.read_plan(run / "plan.json")
    if profiles is not None:
        return renumbered(now, lower(split_again(now, before, profiles, pool), now.seed))
    if now.shard is not None:
        raise ProblemError(
            "the workers share states by their memory, which a plan knows",
            hint=f"add {option('profiles', 'DIR')}, or give {option('plan', 'FILE')}",
        )
    types = [name for name, number in devices.num_devices.items() for _ in range(number)]
    return spread(now, types, seconds_a_sample(now, before))


def _plan_of(given: Plan | Path | str, kind: str) -> Plan:
    """Return a plan of one kind, reading it from its file if needed."""
    from ..runtime.protocol.control import INSTEAD

    found = files.read_plan(Path(given)) if isinstance(given, Path | str) else given
    if found.kind != kind:
        raise ProblemError(
            f"the run has a {kind} plan and can be resized to another one only, this is a "
            f"{found.kind} plan",
            hint=told(INSTEAD),
        )
    return found


def _recut(
    run: Path,
    now: LaunchConfig,
    pool: Pool | None,
    plan: Plan | Path | str | None,
    profiles: Profiles | None,
) -> LaunchConfig:
    """Lower another pipeline plan of the same microbatches, given or solved for the devices."""
    from ..planning.resize import cut_again
    from ..runtime.launcher.generations import check_same_job
    from ..runtime.protocol.lower import lower

    if plan is not None:
        found = _plan_of(plan, "pipeline")
    elif profiles is None or pool is None:
        raise ProblemError(
            "a pipeline is cut anew from the profiles of its layers",
            hint=f"add {option('profiles', 'DIR')}, or give {option('plan', 'FILE')}",
        )
    else:
        found = cut_again(now, files.read_plan(run / "plan.json"), profiles, pool)
    config = lower(found, now.seed, now.determinism)
    check_same_job(now, config)
    return config
