"""Choose the simplest of the plans that the measurements cannot tell apart.

A step that is predicted from measured terms may be off by ``step_error``. Plans whose predicted
step is within that error of the shortest, and little slower (``MOST_GIVEN_UP``), cannot be told
apart from it. Of them we take the plan with the fewest stages, then the fewest devices, since fewer
processes can fail. Plans of one stage, replicated or on one device, are among them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...schema.errors import BackendError, InfeasibleError
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan, Proof
from ...schema.schedule import SCHEDULES
from ..effort import DEFAULT, MOST_GIVEN_UP, Effort

Solve = Callable[[PipelineProblem], Plan]

_EQUAL = 1e-9


def simplest(
    problem: PipelineProblem,
    solve: Solve,
    *,
    effort: Effort = DEFAULT,
    most_given_up: float = MOST_GIVEN_UP,
) -> Plan:
    """The simplest plan within the error of the shortest step; the shortest if no error is known.

    As exact as ``solve``: with a plan of every problem it has the fewest stages, and then the
    fewest devices, that have a step within the error. A search that is stopped, or gives up early,
    may leave a simpler plan unfound, never take one beyond the error.

    ``most_given_up`` is how much slower on paper the simplest may be, relative to the least.
    """
    best = solve(problem)
    if problem.step_error is None or problem.solved == "nested":
        return best
    error = min(problem.step_error, most_given_up)
    most = best.proof.objective * (1 + error)
    chosen, asked = best, problem
    if problem.num_stages is None:
        chosen = _least_number(
            lambda count: replace(problem, most_stages=count),
            len(best.stages),
            solve,
            most,
            best,
            effort,
        )
        # The fewest devices are looked for at this number of stages.
        asked = replace(problem, most_stages=len(chosen.stages))
    if problem.workers == "at_most":
        chosen = _least_number(
            lambda count: replace(asked, most_devices=count),
            chosen.num_devices,
            solve,
            most,
            chosen,
            effort,
        )
    return _proved(chosen, best, error)


def simplest_of(plans: Sequence[Plan]) -> Plan:
    """Of plans of several schedules or microbatch sizes, the simplest that is as good as the least.

    Each is ``simplest`` of its own question, so the least step on paper may be that of a plan that
    it stands for. Fewer stages are simpler, then fewer devices, then 1F1B (it holds least), then
    larger microbatches, of which there are fewer. Where no error is known only equal steps count.

    Returns:
        One of the plans; where another is faster on paper, ``provenance.fastest`` describes that.
    """
    best = min(plans, key=lambda plan: _fastest(plan)["step_seconds"])
    least, error = _fastest(best), best.proof.tolerance
    most = least["step_seconds"] * (1 + max(error or 0.0, _EQUAL))
    near = [plan for plan in plans if plan.predicted.step_seconds <= most]
    chosen = min(near, key=_complexity if error is not None else _order)
    if least["step_seconds"] * (1 + _EQUAL) >= chosen.predicted.step_seconds:
        return chosen
    return replace(chosen, provenance={**(chosen.provenance or {}), "fastest": least})


def _fastest(plan: Plan) -> dict[str, Any]:
    """The least plan of the question that a plan answers."""
    of_plan = {"schedule": plan.schedule, "microbatch_size": plan.microbatch_size}
    own = {"config": plan.config, "step_seconds": plan.predicted.step_seconds}
    return {**own, **(plan.provenance or {}).get("fastest", {}), **of_plan}


def _complexity(plan: Plan) -> tuple[int, int, tuple[bool, int, int]]:
    return len(plan.stages), plan.num_devices, _order(plan)


def _order(plan: Plan) -> tuple[bool, int, int]:
    place = SCHEDULES.names().index(plan.schedule)
    return plan.traits.order != "alternating", place, -plan.microbatch_size


def _least_number(
    limited: Callable[[int], PipelineProblem],
    high: int,
    solve: Solve,
    most: float,
    chosen: Plan,
    effort: Effort,
) -> Plan:
    """The plan under the lowest limit with which one takes at most so long, by halving."""
    # Under a higher limit no plan is slower, so halving finds it. ``chosen`` keeps to ``high``.
    low = 1
    while low < high and not effort.should_stop():
        middle = (low + high) // 2
        found = _within(limited(middle), solve, most)
        if found is None:
            low = middle + 1
        else:
            chosen, high = found, middle
    return chosen


def _within(problem: PipelineProblem, solve: Solve, most: float) -> Plan | None:
    try:
        found = solve(problem)
    except (InfeasibleError, BackendError):
        return None
    return found if found.proof.objective <= most else None


def _proved(chosen: Plan, best: Plan, error: float) -> Plan:
    """The plan with its proof: the bound of the shortest plan, and the tolerance."""
    if chosen is best:
        return replace(best, proof=replace(best.proof, tolerance=error))
    claim = (
        f"; optimal for these numbers are {best.config} at {best.predicted.step_seconds:.6g} s, "
        f"which within {error:.1%} measurements cannot tell from this simpler plan"
    )
    objective, bound = chosen.proof.objective, best.proof.lower_bound
    gap = None
    if bound is not None:
        gap = max(0.0, (objective - bound) / objective) if objective > 0 else 0.0
    proof = Proof(
        termination=best.proof.termination,
        objective=objective,
        lower_bound=bound,
        gap=gap,
        method=chosen.proof.method + claim,
        tolerance=error,
    )
    least = {"config": best.config, "step_seconds": best.predicted.step_seconds}
    return replace(chosen, proof=proof, provenance={"fastest": least})
