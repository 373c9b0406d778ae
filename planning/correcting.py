"""Correct profiles by the records of past runs, read from files."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..schema import files
from ..schema.errors import FileError, ProblemError
from ..schema.pipeline import PipelineProblem
from ..schema.plan import Plan
from ..schema.problem import Problem
from ..schema.profile import Profile
from ..schema.run import RunRecord
from .costs.from_runs import Correction, correct
from .costs.observed import Run
from .judging import pool_of_plan, view_of_plan

_log = logging.getLogger("hetflow")


def read_run(path: Path) -> Run:
    """Read a run record, given as its file or as the run's folder.

    Raises:
        FileError: There is no record, or it has faults.
    """
    found = path / "run.json" if path.is_dir() else path
    return Run(name=str(path), record=files.read(found, RunRecord))


def read_runs(folder: Path) -> tuple[Run, ...]:
    """Read the records of all run folders in a folder, at any depth.

    Raises:
        FileError: The folder does not exist, holds no record, or holds one with faults.
    """
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder", hint="give the one that holds runs")
    found = tuple(read_run(path.parent) for path in sorted(folder.rglob("run.json")))
    if not found:
        raise FileError(f"{folder}: holds no run.json", hint="run `hetflow launch -o` into it")
    return found


def corrected(profiles: Sequence[Profile], runs: Sequence[Run]) -> Correction:
    """Correct one model's profiles by what its runs measured.

    Raises:
        ProblemError: None of the runs can correct the profiles; the message says why the first one
            cannot.
    """
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found = correct(profiles, runs, corrected_at=now, retime=retimed)
    if not found.used:
        raise ProblemError(
            f"no run can correct the profiles: {found.remarks[0]}",
            hint="launch a plan of this model, for at least 13 steps",
        )
    return found


def corrected_by_runs(
    profiles: tuple[Profile, ...], folder: Path
) -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    """Correct one model's profiles by the run records of the model in a folder.

    Returns:
        The corrected profiles, and the runs that were used.

    Raises:
        FileError: The folder does not exist, holds no record, or holds one with faults.
        ProblemError: None of the model's runs can correct its profiles.
    """
    model = profiles[0].model
    mine = [run for run in read_runs(folder) if run.record.plan.model == model]
    if not mine:
        _log.warning(f"{folder} holds no run of {model}; the profiles are taken as they are")
        return profiles, ()
    found = corrected(profiles, mine)
    for remark in found.remarks:
        _log.warning(remark)
    _log.info(f"profiles corrected by {len(found.used)} run(s) of {folder}")
    return found.profiles, found.used


def retimed(plan: Plan, profiles: Sequence[Profile]) -> float | None:
    """Predict the step of a pipeline plan from other profiles, in seconds.

    None if the schedule does not flush, or if the plan does not state all that is needed.
    """
    from .checks.pipeline import timed_stage
    from .schedules.of_plan import timed

    if not plan.traits.flushes or plan.solved != "flat":
        return None
    link, optimizer, batch = plan.link_bytes_per_second, plan.optimizer, plan.global_batch_size
    try:
        view = view_of_plan(plan, Problem(profiles, pool_of_plan(plan), batch, optimizer, 0, link))
    except ProblemError:
        return None  # an older plan does not repeat the links that its cluster stated
    assert isinstance(view, PipelineProblem)
    stages = tuple(timed_stage(plan, view, index) for index in range(len(plan.stages)))
    types = {stage.device_type for stage in stages}
    fixed = max(pool.fixed_seconds for pool in view.pools if pool.device_type in types)
    return timed(replace(plan, stages=stages)).makespan_seconds + fixed
