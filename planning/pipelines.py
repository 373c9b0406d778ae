"""Plan pipelines: compare planners, schedules, microbatch sizes and parts of the pool."""

import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path

from ..schema.cluster import Cluster
from ..schema.errors import HetflowError, InfeasibleError, ProblemError
from ..schema.layers import LayerTrace
from ..schema.options import option, told
from ..schema.pipeline import Objective
from ..schema.plan import Plan
from ..schema.schedule import SCHEDULES, traits
from ..solvers.effort import Effort
from ..solvers.methods import METHODS
from ..solvers.pipeline.simplest import simplest_of
from .limits import TimeShares
from .links import PoolLinks, links_of
from .pipeline_problem import capacity_seconds, pipeline_keys, pipeline_problem
from .pool_parts import best_of_parts, parts_of
from .request import Question

_log = logging.getLogger("hetflow")


def check_flags(question: Question) -> None:
    """Refuse a schedule that the planner of repetitive models does not plan.

    Raises:
        ProblemError: The schedule is none that is double buffered; the hint names one.
    """
    flags = question.asked
    if not flags.repetitive:
        return
    if flags.schedule == "auto" or not traits(flags.schedule).is_double_buffered:
        raise ProblemError(
            f"{option('repetitive')} plans schedule 2bw (thesis 3.3), not {flags.schedule}",
            hint=told("add {schedule=2bw}"),
        )


def best_pipeline(question: Question, clock: TimeShares) -> Plan:
    """Find the best pipeline plan for the requested schedule.

    With the schedule ``auto``, the best of all schedules that flush.

    Raises:
        ProblemError: Profiles, pool and flags do not fit together.
        InfeasibleError: No plan fits the devices' memory or number.
    """
    check_flags(question)
    if question.asked.stage_cost == "ring" and not question.asked.repetitive:
        plan = _in_the_best_part(question, clock)
    else:
        plan = _best(question, clock)
    _say_links(question)
    say_obstacle(plan.trace, len(plan.stages))
    _say_what_is_simpler(plan)
    return plan


def _in_the_best_part(question: Question, clock: TimeShares) -> Plan:
    """The best plan of the pool and of its parts without slow links."""

    def within(part: Cluster) -> Question:
        return dataclasses.replace(question, pool=part)

    def least_seconds(part: Cluster) -> float:
        found = inf
        for size in _microbatch_sizes(question):
            try:
                view = pipeline_problem(within(part).problem, microbatch_size=size)
            except InfeasibleError:
                return 0.0  # its own search says what is missing
            inputs = 1 if _objective(question) == "bottleneck" else view.num_microbatches
            found = min(found, inputs * capacity_seconds(view))
        return found

    pools = parts_of(
        question.pool,
        partial(pipeline_keys, question.problem),
        levels_of=lambda part: _links(within(part)).levels,
    )
    _, plan = best_of_parts(
        pools, clock, lambda part, share: _best(within(part), share), least_seconds
    )
    return plan


def _say_what_is_simpler(plan: Plan) -> None:
    least = (plan.provenance or {}).get("fastest")
    if least is None or plan.proof.tolerance is None:
        return
    apart = [
        f" {word} {least[key]}"
        for word, key, own in (
            ("under", "schedule", plan.schedule),
            ("with microbatches of", "microbatch_size", plan.microbatch_size),
        )
        if least.get(key, own) != own
    ]
    _log.info(
        f"the fastest pipeline on paper, {least['config']}{''.join(apart)}, is predicted at "
        f"{least['step_seconds'] * 1e3:.4g} ms; the one taken, {plan.config}, is simpler at "
        f"{plan.predicted.step_seconds * 1e3:.4g} ms, within the {plan.proof.tolerance:.1%} that "
        f"the measurements cannot tell ({option('fastest', True)} takes the other)"
    )


def _best(question: Question, clock: TimeShares) -> Plan:
    asked = question.asked.schedule
    sizes = _microbatch_sizes(question)
    if question.asked.repetitive:
        return _repetitive(question, sizes)
    if asked == "auto":
        return _best_schedule(question, sizes, clock)
    return _scheduled(question, asked, sizes, clock)


def _repetitive(question: Question, microbatch_sizes: Sequence[int]) -> Plan:
    """Ask PipeDream-2BW's planner, for a model of repeating layers on a pool of one type."""
    asked, problem = question.asked, question.problem
    problems = {
        size: pipeline_problem(
            problem, microbatch_size=size, schedule=asked.schedule, recompute=None
        )
        for size in microbatch_sizes
        if asked.batch_size % size == 0
    }
    if not problems:
        raise ProblemError(
            f"no profiled microbatch ({', '.join(map(str, microbatch_sizes))}) divides a global "
            f"batch of {asked.batch_size}",
            hint="use another batch, or profile the layers at other microbatch sizes",
        )
    plan = METHODS.get("pipedream-2bw-repetitive")(
        problems,
        cost_model=asked.cost_model,
        runs=None if asked.runs is None else Path(asked.runs),
    )
    return with_origin(plan, question)


def _best_schedule(question: Question, sizes: list[int], clock: TimeShares) -> Plan:
    """Find the best plan over all schedules that flush, which all train to the same result."""
    plans: list[Plan] = []
    refusals: list[HetflowError] = []
    tried = [known for known in SCHEDULES.all() if known.plannable and known.flushes]
    for number, known in enumerate(tried):
        schedule = known.name
        if question.asked.num_model_chunks is not None and not known.takes_chunks:
            continue
        try:
            others_left = (len(tried) - number - 1) * len(sizes)
            plans.append(_scheduled(question, schedule, sizes, clock, others_left))
        except (InfeasibleError, ProblemError) as error:
            refusals.append(error)
            _log.info(f"{schedule}: {error.message}")
    if not plans:
        raise refusals[0]
    best = simplest_of(plans)
    others = [plan for plan in plans if plan.schedule != best.schedule]
    others.sort(key=lambda plan: plan.predicted.step_seconds)
    compared = []
    for other in others:
        gain = other.predicted.step_seconds / best.predicted.step_seconds - 1
        kind = "faster" if gain >= 0 else "slower"
        _log.info(f"{best.schedule} is {abs(gain):.1%} {kind} than {other.schedule}")
        compared.append({"schedule": other.schedule, "step_seconds": other.predicted.step_seconds})
    origin = {**(best.provenance or {}), "compared_schedules": compared}
    return dataclasses.replace(best, provenance=origin)


def _scheduled(
    question: Question,
    schedule: str,
    sizes: list[int],
    clock: TimeShares,
    others_left: int = 0,
) -> Plan:
    """Find the best plan of one schedule over microbatch sizes."""
    # ``others_left`` is the number of searches that follow and must share the time limit.
    plans: dict[int, Plan] = {}
    refusals: list[HetflowError] = []
    for number, size in enumerate(sizes):
        effort = clock.effort(others_left + len(sizes) - number)
        try:
            plans[size] = _pipeline_at(question, schedule, size, effort)
        except (InfeasibleError, ProblemError) as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    best = simplest_of(list(plans.values()))
    if len(sizes) > 1:
        tried = ", ".join(
            f"{size}: {plans[size].predicted.step_seconds * 1e3:.1f} ms"
            if size in plans
            else f"{size}: no plan"
            for size in sorted(sizes)
        )
        least = min(plan.predicted.step_seconds for plan in plans.values())
        why = "the fastest" if best.predicted.step_seconds <= least else "as good as the fastest"
        _log.info(f"microbatches of {best.microbatch_size} are {why} of those profiled ({tried})")
    return best


def _microbatch_sizes(question: Question) -> list[int]:
    """List the microbatch sizes to try, out of those profiled on all device types of the pool."""
    # If a size was requested, the nearest profiled one; else all. Without a common profiled size,
    # the requested one (or 1), so that the solver reports what is missing.
    tables = [{t.microbatch_size for t in p.layer_tables} for p in question.profiles_in_pool]
    common = sorted(set.intersection(*tables)) if tables else []
    asked = question.asked.microbatch_size
    if not common:
        return [asked or 1]  # the solver's own checks say what is missing
    if asked is None:
        return common
    nearest = min(common, key=lambda size: (abs(size - asked), size))
    if nearest != asked:
        known = ", ".join(map(str, common))
        if question.fixes_microbatches:
            raise ProblemError(
                f"{option('microbatch_size', asked)}: layers are profiled at {known}",
                hint="take one of these, or profile that one",
            )
        _log.warning(f"layers are profiled at {known}: took microbatches of {nearest}, not {asked}")
    return [nearest]


def _say_links(question: Question) -> None:
    """Log which bandwidths were assumed for links that the pool does not state."""
    links = _links(question)
    for sentence in links.measured:
        _log.info(sentence)
    if question.asked.link_bytes_per_second is None:
        for sentence in links.assumed:
            _log.warning(f"{sentence}: not measured itself; if it is another, state it")


def _objective(question: Question) -> Objective | None:
    """The objective that was asked for; None leaves it to the schedule."""
    if question.asked.objective == "bottleneck":
        return "bottleneck"
    return "step_seconds" if "objective" in question.asked.stated else None


def _pipeline_at(question: Question, schedule: str, microbatch_size: int, effort: Effort) -> Plan:
    """Cut the model into stages; the published prices are solved by level."""
    from ..solvers.pipeline.solve import solve

    asked, nested = question.asked, question.asked.stage_cost == "published"
    problem = question.problem
    view = pipeline_problem(
        problem,
        microbatch_size=microbatch_size,
        schedule=schedule,
        stage_cost=asked.stage_cost,
        solved="nested" if nested else "flat",
        recompute=False if nested else None,
        launchable=not nested,
        num_stages=asked.num_stages,
        replication=asked.replication,
        objective=_objective(question),
        num_model_chunks=asked.num_model_chunks,
    )
    plan = solve(view, effort=effort, fastest=asked.fastest)
    return with_origin(plan, question)


def with_origin(plan: Plan, question: Question) -> Plan:
    """Add to a plan how its layers were found, what links were assumed, and its provenance."""
    return dataclasses.replace(
        plan,
        trace=trace_for(question),
        assumptions=_links(question).assumed,
        provenance={**(plan.provenance or {}), "pool": question.pool_name},
    )


def trace_for(question: Question) -> LayerTrace | None:
    """Return how the layers were traced, which is alike on all device types of the pool."""
    # If a type was traced in a way that cannot be launched, that trace is returned.
    found = [profile.layers.trace for profile in question.profiles_in_pool if profile.layers]
    blocked = [trace for trace in found if trace is not None and trace.obstacle is not None]
    return [*blocked, *found][0]


def say_obstacle(trace: LayerTrace | None, num_stages: int) -> None:
    """Warn of a plan whose stages cannot be launched."""
    if num_stages > 1 and trace is not None and trace.obstacle is not None:
        _log.warning(f"the plan cannot be launched: its layers were {trace.obstacle}")


def _links(question: Question) -> PoolLinks:
    """Return the bandwidths of the pool's links, measured or assumed."""
    asked = question.asked.link_bytes_per_second
    return links_of(question.problem.used, question.pool, asked)
