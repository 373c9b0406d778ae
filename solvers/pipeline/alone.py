"""The least plan where passes cost less in a stage that holds all layers.

Sending and receiving a message takes time on both sides: threads wake and bytes are copied. The
cost of a pass beside its layers was measured with a message beside it (``pass_seconds``) and, in
one stage of all layers, without one (``lone_pass_seconds``, never more). The search uses a single
such cost, so plans of one stage are searched separately, at their own cost.
"""

from collections.abc import Callable
from dataclasses import replace

from ...schema.errors import BackendError, InfeasibleError, ProblemError
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan
from .prediction import with_proof

Search = Callable[[PipelineProblem], Plan]
"""The least plan of a problem."""


def least_of_one_or_more(problem: PipelineProblem, search: Search) -> Plan:
    """The least plan of one stage, at its cost, or of several.

    Raises:
        InfeasibleError: There is no plan.
        BackendError: The search was stopped before it had one.
    """
    if not _differs(problem):
        return search(problem)
    if problem.stage_limit == 1:
        return search(alone(problem))
    best = search(problem)
    if problem.num_stages is not None:
        return best
    bound = best.proof.lower_bound
    try:
        single = search(alone(problem))
    except (InfeasibleError, ProblemError):
        return best
    except BackendError:
        return with_proof(best, best.proof.objective, 0.0)
    bounds = (bound, single.proof.lower_bound)
    least = None if None in bounds else min(found for found in bounds if found is not None)
    # A single stage was found dearer among all plans than it is: no other beats it then.
    is_single = single.proof.objective <= best.proof.objective
    chosen = single if is_single else best
    return with_proof(chosen, chosen.proof.objective, least)


def alone(problem: PipelineProblem) -> PipelineProblem:
    """The problem of one stage, whose passes have no messages beside them."""
    if not _differs(problem):
        return replace(problem, num_stages=1, most_stages=None)
    pools = tuple(
        replace(
            pool,
            pass_seconds=pool.pass_seconds
            if pool.lone_pass_seconds is None
            else pool.lone_pass_seconds,
            lone_pass_seconds=None,
        )
        for pool in problem.pools
    )
    return replace(problem, num_stages=1, most_stages=None, pools=pools)


def _differs(problem: PipelineProblem) -> bool:
    """Whether a single stage has a cost of its own."""
    prices_passes = problem.stage_cost == "ring" and problem.solved == "flat"
    return (
        prices_passes
        and problem.traits.flushes
        and any(pool.lone_pass_seconds is not None for pool in problem.pools)
    )
