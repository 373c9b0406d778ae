"""Judging a plan: the problem that it answers, made again from profiles and a pool."""

from collections.abc import Sequence

from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.files import Plan
from ..schema.optimizer import OptimizerState
from ..schema.parallel import ParallelPlan
from ..schema.pipeline import PipelinePlan, PipelineProblem
from ..schema.profile import Profile


def faults_of_plan(
    plan: Plan,
    profiles: Sequence[Profile] | None,
    pool: Cluster | None,
    link_bytes_per_second: float | None = None,
    optimizer: OptimizerState | None = None,
) -> list[str]:
    """Judge a plan, against profiles and a pool where they are given.

    Args:
        plan: A plan of any kind.
        profiles: Of the plan's model; None judges the plan's inner consistency alone.
        pool: The devices; by default those that the plan was solved for, as far as it says so,
            else just those that it uses.
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
        link = link_bytes_per_second or plan.link_bytes_per_second
        return _pipeline_faults(plan, profiles, pool, link, optimizer)
    if isinstance(plan, ParallelPlan):
        if profiles is None:
            raise ProblemError(
                "a parallel plan is judged against its layers", hint="add --profiles DIR"
            )
        return _parallel_faults(plan, profiles, pool, link_bytes_per_second, optimizer)
    from ..checks.batch_split import check
    from ..checks.profiled import split_faults

    if profiles is None:
        return check(plan, None)
    from .split_problem import split_problem

    used = ",".join(f"{group.num_devices}x{group.device_type}" for group in plan.groups)
    pool = pool or plan.cluster or Cluster.parse(used)
    problem = split_problem(
        profiles,
        pool,
        plan.global_batch_size,
        virtual_nodes=plan.uniform_virtual_nodes,
        interpolate=any(group.interpolated for group in plan.groups),
        optimizer=optimizer,
    )
    return check(plan, problem) + split_faults(plan, profiles, pool, optimizer)


def _pipeline_faults(
    plan: PipelinePlan,
    profiles: Sequence[Profile],
    pool: Cluster | None,
    link: float | None,
    optimizer: OptimizerState | None,
) -> list[str]:
    from ..checks.pipeline import check
    from ..checks.profiled import pipeline_faults

    pool = pool or pool_of_plan(plan)
    problem = problem_of_plan(plan, profiles, pool, link, optimizer)
    return pipeline_faults(problem, profiles, pool) or check(plan, problem)


def _parallel_faults(
    plan: ParallelPlan,
    profiles: Sequence[Profile],
    pool: Cluster | None,
    link: float | None,
    optimizer: OptimizerState | None,
) -> list[str]:
    from ..checks.parallel import check
    from .parallel_problem import parallel_problem

    used = ",".join(f"{number}x{name}" for name, number in plan.devices_by_type.items())
    problem = parallel_problem(
        profiles,
        pool or plan.cluster or Cluster.parse(used),
        plan.global_batch_size,
        link_bytes_per_second=link or plan.link_bytes_per_second,
        recompute=any(stage.recompute == "full" for stage in plan.stages),
        optimizer=optimizer,
    )
    return check(plan, problem)


def pool_of_plan(plan: PipelinePlan) -> Cluster:
    """The pool that a pipeline was solved for; where it does not say, just what it uses."""
    if plan.cluster is not None:
        return plan.cluster
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
        schedule=plan.schedule,
        stage_cost=plan.stage_cost,
        solved=plan.solved,
        workers=plan.workers,
        recompute=plan.recompute,
        objective=plan.objective if plan.traits.flushes else None,
        num_model_chunks=plan.num_model_chunks if plan.traits.takes_chunks else None,
    )
