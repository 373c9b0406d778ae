"""Plan pipeline, tensor and data parallelism, and check the plan."""

import logging
from dataclasses import replace
from math import inf

from ..schema.cluster import Cluster
from ..schema.errors import BackendError, InfeasibleError
from ..schema.layer_trace import LayerTrace, cannot_spread
from ..schema.parallel import ParallelPlan, ParallelProblem, parallel_schedule
from ..schema.schedule_traits import traits
from .limits import Clock
from .parallel_problem import degrees_of, parallel_problem, slowest_rates
from .plan_dollars import priced
from .pool_parts import among_parts, parts_of
from .request import SolveRequest
from .solve_pipeline import links_between, say_obstacle, trace_for

_log = logging.getLogger("hetflow")


def best_parallel(request: SolveRequest, clock: Clock) -> ParallelPlan:
    """Find and check the plan with the shortest step; with ``top``, the Pareto table too.

    Args:
        request: The request for a plan.
        clock: Shares a time limit with other searches.

    Raises:
        ProblemError: Profiles, pool and flags do not fit together.
        InfeasibleError: No plan fits the memory.
        BackendError: The plan fails its check, which is a bug.
    """
    from ..checks.parallel import check
    from ..checks.profiled import parallel_faults
    from ..solvers.parallel.pareto import alternatives, gains

    asked = request.pipeline
    trace = trace_for(request.profiles, request.pool)
    others_follow = request.top > 1
    try:
        own = clock.part(1 + others_follow)
        pool, problem, plan = _in_the_best_part(request, trace, own)
    except InfeasibleError:
        if request.parallel.sequence_parallel is not None or not _spreadable(request):
            raise
        # The tokens of norms and residuals may be what does not fit.
        options = replace(request.parallel, sequence_parallel=True)
        return best_parallel(replace(request, parallel=options), clock)
    for line in _unused_degrees(problem):
        _log.warning(line)
    say_obstacle(trace, len(plan.stages))
    others = alternatives(problem, plan, request.top - 1, clock.part(2).effort)
    degrees = {size.tensor_parallel_size for size in problem.sizes}
    if degrees == {1} and request.strategy == "parallel":
        _log.info(
            f"the profiles hold no tensor_layers{_why_none(request)}: tensor-parallel degrees "
            "above 1 are not tried"
        )
    whole = replace(
        plan,
        alternatives=tuple(
            replace(one, predicted=priced(one.predicted, one.devices_by_type, request.pool))
            for one in others
        ),
        with_more_devices=gains(problem, plan, clock.effort) if others_follow else (),
        sequence_parallel=request.parallel.sequence_parallel or None,
        link_bytes_per_second=asked.link_bytes_per_second,
        assumptions=links_between(request.profiles, pool, asked.link_bytes_per_second).assumed,
        trace=trace,
        cluster=pool,  # always stated: degrees depend on the servers
        provenance={"pool": request.pool_name},
    )
    faults = parallel_faults(problem, request.profiles, pool, request.memory_reserve_bytes)
    faults += check(whole, problem)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")
    return whole


def _in_the_best_part(
    request: SolveRequest, trace: LayerTrace | None, clock: Clock
) -> tuple[Cluster, ParallelProblem, ParallelPlan]:
    """The fastest plan of the pool and of its parts with faster links: (part, its problem, plan).

    The plan's bound is that of all of them.

    Raises:
        InfeasibleError: No plan fits; says what the whole pool lacks.
        BackendError: The limit of time came before there was a plan.
    """
    from ..solvers.parallel.solve import least_seconds, solve

    said = request.pipeline.link_bytes_per_second
    pools = parts_of(
        request.pool,
        lambda pool: slowest_rates(request.profiles, pool, said),
        degrees_of(request.profiles),
    )
    best: tuple[Cluster, ParallelProblem, ParallelPlan] | None = None
    bounds: list[float | None] = []
    refused: InfeasibleError | BackendError | None = None
    whole_seconds = inf
    for number, pool in enumerate(pools):
        problem = _problem(request, pool, trace)
        least = least_seconds(problem)
        if best is not None and least >= best[2].predicted.step_seconds:
            continue
        share = clock.part(len(pools) - number)
        if best is not None and share.effort().should_stop():
            bounds.append(least)
            continue
        try:
            plan = solve(problem, effort=share.effort(), chunked=share.effort(2))
        except InfeasibleError as error:
            refused = refused or error
            continue
        except BackendError as error:  # stopped before it had a plan
            bounds.append(least)
            refused = refused or error
            continue
        bounds.append(plan.proof.lower_bound)
        if number == 0:
            whole_seconds = plan.predicted.step_seconds
        if best is None or plan.predicted.step_seconds < best[2].predicted.step_seconds:
            best = pool, problem, plan
    if best is None:
        assert refused is not None
        raise refused
    pool, problem, plan = best
    if pool is not request.pool:
        step = plan.predicted.step_seconds
        others = "no plan fits" if whole_seconds == inf else f"a step takes {whole_seconds:.4g} s"
        _log.info(
            f"the plan is for {pool.title} of the pool, with a step of {step:.4g} s: over all its "
            f"devices and links {others}"
        )
    return pool, problem, among_parts(plan, bounds)


def _problem(request: SolveRequest, pool: Cluster, trace: LayerTrace | None) -> ParallelProblem:
    asked = request.pipeline
    return parallel_problem(
        request.profiles,
        pool,
        request.batch_size,
        microbatch_size=asked.microbatch_size,
        link_bytes_per_second=asked.link_bytes_per_second,
        recompute=request.parallel.recompute,
        optimizer=request.optimizer,
        most_stages=1 if request.parallel.sequence_parallel and cannot_spread(trace) else None,
        num_model_chunks=_chunks(asked.num_model_chunks),
        memory_reserve_bytes=request.memory_reserve_bytes,
        sequence_parallel=bool(request.parallel.sequence_parallel),
        shard_optimizer=request.parallel.shard_optimizer,
    )


def _why_none(request: SolveRequest) -> str:
    """What estimated profiles say about why no layer can be shared, in brackets."""
    said = {
        str((profile.provenance or {}).get("tensor_layers", "")).removeprefix("none: ")
        for profile in request.profiles
        if profile.device_type in request.pool.num_devices
    } - {""}
    return f" ({'; '.join(sorted(said))})" if said else ""


def _chunks(asked: int | None) -> tuple[int, ...]:
    """Numbers of stages per device to try; without a request 1 and those of interleaved 1F1B."""
    return (
        (1, *traits(parallel_schedule(is_chunked=True)).num_model_chunks)
        if asked is None
        else (asked,)
    )


def _spreadable(request: SolveRequest) -> bool:
    """Whether all profiles in use with degrees above 1 have them with sequence parallelism too.

    False where stages could not be launched so.
    """
    if cannot_spread(trace_for(request.profiles, request.pool)):
        return False
    used = [p for p in request.profiles if p.device_type in request.pool.num_devices]
    tables = [bool(profile.sequence_layers) for profile in used if profile.tensor_layers]
    return bool(tables) and all(tables)


def _unused_degrees(problem: ParallelProblem) -> list[str]:
    """Say which profiled tensor-parallel degrees no server can hold."""
    lines = []
    for pool in problem.pools:
        width, known = pool.devices_per_server, {t.tensor_parallel_size for t in pool.times}
        unused = sorted(degree for degree in known if width % degree)
        if unused:
            fitting = ", ".join(str(degree) for degree in sorted(known - set(unused)))
            nearest = -(-width // unused[0]) * unused[0]
            lines.append(
                f"{pool.device_type}: tensor-parallel degrees {', '.join(map(str, unused))} do not "
                f"divide servers of {width}; planned: {fitting or 'none'} (servers of {nearest} "
                f"would take {unused[0]})"
            )
    return lines
