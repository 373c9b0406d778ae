"""Correct profiles by runs: which runs count, what they change, and how the profile records it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...schema.errors import ProblemError
from ...schema.files import to_plain
from ...schema.profile import Profile
from .corrected import corrected_by_splits
from .corrected_layers import Retime, corrected_by_pipelines
from .observed import Run, why_not


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


def correct(
    profiles: Sequence[Profile], runs: Sequence[Run], *, corrected_at: str, retime: Retime
) -> Correction:
    """Fold runs into the profiles of one model.

    Pure, and the order of the runs does not matter.

    Args:
        profiles: One a device type.
        runs: Any; those that cannot correct these profiles are left out, with a remark.
        corrected_at: The time, for the profiles' provenance.
        retime: What a pipeline's step takes with given profiles.

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
    """Every number that differs, by its address: ``term``, ``before`` and ``after``.

    A busy host that was not measured before was predicted as a device alone.
    """
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
