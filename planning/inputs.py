"""Read profiles and pools from any form in which callers give them."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..schema import files
from ..schema.cluster import Cluster, is_former_name, is_listing
from ..schema.errors import ProblemError
from ..schema.options import option
from ..schema.profile import Profile
from ..schema.requests.kinds import Pool, Profiles
from ..schema.spelling import did_you_mean, nearest

if TYPE_CHECKING:
    from ..schema.jobs import Throughputs

_log = logging.getLogger("hetflow")


def pool_of(given: Pool, *, field: str = "pool") -> Cluster:
    """Return a pool as a ``Cluster``; see ``Pool`` for the forms.

    Raises:
        ProblemError: The text does not follow the grammar of pools.
        FileError: The cluster's file is missing or has faults.
    """
    if isinstance(given, Cluster):
        return given
    if isinstance(given, Mapping):
        return Cluster.of(given)
    if isinstance(given, Path):
        text = files.read_text(given)
        if is_listing(text):
            return Cluster.parse(text, field=field)
        return files.from_json(text, Cluster, name=str(given))
    if given.endswith(".json"):
        in_a_file = f"{option('cluster', 'FILE')} (from Python, a Path)"
        raise ProblemError(
            f"{option(field, repr(given))} is the name of a file, not of devices",
            hint=f"give {in_a_file if field == 'pool' else 'devices, such as 1x(2xV100)'}",
        )
    return Cluster.parse(given, field=field)


def name_of(given: Pool) -> str:
    """Return the text by which the user named a pool; otherwise, a list of its devices."""
    if isinstance(given, Path | str):
        return str(given)
    return ",".join(f"{n}x{name}" for name, n in pool_of(given).num_devices.items())


def flat(pool: Cluster) -> Cluster:
    """Return a pool of the same devices without memory, servers, links and prices."""
    return Cluster.parse(name_of(pool))


def profiles_of(given: Profiles, model: str | None = None) -> tuple[Profile, ...]:
    """Return the profiles of one model.

    Without a ``model`` all profiles must be of one.

    Raises:
        ProblemError: There is no profile of the model, or there are several models and ``model`` is
            None.
        FileError: The folder holds no profile, or one with faults.
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
                hint=f"choose one, such as {option('model', models[0])}",
            )
        model = models[0]
    elif model not in models:
        guess = nearest(model, models) or models[0]
        raise ProblemError(f"{where} no profile of {model!r}", hint=f"try {option('model', guess)}")
    return tuple(profile for profile in found if profile.model == model)


def model_of(throughputs: "Throughputs", model: str | None = None) -> str:
    """Return the model that is meant among those of a table of throughputs.

    Without a ``model`` all throughputs must be of one.

    Raises:
        ProblemError: There is no throughput of the model, or there are several models and ``model``
            is None.
    """
    alone, mixed = throughputs.models, throughputs.mixes
    models = sorted({one.model for one in alone} | {one.model for one in mixed})
    if not models:
        raise ProblemError("the throughputs are of no model", hint="add an entry to models")
    if model is None:
        if len(models) > 1:
            raise ProblemError(
                f"the throughputs are of {len(models)} models: {', '.join(models)}",
                hint=f"choose one, such as {option('model', repr(models[0]))}",
            )
        return models[0]
    if model not in models:
        guess = nearest(model, models) or models[0]
        raise ProblemError(
            f"no throughput is of the model {model!r}", hint=f"try {option('model', repr(guess))}"
        )
    return model


def under_todays_names(profiles: Sequence[Profile], types: Iterable[str]) -> tuple[Profile, ...]:
    """Add profiles under new device type names for types that older versions named differently.

    Older versions gave unlike GPUs the same name. If a type has no profile, but exactly one
    profile has its former name, that profile is used for the type, with a warning in the log.

    Returns:
        The given profiles, followed by the renamed ones.
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


def spelled_as(pool: Cluster, throughputs: "Throughputs") -> Cluster:
    """Return the pool with device types spelled as in the throughputs; case does not matter.

    Raises:
        ProblemError: A device type of the pool has no throughput in any spelling.
    """
    tables: list[Iterable[str]] = [entry.steps_per_second for entry in throughputs.models]
    tables += [pair.steps_per_second for pair in throughputs.pairs]
    tables += [mix.devices for mix in throughputs.mixes]
    known = list(dict.fromkeys(name for table in tables for name in table))
    pool = pool.spelled_as(known)
    for name in pool.num_devices:
        if name not in known:
            raise ProblemError(
                f"no throughput is for device type {name!r}"
                + did_you_mean(name, known, before="; "),
                hint=f"the throughputs are for {', '.join(known)}",
            )
    return pool
