"""Check a plan against the problem that it answers, made of profiles and a pool."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from ..schema.cluster import Cluster
from ..schema.errors import BackendError, ProblemError
from ..schema.optimizer import OptimizerState
from ..schema.options import Shard, option
from ..schema.parallel import ParallelProblem
from ..schema.pipeline import PipelineProblem
from ..schema.plan import ParallelCertificate, Plan, Restrictions, devices_for
from ..schema.problem import Problem, ShardedProblem, SplitProblem
from ..schema.profile import Profile, asked_bytes
from .apart import states_devices, told_apart
from .checks import plan as plan_checks
from .checks.proofs import Verdict, tolerance_faults
from .pool_parts import is_part_of

View = SplitProblem | PipelineProblem | ParallelProblem
"""What the solvers of a kind of plan see of a problem."""


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
    if profiles is None:
        found = _own_faults(plan)
    else:
        from .checks.profiled import stated_faults

        free, names = memory_reserve_bytes, [profile.device_type for profile in profiles]
        pool = None if pool is None else pool.spelled_as(names)
        judged = judged_pool(plan, pool).spelled_as(names)
        problem = Problem(
            profiles,
            judged,
            plan.global_batch_size,
            optimizer or plan.optimizer,
            asked_bytes(plan.reserves) if free is None else free,
            link_bytes_per_second or plan.link_bytes_per_second,
        )
        apart = told_apart(problem) if states_devices(plan) else None
        of_view = plan if apart is None else apart.by_server(plan)
        asked = problem if apart is None else apart.problem
        found = faults_against(of_view, view_of_plan(plan, asked), asked)
        if pool is not None and pool != judged and not plan.layers and plan.shard is None:
            from .checks.batch_split import bound_faults

            whole = view_of_plan(plan, replace(problem, pool=pool))
            assert isinstance(whole, SplitProblem)
            found += bound_faults(plan, whole)
        if pool not in (None, judged) and plan.layers:
            found.bound = "stated"  # other parts of the pool may have faster plans
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


def faults_against(plan: Plan, view: View, problem: Problem) -> Verdict:
    """List the faults of a plan against what its solver saw, and of that against the problem."""
    from .checks import profiled

    # Each judge is imported by the plans that it judges: together they take as long as the rest.
    if isinstance(view, SplitProblem):
        from .checks import batch_split, sharded_split

        if isinstance(view, ShardedProblem):
            found = sharded_split.check(plan, view)
        else:
            found = batch_split.check(plan, view)
            found += profiled.split_faults(plan, problem)
        found += profiled.split_view_faults(view, problem)
        return found
    if isinstance(view, PipelineProblem):
        from .checks import pipeline

        wrong = profiled.pipeline_faults(view, problem)
        return Verdict(wrong) if wrong else pipeline.check(plan, view)
    from .checks import parallel

    wrong = profiled.parallel_faults(view, problem)
    return Verdict(wrong) if wrong else parallel.check(plan, view)


def confirmed(plan: Plan, profiles: Sequence[Profile], pool: Cluster) -> Plan:
    """A plan of our own solvers, if it passes its check; its proof says how the bound is known.

    The question is the one that ``hetflow check`` asks of the plan's file, so both say the same.

    Raises:
        BackendError: The plan fails its check, which is a bug.
    """
    faults = faults_of_plan(plan, profiles, pool)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")
    return replace(plan, proof=replace(plan.proof, bound=faults.bound))


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


def _shards(plan: Plan) -> tuple[Shard | None, ...]:
    """What the replicas of a parallel plan's stages were free to share, or asked to."""
    proved = plan.proof.certificate
    if isinstance(proved, ParallelCertificate) and proved.shards:
        return proved.shards
    return ((plan.restrictions and plan.restrictions.shard) or plan.shared_states,)


def view_of_plan(plan: Plan, problem: Problem) -> View:
    """Make again what the solver of a plan saw of a problem: its shape and schedule are the plan's.

    Raises:
        ProblemError: The profiles do not fit the plan.
    """
    from .parallel_problem import chunks_of, parallel_problem
    from .pipeline_problem import pipeline_problem
    from .split_problem import split_problem

    if not plan.layers:
        between = any(group.interpolated for group in plan.groups)
        only = plan.restrictions and plan.restrictions.shard
        shards = () if plan.shard is None else (only,) if only else get_args(Shard)
        return split_problem(problem, plan.uniform_virtual_nodes, between, shards)
    if plan.stage_cost is None:
        asked = plan.restrictions or Restrictions()
        return parallel_problem(
            problem,
            microbatch_size=asked.microbatch_size,
            most_stages=asked.num_stages,
            recompute=asked.recompute is not False,
            num_model_chunks=chunks_of(asked.num_model_chunks),
            sequence_parallel=bool(plan.sequence_parallel),
            tensor_parallel=asked.tensor_parallel is not False,
            shards=_shards(plan),
        )
    return pipeline_problem(
        problem,
        microbatch_size=plan.microbatch_size,
        schedule=plan.schedule,
        stage_cost=plan.stage_cost,
        solved=plan.solved or "flat",
        workers=plan.workers or "at_most",
        recompute=plan.recomputes,
        objective=plan.objective if plan.traits.flushes and plan.objective != "waste" else None,
        num_model_chunks=plan.num_model_chunks if plan.traits.takes_chunks else None,
    )
