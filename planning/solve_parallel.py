"""Plan pipeline, tensor and data parallelism together."""

import logging
from dataclasses import replace
from functools import partial

from ..schema.cluster import Cluster
from ..schema.errors import InfeasibleError, ProblemError
from ..schema.layers import LayerTrace, cannot_spread
from ..schema.options import Shard, option
from ..schema.parallel import ParallelProblem, parallel_schedule
from ..schema.plan import Plan
from ..schema.problem import Problem
from ..schema.requests.solve import SolveRequest
from ..schema.schedule import traits
from .apart import Apart, parts_to_tell_apart, told_apart
from .limits import TimeShares
from .parallel_problem import chunks_of, degrees_of, parallel_keys, parallel_problem
from .pipelines import say_obstacle, trace_for, with_origin
from .pool_parts import Parts, best_of_parts, parts_of
from .request import Question

_log = logging.getLogger("hetflow")


def best_parallel(question: Question, clock: TimeShares) -> Plan:
    """Find the plan with the shortest step; with ``top``, the Pareto table too.

    A pipeline that shares states is such a plan, whose stages no group of devices shares.

    Raises:
        ProblemError: Profiles, pool and flags do not fit together; or stages of the schedule that
            was asked for share no states.
        InfeasibleError: No plan fits the memory.
    """
    from ..solvers.parallel.pareto import alternatives, gains

    asked = question.asked
    trace = trace_for(question)
    others_follow = asked.top > 1
    try:
        own = clock.part(1 + others_follow)
        pool, problem, plan, apart = _in_the_best_part(question, trace, own)
    except InfeasibleError:
        alone = asked.strategy == "pipeline" or asked.sequence_parallel is not None
        if alone or not _spreadable(question):
            raise
        # The tokens of norms and residuals may be what does not fit.
        spread = replace(asked, sequence_parallel=True)
        return best_parallel(replace(question, asked=spread), clock)
    for line in _unused_degrees(question) if asked.strategy != "pipeline" else ():
        _log.warning(line)
    say_obstacle(trace, len(plan.stages))
    problem = replace(problem, shards=(plan.shared_states,))  # of one kind with the plan
    others = alternatives(problem, plan, asked.top - 1, clock.part(2).effort)
    degrees = {size.tensor_parallel_size for size in problem.sizes}
    if degrees == {1} and asked.strategy == "parallel":
        _log.info(
            f"the profiles hold no tensor_layers{_why_none(question)}: tensor-parallel degrees "
            "above 1 are not tried"
        )
    more = gains(problem, plan, clock.effort) if others_follow else ()
    whole = replace(plan, alternatives=others, with_more_devices=more)
    if apart is not None:
        whole = apart.by_device(whole)
    whole = replace(
        whole,
        alternatives=tuple(
            replace(
                one, predicted=one.predicted.at(question.pool.hourly_dollars(one.devices_by_type))
            )
            for one in whole.alternatives
            if one.predicted is not None
        ),
        sequence_parallel=asked.sequence_parallel or None,
        link_bytes_per_second=asked.link_bytes_per_second,
        cluster=pool,  # always stated: degrees depend on the servers
    )
    return replace(with_origin(whole, replace(question, pool=pool)), trace=trace)


def _in_the_best_part(
    question: Question, trace: LayerTrace | None, clock: TimeShares
) -> tuple[Cluster, ParallelProblem, Plan, Apart | None]:
    """The fastest plan of the pool or a part: the part, its problem, how it is told apart."""
    # The plan's bound is that of all of them.
    from ..solvers.parallel.solve import least_seconds, solve

    problem, own = question.problem, _view(question.problem, question.asked, trace)
    pools = parts_of(
        question.pool,
        partial(parallel_keys, problem),
        degrees=degrees_of(question.profiles),
    )
    unlike = parts_to_tell_apart(question.pool)
    views: dict[int, tuple[ParallelProblem, Apart | None]] = {id(question.pool): (own, None)}

    def view(part: Cluster) -> tuple[ParallelProblem, Apart | None]:
        if id(part) not in views:
            of_part = replace(problem, pool=part)
            apart = told_apart(of_part) if any(part is each for each in unlike.apart) else None
            of_part = of_part if apart is None else apart.problem
            views[id(part)] = _view(of_part, question.asked, trace), apart
        return views[id(part)]

    def solved(part: Cluster, share: TimeShares) -> Plan:
        try:
            seen, _ = view(part)
        except ProblemError as error:  # a link that is told of the whole pool alone
            raise InfeasibleError(error.message, hint=error.hint) from None
        return solve(seen, effort=share.effort(), chunked=share.effort(2))

    pool, plan = best_of_parts(
        Parts(pools.pools, pools.are_all and unlike.are_all, unlike.apart),
        clock,
        solved,
        lambda part: least_seconds(own, part.num_devices),
    )
    seen, apart = view(pool)
    return pool, seen, plan, apart


def _view(problem: Problem, asked: SolveRequest, trace: LayerTrace | None) -> ParallelProblem:
    return parallel_problem(
        problem,
        microbatch_size=asked.microbatch_size,
        recompute=asked.recompute,
        most_stages=1 if asked.sequence_parallel and cannot_spread(trace) else None,
        num_model_chunks=_chunks(asked),
        sequence_parallel=bool(asked.sequence_parallel),
        tensor_parallel=asked.strategy != "pipeline",
        shards=_shards(asked),
    )


def _chunks(asked: SolveRequest) -> tuple[int, ...]:
    """Numbers of stages a device to try; of a pipeline, those of its schedule."""
    plain, chunked = (traits(parallel_schedule(is_chunked=more)) for more in (False, True))
    if asked.strategy != "pipeline" or asked.schedule == "auto":
        return chunks_of(asked.num_model_chunks)
    if asked.schedule not in (plain.name, chunked.name):
        why = f"stages that share states are planned for {plain.name} and {chunked.name}"
        if not traits(asked.schedule).flushes:
            why = "it updates between passes, some of which still read the weights of before"
        raise ProblemError(
            f"{option('shard', asked.shard)} with {option('schedule', asked.schedule)}: {why}",
            hint=f"take {option('schedule', plain.name)}, or {option('shard', 'none')}",
        )
    only = asked.num_model_chunks
    if asked.schedule == chunked.name:
        return chunked.num_model_chunks if only is None else (only,)
    if only not in (None, 1):
        raise ProblemError(
            f"{option('num_model_chunks', only)} is for schedule {chunked.name}",
            hint=f"add {option('schedule', chunked.name)}",
        )
    return (1,)


def _shards(asked: SolveRequest) -> tuple[Shard | None, ...]:
    """What replicas of a stage may share. Sums for owners are never slower than whole ones."""
    if asked.shard == "auto":
        return (None, "gradients", "all")
    if asked.shard == "none":
        return ("optimizer" if asked.shard_optimizer else None,)
    return (asked.shard,)


def _why_none(question: Question) -> str:
    """What estimated profiles say about why no layer can be shared, in brackets."""
    said = {
        str((profile.provenance or {}).get("tensor_layers", "")).removeprefix("none: ")
        for profile in question.profiles_in_pool
    } - {""}
    return f" ({'; '.join(sorted(said))})" if said else ""


def _spreadable(question: Question) -> bool:
    """Whether all profiles in use with degrees above 1 have them with sequence parallelism too."""
    # Otherwise stages could not be launched so.
    if cannot_spread(trace_for(question)):
        return False
    tables = [bool(p.sequence_layers) for p in question.profiles_in_pool if p.tensor_layers]
    return bool(tables) and all(tables)


def _unused_degrees(question: Question) -> list[str]:
    """Say which profiled tensor-parallel degrees no server of the pool can hold."""
    lines = []
    for name, known in degrees_of(question.profiles_in_pool).items():
        width = max(group.devices.get(name, 0) for group in question.pool.servers)
        unused = sorted(degree for degree in known if degree > width)
        if unused:
            fitting = ", ".join(str(degree) for degree in sorted(known - set(unused)))
            lines.append(
                f"{name}: tensor-parallel degrees {', '.join(map(str, unused))} do not "
                f"fit into servers of {width}; planned: {fitting or 'none'}"
            )
    return lines
