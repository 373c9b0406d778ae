"""Check a plan against the problem that it answers, rebuilt from profiles and a pool."""

from collections.abc import Sequence
from typing import get_args

from ..schema.choices import Shard
from ..schema.cluster import Cluster
from ..schema.device_memory import asked_bytes
from ..schema.errors import BackendError, ProblemError
from ..schema.optimizer import OptimizerState
from ..schema.options import option
from ..schema.parallel import ParallelProblem
from ..schema.pipeline import PipelineProblem
from ..schema.plan import Plan, devices_for
from ..schema.problem import ShardedProblem, SplitProblem
from ..schema.profile import Profile
from .checks import plan as plan_checks
from .checks.proofs import Verdict, tolerance_faults
from .pool_parts import is_part_of

Problem = SplitProblem | ShardedProblem | PipelineProblem | ParallelProblem


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
    if profiles is None:
        found = _own_faults(plan)
    else:
        from .checks.profiled import stated_faults

        link = link_bytes_per_second or plan.link_bytes_per_second
        judged = judged_pool(plan, pool)
        problem = problem_of_plan(plan, profiles, judged, link, optimizer, free)
        found = faults_against(plan, problem, profiles, judged, optimizer, free)
        if isinstance(problem, SplitProblem) and pool is not None and judged is not pool:
            from .checks.batch_split import bound_faults

            whole = problem_of_plan(plan, profiles, pool, link, optimizer, free)
            assert isinstance(whole, SplitProblem)
            found += bound_faults(plan, whole)
        found += stated_faults(plan, profiles)
    found += plan_checks.check(plan) + tolerance_faults(plan.proof)
    return found


def _own_faults(plan: Plan) -> Verdict:
    """Whether a plan's own values agree with each other."""
    from .checks import batch_split, sharded_split

    if plan.layers:
        raise ProblemError(
            f"a {plan.kind} plan is judged against its layers",
            hint=f"add {option('profiles', 'DIR')}",
        )
    return batch_split.check(plan, None) if plan.shard is None else sharded_split.check(plan, None)


def faults_against(
    plan: Plan,
    problem: Problem,
    profiles: Sequence[Profile],
    pool: Cluster,
    optimizer: OptimizerState | None,
    memory_reserve_bytes: int,
) -> Verdict:
    """List the faults of a plan against its problem, and of that against profiles and pool.

    Args:
        plan: The plan.
        problem: What it answers.
        profiles: What the problem was built from.
        pool: The devices of the problem.
        optimizer: The optimizer that will train; None takes the profiles'.
        memory_reserve_bytes: Bytes of each device that must stay free.
    """
    from .checks import batch_split, parallel, pipeline, profiled, sharded_split

    free = memory_reserve_bytes
    if isinstance(problem, SplitProblem):
        found = batch_split.check(plan, problem)
        found += profiled.split_faults(plan, profiles, pool, optimizer, free)
        return found
    if isinstance(problem, ShardedProblem):
        found = sharded_split.check(plan, problem)
        found += profiled.sharded_faults(problem, profiles, pool, optimizer, free)
        return found
    if isinstance(problem, PipelineProblem):
        wrong = profiled.pipeline_faults(problem, profiles, pool, free)
        return Verdict(wrong) if wrong else pipeline.check(plan, problem)
    wrong = profiled.parallel_faults(problem, profiles, pool, free)
    return Verdict(wrong + parallel.check(plan, problem))


def confirm(
    plan: Plan,
    problem: Problem,
    profiles: Sequence[Profile],
    pool: Cluster,
    optimizer: OptimizerState | None = None,
    memory_reserve_bytes: int = 0,
) -> None:
    """Refuse a plan of our own solvers that fails its check. Arguments as ``faults_against``.

    Raises:
        BackendError: The plan fails its check, which is a bug.
    """
    faults = faults_against(plan, problem, profiles, pool, optimizer, memory_reserve_bytes)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")


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
) -> Problem:
    """Rebuild the problem that a plan answers, with the numbers of these profiles.

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
    from .parallel_problem import parallel_problem
    from .pipeline_problem import pipeline_problem
    from .split_problem import sharded_problem, split_problem

    batch, free = plan.global_batch_size, memory_reserve_bytes
    nodes, between = plan.uniform_virtual_nodes, any(group.interpolated for group in plan.groups)
    if plan.shard is not None:
        only = plan.restrictions and plan.restrictions.shard
        shards = (only,) if only else get_args(Shard)
        return sharded_problem(profiles, pool, batch, shards, nodes, between, optimizer, free)
    if not plan.layers:
        return split_problem(profiles, pool, batch, nodes, between, optimizer, free)
    if plan.stage_cost is None:
        chunks = {plan.num_model_chunks, *(other.num_model_chunks for other in plan.alternatives)}
        return parallel_problem(
            profiles,
            pool,
            batch,
            link_bytes_per_second=link,
            recompute=any(stage.recompute != "none" for stage in plan.stages),
            optimizer=optimizer,
            num_model_chunks=tuple(sorted(chunks)),
            memory_reserve_bytes=free,
            sequence_parallel=bool(plan.sequence_parallel),
            shard_optimizer=bool(plan.shard_optimizer),
        )
    return pipeline_problem(
        profiles,
        pool,
        batch,
        microbatch_size=plan.microbatch_size,
        link_bytes_per_second=link,
        optimizer=optimizer,
        memory_reserve_bytes=free,
        schedule=plan.schedule,
        stage_cost=plan.stage_cost,
        solved=plan.solved or "flat",
        workers=plan.workers or "at_most",
        recompute=plan.recomputes,
        objective=plan.objective if plan.traits.flushes and plan.objective != "waste" else None,
        num_model_chunks=plan.num_model_chunks if plan.traits.takes_chunks else None,
    )
