"""Plan pipeline, tensor and data parallelism together."""

import logging
from dataclasses import replace
from functools import partial

from ..schema.cluster import Cluster
from ..schema.errors import InfeasibleError
from ..schema.layer_trace import LayerTrace, cannot_spread
from ..schema.parallel import ParallelProblem
from ..schema.plan import Plan
from .limits import TimeShares
from .parallel_problem import chunks_of, degrees_of, parallel_keys, parallel_problem
from .pipelines import say_obstacle, trace_for, with_origin
from .plan_dollars import priced
from .pool_parts import best_of_parts, parts_of
from .request import Question

_log = logging.getLogger("hetflow")


def best_parallel(question: Question, clock: TimeShares) -> Plan:
    """Find the plan with the shortest step; with ``top``, the Pareto table too.

    Raises:
        ProblemError: Profiles, pool and flags do not fit together.
        InfeasibleError: No plan fits the memory.
    """
    from ..solvers.parallel.pareto import alternatives, gains

    asked = question.asked
    trace = trace_for(question)
    others_follow = asked.top > 1
    try:
        own = clock.part(1 + others_follow)
        pool, problem, plan = _in_the_best_part(question, trace, own)
    except InfeasibleError:
        if asked.sequence_parallel is not None or not _spreadable(question):
            raise
        # The tokens of norms and residuals may be what does not fit.
        spread = replace(asked, sequence_parallel=True)
        return best_parallel(replace(question, asked=spread), clock)
    for line in _unused_degrees(problem):
        _log.warning(line)
    say_obstacle(trace, len(plan.stages))
    others = alternatives(problem, plan, asked.top - 1, clock.part(2).effort)
    degrees = {size.tensor_parallel_size for size in problem.sizes}
    if degrees == {1} and asked.strategy == "parallel":
        _log.info(
            f"the profiles hold no tensor_layers{_why_none(question)}: tensor-parallel degrees "
            "above 1 are not tried"
        )
    whole = replace(
        plan,
        alternatives=tuple(
            replace(one, predicted=priced(one.predicted, one.devices_by_type, question.pool))
            for one in others
            if one.predicted is not None
        ),
        with_more_devices=gains(problem, plan, clock.effort) if others_follow else (),
        sequence_parallel=asked.sequence_parallel or None,
        link_bytes_per_second=asked.link_bytes_per_second,
        cluster=pool,  # always stated: degrees depend on the servers
    )
    return replace(with_origin(whole, replace(question, pool=pool)), trace=trace)


def _in_the_best_part(
    question: Question, trace: LayerTrace | None, clock: TimeShares
) -> tuple[Cluster, ParallelProblem, Plan]:
    """The fastest plan of the pool and of its parts with faster links: (part, its problem, plan).

    The plan's bound is that of all of them.

    Raises:
        InfeasibleError: No plan fits; says what the whole pool lacks.
        BackendError: The limit of time came before there was a plan.
    """
    from ..solvers.parallel.solve import least_seconds, solve

    problems: dict[int, ParallelProblem] = {}

    def problem_of(pool: Cluster) -> ParallelProblem:
        if id(pool) not in problems:
            problems[id(pool)] = _view(replace(question, pool=pool), trace)
        return problems[id(pool)]

    pools = parts_of(
        question.pool,
        partial(parallel_keys, question.problem),
        degrees=degrees_of(question.profiles),
    )
    pool, plan = best_of_parts(
        pools,
        clock,
        lambda part, share: solve(problem_of(part), effort=share.effort(), chunked=share.effort(2)),
        lambda part: least_seconds(problem_of(question.pool), part.num_devices),
    )
    return pool, problem_of(pool), plan


def _view(question: Question, trace: LayerTrace | None) -> ParallelProblem:
    asked = question.asked
    return parallel_problem(
        question.problem,
        microbatch_size=asked.microbatch_size,
        recompute=asked.recompute,
        most_stages=1 if asked.sequence_parallel and cannot_spread(trace) else None,
        num_model_chunks=chunks_of(asked.num_model_chunks),
        sequence_parallel=bool(asked.sequence_parallel),
        shard_optimizer=asked.shard_optimizer or asked.shard_gradients,
        shard_gradients=asked.shard_gradients,
    )


def _why_none(question: Question) -> str:
    """What estimated profiles say about why no layer can be shared, in brackets."""
    said = {
        str((profile.provenance or {}).get("tensor_layers", "")).removeprefix("none: ")
        for profile in question.profiles_in_pool
    } - {""}
    return f" ({'; '.join(sorted(said))})" if said else ""


def _spreadable(question: Question) -> bool:
    """Whether all profiles in use with degrees above 1 have them with sequence parallelism too.

    False where stages could not be launched so.
    """
    if cannot_spread(trace_for(question)):
        return False
    tables = [bool(p.sequence_layers) for p in question.profiles_in_pool if p.tensor_layers]
    return bool(tables) and all(tables)


def _unused_degrees(problem: ParallelProblem) -> list[str]:
    """Say which profiled tensor-parallel degrees no server can hold."""
    lines = []
    for pool in problem.pools:
        width, known = pool.devices_per_server, {t.tensor_parallel_size for t in pool.times}
        unused = sorted(degree for degree in known if degree > width)
        if unused:
            fitting = ", ".join(str(degree) for degree in sorted(known - set(unused)))
            lines.append(
                f"{pool.device_type}: tensor-parallel degrees {', '.join(map(str, unused))} do not "
                f"fit into servers of {width}; planned: {fitting or 'none'}"
            )
    return lines
