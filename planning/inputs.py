"""Profiles and pools in every form that callers have them in, as records."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..devices.naming import is_former_name
from ..schema import files
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.jobs import Throughputs
from ..schema.parallel import ParallelPlan
from ..schema.plan import SplitPlan
from ..schema.profile import Profile
from ..schema.records import nearest

_log = logging.getLogger("hetflow")

Profiles = Sequence[Profile] | Path | str
"""Profiles, or the folder (or file) that holds them."""
Pool = Cluster | Path | str
"""A cluster; its file, as a path; or a specification such as ``2xV100,8xP100``, as a string."""


def pool_of(given: Pool) -> Cluster:
    """The devices of a pool.

    Raises:
        ProblemError: The specification is wrong.
        FileError: The cluster's file is missing or has faults.
    """
    if isinstance(given, Cluster):
        return given
    return files.read(given, Cluster) if isinstance(given, Path) else Cluster.parse(given)


def name_of(given: Pool) -> str:
    """How the user named a pool; a cluster by its devices."""
    if isinstance(given, Cluster):
        return ",".join(f"{n}x{name}" for name, n in given.num_devices.items())
    return str(given)


def flat(pool: Cluster) -> Cluster:
    """The pool of these devices of which nothing else is said: no memory, servers or links."""
    return Cluster.parse(",".join(f"{n}x{name}" for name, n in pool.num_devices.items()))


def profiles_of(given: Profiles, model: str | None = None) -> tuple[Profile, ...]:
    """The profiles of one model.

    Args:
        given: Profiles, or the folder that holds them.
        model: Whose; None where there is only one.

    Raises:
        ProblemError: The model is unknown, or several are there and none is named.
        FileError: The folder holds none, or one with faults.
    """
    if isinstance(given, str | Path):
        found, where = files.read_profiles(Path(given)), f"{given} holds"
    else:
        found, where = tuple(given), "the list holds"
    models = sorted({profile.model for profile in found})
    if not models:
        raise ProblemError("there are no profiles to plan by", hint="run `hetflow profile` first")
    if model is None:
        if len(models) > 1:
            raise ProblemError(
                f"{where} profiles of {len(models)} models: {', '.join(models)}",
                hint=f"choose one, such as --model {models[0]}",
            )
        model = models[0]
    elif model not in models:
        guess = nearest(model, models) or models[0]
        raise ProblemError(f"{where} no profile of {model!r}", hint=f"try --model {guess}")
    return tuple(profile for profile in found if profile.model == model)


def types_of(plan: files.Plan) -> tuple[str, ...]:
    """The device types that a plan uses."""
    if isinstance(plan, ParallelPlan):
        return tuple(plan.devices_by_type)
    parts = plan.groups if isinstance(plan, SplitPlan) else plan.stages
    return tuple(dict.fromkeys(part.device_type for part in parts))


def under_todays_names(profiles: Sequence[Profile], types: Iterable[str]) -> tuple[Profile, ...]:
    """Profiles that were written when unlike GPUs still had one name, under the names of today.

    A profile is taken for a type that has none, and that was called so, and a warning says it.

    Args:
        profiles: Of one model.
        types: The device types to plan for.
    """
    asked = list(types)
    known = {profile.device_type.lower() for profile in profiles}
    found = list(profiles)
    for name in asked:
        if name.lower() in known:
            continue
        meant = [
            profile
            for profile in profiles
            if profile.device_type not in asked
            and is_former_name(profile.device_type, name, _driver_name(profile))
        ]
        if len(meant) == 1:
            found.append(replace(meant[0], device_type=name))
            _log.warning(
                f"the profile of {meant[0].device_type} is taken for {name}, which was called so "
                f"before; profile again to be sure"
            )
    return tuple(found)


def _driver_name(profile: Profile) -> str | None:
    name = (profile.provenance or {}).get("device")
    return name if isinstance(name, str) else None


def spelled_as(pool: Cluster, throughputs: Throughputs) -> Cluster:
    """The pool with its device types spelled as the throughputs spell them: case does not matter.

    Raises:
        ProblemError: No throughput is for a type of the pool, whatever its case.
    """
    tables: list[Iterable[str]] = [entry.steps_per_second for entry in throughputs.models]
    tables += [pair.steps_per_second for pair in throughputs.pairs]
    tables += [mix.devices for mix in throughputs.mixes]
    known = list(dict.fromkeys(name for table in tables for name in table))
    pool = pool.spelled_as(known)
    for name in pool.num_devices:
        if name not in known:
            guess = nearest(name, known)
            raise ProblemError(
                f"no throughput is for device type {name!r}"
                + (f"; did you mean {guess!r}?" if guess else ""),
                hint=f"the throughputs are for {', '.join(known)}",
            )
    return pool
