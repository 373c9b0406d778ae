"""Check a plan against the problem that it answers, rebuilt from profiles and a pool."""

from collections.abc import Sequence
from typing import get_args

from ..checks import plan as plan_checks
from ..checks.proofs import Verdict, tolerance_faults
from ..schema.choices import Shard
from ..schema.cluster import Cluster
from ..schema.device_memory import asked_bytes
from ..schema.errors import ProblemError
from ..schema.optimizer import OptimizerState
from ..schema.options import option
from ..schema.pipeline import PipelineProblem
from ..schema.plan import Plan, devices_for
from ..schema.problem import SplitProblem
from ..schema.profile import Profile
from .pool_parts import is_part_of


def faults_of_plan(
    plan: Plan,
    profiles: Sequence[Profile] | None,
    pool: Cluster | None,
    link_bytes_per_second: float | None = None,
    optimizer: OptimizerState | None = None,
    memory_reserve_bytes: int | None = None,
) -> Verdict:
    """List the faults of a plan, checked against profiles and a pool if they are given.

    Args:
        plan: A plan of any kind.
        profiles: Profiles of the plan's model. None checks only whether the plan's own values
            agree with each other; this works for split plans only.
        pool: The devices. None takes the pool that the plan states, else the devices that it uses.
        link_bytes_per_second: Bandwidth of links that the pool does not state, for pipelines. None
            takes the plan's, else the profiles'.
        optimizer: The optimizer that will train. None takes the plan's, else the profiles'.
        memory_reserve_bytes: Bytes of each device that must stay free. None takes the plan's.

    Returns:
        One sentence per fault, empty if the plan is valid; and how its bound is known.

    Raises:
        ProblemError: The profiles do not fit the plan, or a pipeline is checked without profiles.
    """
    optimizer = optimizer or plan.optimizer
    free = memory_reserve_bytes
    if free is None:
        free = asked_bytes(plan.reserves)
    found = _faults_of_kind(plan, profiles, pool, link_bytes_per_second, optimizer, free)
    if profiles is not None:
        from ..checks.profiled import stated_faults

        found += stated_faults(plan, profiles)
    found += plan_checks.check(plan) + tolerance_faults(plan.proof)
    return found


def _faults_of_kind(
    plan: Plan,
    profiles: Sequence[Profile] | None,
    pool: Cluster | None,
    link_bytes_per_second: float | None,
    optimizer: OptimizerState | None,
    free: int,
) -> Verdict:
    if plan.kind == "pipeline":
        if profiles is None:
            raise ProblemError(
                "a pipeline plan is judged against its layers",
                hint=f"add {option('profiles', 'DIR')}",
            )
        link = link_bytes_per_second or plan.link_bytes_per_second
        return _pipeline_faults(plan, profiles, pool, link, optimizer, free)
    if plan.kind == "parallel":
        if profiles is None:
            raise ProblemError(
                "a parallel plan is judged against its layers",
                hint=f"add {option('profiles', 'DIR')}",
            )
        link = link_bytes_per_second
        return Verdict(_parallel_faults(plan, profiles, pool, link, optimizer, free))
    if plan.shard is not None:
        return _sharded_faults(plan, profiles, pool, optimizer, free)
    from ..checks.batch_split import bound_faults, check
    from ..checks.profiled import split_faults

    if profiles is None:
        return check(plan, None)
    from .split_problem import split_problem

    def problem_on(devices: Cluster) -> SplitProblem:
        return split_problem(
            profiles,
            devices,
            plan.global_batch_size,
            virtual_nodes=plan.uniform_virtual_nodes,
            interpolate=any(group.interpolated for group in plan.groups),
            optimizer=optimizer,
            memory_reserve_bytes=free,
        )

    judged = judged_pool(plan, pool)
    faults = check(plan, problem_on(judged))
    if pool is not None and judged is not pool:
        faults += bound_faults(plan, problem_on(pool))
    faults += split_faults(plan, profiles, judged, optimizer, free)
    return faults


def _sharded_faults(
    plan: Plan,
    profiles: Sequence[Profile] | None,
    pool: Cluster | None,
    optimizer: OptimizerState | None,
    memory_reserve_bytes: int,
) -> Verdict:
    from ..checks.profiled import sharded_faults
    from ..checks.sharded_split import check
    from .split_problem import sharded_problem

    if profiles is None:
        return check(plan, None)
    only = plan.restrictions and plan.restrictions.shard
    judged = judged_pool(plan, pool)
    problem = sharded_problem(
        profiles,
        judged,
        plan.global_batch_size,
        (only,) if only else get_args(Shard),
        virtual_nodes=plan.uniform_virtual_nodes,
        interpolate=any(group.interpolated for group in plan.groups),
        optimizer=optimizer,
        memory_reserve_bytes=memory_reserve_bytes,
    )
    faults = check(plan, problem)
    faults += sharded_faults(problem, profiles, judged, optimizer, memory_reserve_bytes)
    return faults


def _pipeline_faults(
    plan: Plan,
    profiles: Sequence[Profile],
    pool: Cluster | None,
    link: float | None,
    optimizer: OptimizerState | None,
    memory_reserve_bytes: int,
) -> Verdict:
    from ..checks.pipeline import check
    from ..checks.profiled import pipeline_faults

    pool = judged_pool(plan, pool)
    problem = problem_of_plan(plan, profiles, pool, link, optimizer, memory_reserve_bytes)
    faults = pipeline_faults(problem, profiles, pool, memory_reserve_bytes)
    return Verdict(faults) if faults else check(plan, problem)


def _parallel_faults(
    plan: Plan,
    profiles: Sequence[Profile],
    pool: Cluster | None,
    link: float | None,
    optimizer: OptimizerState | None,
    memory_reserve_bytes: int,
) -> list[str]:
    from ..checks.parallel import check
    from ..checks.profiled import parallel_faults
    from .parallel_problem import parallel_problem

    pool = judged_pool(plan, pool)
    chunks = {plan.num_model_chunks, *(other.num_model_chunks for other in plan.alternatives)}
    problem = parallel_problem(
        profiles,
        pool,
        plan.global_batch_size,
        link_bytes_per_second=link or plan.link_bytes_per_second,
        recompute=any(stage.recompute != "none" for stage in plan.stages),
        optimizer=optimizer,
        num_model_chunks=tuple(sorted(chunks)),
        memory_reserve_bytes=memory_reserve_bytes,
        sequence_parallel=bool(plan.sequence_parallel),
        shard_optimizer=bool(plan.shard_optimizer),
    )
    return parallel_faults(problem, profiles, pool, memory_reserve_bytes) + check(plan, problem)


def judged_pool(plan: Plan, pool: Cluster | None) -> Cluster:
    """The pool whose links a plan is judged by: its own, where that is a part of the given one."""
    if pool is None or (plan.cluster is not None and is_part_of(plan.cluster, pool)):
        return pool_of_plan(plan)
    return pool


def pool_of_plan(plan: Plan) -> Cluster:
    """Return the pool that a plan was solved for; if not stated, the devices that it uses."""
    if plan.cluster is not None:
        return plan.cluster
    stated = devices_for(plan)
    return Cluster.parse(",".join(f"{number}x{name}" for name, number in stated.items()))


def problem_of_plan(
    plan: Plan,
    profiles: Sequence[Profile],
    pool: Cluster,
    link: float | None,
    optimizer: OptimizerState | None,
    memory_reserve_bytes: int = 0,
) -> PipelineProblem:
    """Rebuild the problem that a pipeline plan answers, with the numbers of these profiles.

    Args:
        plan: The plan; gives the problem's schedule, stage cost and shape.
        profiles: Profiles of its model.
        pool: The devices.
        link: Bytes per second of links that the pool does not state.
        optimizer: The optimizer that will train; None takes the profiles'.
        memory_reserve_bytes: Bytes of each device that must stay free.

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
        memory_reserve_bytes=memory_reserve_bytes,
        schedule=plan.schedule,
        stage_cost=plan.stage_cost or "ring",
        solved=plan.solved or "flat",
        workers=plan.workers or "at_most",
        recompute=plan.recomputes,
        objective=plan.objective if plan.traits.flushes and plan.objective != "waste" else None,
        num_model_chunks=plan.num_model_chunks if plan.traits.takes_chunks else None,
    )
