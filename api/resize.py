"""``hetflow.resize``."""

import logging
from pathlib import Path

from ..planning.inputs import pool_of
from ..planning.resize import cut_again, seconds_a_sample, split_again
from ..runtime.launcher.repartition import check_not_parallel, check_same_job
from ..runtime.protocol import control
from ..schema import files
from ..schema.errors import ProblemError
from ..schema.launch import LaunchConfig, ResizeAnswer
from ..schema.options import option, told
from ..schema.plan import Plan
from ..schema.requests.kinds import Pool, Profiles
from ..schema.requests.launch import ResizingRequest
from .calls import takes

_log = logging.getLogger("hetflow")


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
    from ..runtime.launcher.mapping import renumbered, spread
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
    found = files.read_plan(Path(given)) if isinstance(given, Path | str) else given
    if found.kind != kind:
        raise ProblemError(
            f"the run has a {kind} plan and can be resized to another one only, this is a "
            f"{found.kind} plan",
            hint=told(control.INSTEAD),
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
