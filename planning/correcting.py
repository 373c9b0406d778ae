"""Correct profiles by records of past runs: which count, what they change, how profiles say so."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..schema import files
from ..schema.errors import FileError, ProblemError
from ..schema.files import to_plain
from ..schema.pipeline import PipelineProblem
from ..schema.plan import Plan
from ..schema.problem import Problem
from ..schema.profile import Profile
from ..schema.run import RunRecord
from .costs.corrected import corrected_by_splits
from .costs.corrected_layers import Retime, corrected_by_pipelines
from .costs.observed import Run, why_not
from .judging import pool_of_plan, view_of_plan

_log = logging.getLogger("hetflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Profiles as runs have them.

    Attributes:
        profiles: In the order of those asked for; what changed stands in their provenance.
        used: Names of the runs that were folded in, sorted.
        remarks: A sentence for each run, or measurement of one, that was not used.
    """

    profiles: tuple[Profile, ...]
    used: tuple[str, ...]
    remarks: tuple[str, ...]


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


def correct(
    profiles: Sequence[Profile], runs: Sequence[Run], *, corrected_at: str, retime: Retime
) -> Correction:
    """Fold runs into the profiles of one model.

    Pure, and the order of the runs does not matter.

    There is one profile a device type. Runs that cannot correct them are left out, with a remark.

    Raises:
        ProblemError: Two profiles of one type, or of two models.
    """
    _check(profiles)
    ordered = sorted(runs, key=lambda run: run.name)
    refused = [(run, why_not(run.record, profiles)) for run in ordered]
    remarks = [f"{run.name}: left out, {why}" for run, why in refused if why is not None]
    used = [run for run, why in refused if why is None]
    splits = [run for run in used if not run.record.plan.layers]
    pipelines = [run for run in used if run.record.plan.layers]
    after, said = corrected_by_splits(profiles, splits)
    after, also_said = corrected_by_pipelines(after, pipelines, retime)
    return Correction(
        profiles=tuple(
            _with_origin(old, new, used, corrected_at)
            for old, new in zip(profiles, after, strict=True)
        ),
        used=tuple(run.name for run in used),
        remarks=(*remarks, *said, *also_said),
    )


def _check(profiles: Sequence[Profile]) -> None:
    models = {profile.model for profile in profiles}
    if len(models) > 1:
        raise ProblemError(f"the profiles are of several models: {', '.join(sorted(models))}")
    types = [profile.device_type for profile in profiles]
    for name in types:
        if types.count(name) > 1:
            raise ProblemError(f"two profiles are of {name}; keep one of them")


def _with_origin(old: Profile, new: Profile, runs: Sequence[Run], corrected_at: str) -> Profile:
    """The new profile, its provenance naming the runs, and every number with what it was."""
    changes = list(changes_of(old, new))
    if not changes:
        return old
    mine = [
        run
        for run in runs
        if any(device.device_type == old.device_type for device in run.record.devices)
    ]
    entry = {
        "corrected_at": corrected_at,
        "runs": [
            {"run": run.name, "num_steps": run.record.num_steps, "plan": run.record.plan.kind}
            for run in mine
        ],
        "changes": changes,
    }
    before = old.provenance or {}
    corrections = [*before.get("corrections", ()), entry]
    return replace(new, provenance={**before, "corrections": corrections})


def changes_of(old: Profile, new: Profile) -> Iterator[dict[str, Any]]:
    """Every number that differs, by its address: ``term``, ``before`` and ``after``."""
    # A busy host that was not measured before was predicted as a device alone.
    before, after = dict(_numbers("", to_plain(old))), dict(_numbers("", to_plain(new)))
    if old.busy is None and new.busy is not None:
        parts = ("batch_curve", "update_seconds", "fixed_seconds")
        alone = {f"busy.{term}": value for term, value in before.items() if term.startswith(parts)}
        before |= alone
    for term in dict.fromkeys([*before, *after]):
        if before.get(term) != after.get(term):
            yield {"term": term, "before": before.get(term), "after": after.get(term)}


def _numbers(place: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            if key != "provenance":
                yield from _numbers(f"{place}.{key}" if place else key, entry)
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _numbers(f"{place}[{_name(entry, number)}]", entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


def _name(entry: Any, number: int) -> object:
    """How an entry of a list is called: by its size or its id."""
    named = entry if isinstance(entry, dict) else {}
    return next(
        (named[key] for key in ("batch_size", "id", "microbatch_size") if key in named), number
    )
