"""From the files and flags that commands share to a solver's problem."""

from collections.abc import Sequence
from pathlib import Path

from ..schema import files
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.optimizer import OptimizerState
from ..schema.pipeline import FLUSHING, PipelinePlan, PipelineProblem
from ..schema.plan import SplitPlan
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


def faults_of_plan(
    plan: SplitPlan | PipelinePlan,
    profiles: Path | None,
    pool: Cluster | None,
    model: str | None,
    link_bytes_per_second: float | None,
    optimizer: OptimizerState | None = None,
) -> list[str]:
    """Judge a plan, against profiles and a pool where they are given.

    Args:
        plan: A plan of any kind.
        profiles: Folder of profiles; None judges the plan's inner consistency alone.
        pool: The devices; by default just those that the plan uses.
        model: The profiles' model, where it is not the plan's.
        link_bytes_per_second: Links of a pipeline that the pool does not state; None takes what
            the plan says, or else the profiles.
        optimizer: The one that will train; None takes what the plan says, or else the profiles.

    Raises:
        ProblemError: The profiles do not fit the plan, or a pipeline is to be judged without.
    """
    optimizer = optimizer or plan.optimizer
    if isinstance(plan, PipelinePlan):
        if profiles is None:
            raise ProblemError(
                "a pipeline plan is judged against its layers", hint="add --profiles DIR"
            )
        found = read_model_profiles(profiles, model or plan.model)
        link = link_bytes_per_second or plan.link_bytes_per_second
        return _pipeline_faults(plan, found, pool, link, optimizer)
    from ..checks.batch_split import check
    from ..checks.profiled import split_faults

    if profiles is None:
        return check(plan, None)
    from .split_problem import split_problem

    used = ",".join(f"{group.num_devices}x{group.device_type}" for group in plan.groups)
    found = read_model_profiles(profiles, model or plan.model)
    pool = pool or Cluster.parse(used)
    problem = split_problem(
        found,
        pool,
        plan.global_batch_size,
        virtual_nodes=plan.uniform_virtual_nodes,
        interpolate=any(group.interpolated for group in plan.groups),
        optimizer=optimizer,
    )
    return check(plan, problem) + split_faults(plan, found, pool, optimizer)


def _pipeline_faults(
    plan: PipelinePlan,
    profiles: tuple[Profile, ...],
    pool: Cluster | None,
    link: float | None,
    optimizer: OptimizerState | None,
) -> list[str]:
    from ..checks.pipeline import check
    from ..checks.profiled import pipeline_faults

    pool = pool or pool_of_plan(plan)
    problem = problem_of_plan(plan, profiles, pool, link, optimizer)
    return pipeline_faults(problem, profiles, pool) or check(plan, problem)


def pool_of_plan(plan: PipelinePlan) -> Cluster:
    """Just the devices that a pipeline uses."""
    held = {(stage.device_type, stage.first_device): stage for stage in plan.stages}
    used = ",".join(f"{stage.num_replicas}x{stage.device_type}" for stage in held.values())
    return Cluster.parse(used)


def problem_of_plan(
    plan: PipelinePlan,
    profiles: Sequence[Profile],
    pool: Cluster,
    link: float | None,
    optimizer: OptimizerState | None,
) -> PipelineProblem:
    """What a pipeline answers, with these profiles' numbers.

    Args:
        plan: The answer; its schedule, prices and shape are the problem's.
        profiles: Of its model.
        pool: The devices.
        link: Bandwidth of links that the pool does not state.
        optimizer: The one that will train; None takes the profiles'.

    Raises:
        ProblemError: The profiles do not fit the plan.
    """
    from .pipeline_problem import pipeline_problem

    return pipeline_problem(
        profiles,
        pool,
        plan.global_batch_size,
        microbatch_size=plan.microbatch_size,
        link_bytes_per_second=link,
        optimizer=optimizer,
        schedule=plan.schedule,  # type: ignore[arg-type]
        stage_cost=plan.stage_cost,
        solved=plan.solved,
        workers=plan.workers,
        recompute=plan.recompute,
        objective=plan.objective if plan.schedule in FLUSHING else None,
        num_model_chunks=plan.num_model_chunks if plan.schedule == "interleaved" else None,
    )
