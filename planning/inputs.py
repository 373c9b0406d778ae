"""Profiles and pools in every form that callers have them in, as records."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..schema import files
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.jobs import Throughputs
from ..schema.profile import Profile
from ..schema.records import nearest

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
