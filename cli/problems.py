"""From the files and flags that commands share to a solver's problem."""

from pathlib import Path

from ..schema import files
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.plan import SplitPlan
from ..schema.problem import SplitProblem
from ..schema.profile import Profile
from ..schema.records import nearest


def read_pool(gpus: str | None, cluster: Path | None) -> Cluster:
    """The pool from ``--gpus`` or ``--cluster``; exactly one of them.

    Raises:
        ProblemError: None or both are given, or the specification is wrong.
    """
    if gpus is not None and cluster is not None:
        raise ProblemError("--gpus and --cluster both name a pool", hint="give one of them")
    if gpus is not None:
        return Cluster.parse(gpus)
    if cluster is not None:
        return files.read(cluster, Cluster)
    raise ProblemError("no pool is given", hint="add --gpus 2xV100,8xP100 or --cluster FILE")


def read_model_profiles(folder: Path, model: str | None) -> tuple[Profile, ...]:
    """The profiles of one model.

    Raises:
        ProblemError: The model is unknown, or several are there and none is named.
    """
    profiles = files.read_profiles(folder)
    models = sorted({profile.model for profile in profiles})
    if model is None:
        if len(models) > 1:
            raise ProblemError(
                f"{folder} holds profiles of {len(models)} models: {', '.join(models)}",
                hint=f"choose one, such as --model {models[0]}",
            )
        model = models[0]
    elif model not in models:
        guess = nearest(model, models) or models[0]
        raise ProblemError(f"{folder} holds no profile of {model!r}", hint=f"try --model {guess}")
    return tuple(profile for profile in profiles if profile.model == model)


def problem_for_plan(
    plan: SplitPlan,
    profiles: Path | None,
    gpus: str | None,
    cluster: Path | None,
    model: str | None,
) -> SplitProblem | None:
    """The problem a plan claims to solve, or None where no profiles are given."""
    from ..solvers.problems import split_problem

    if profiles is None:
        return None
    if gpus is None and cluster is None:
        gpus = ",".join(f"{g.num_devices}x{g.device_type}" for g in plan.groups)
    return split_problem(
        read_model_profiles(profiles, model or plan.model),
        read_pool(gpus, cluster),
        plan.global_batch_size,
        virtual_nodes=plan.uniform_virtual_nodes,
        interpolate=any(group.interpolated for group in plan.groups),
    )
