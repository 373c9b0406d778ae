"""The least plan where passes cost less in a stage that holds all layers.

Sending and receiving a message takes time on both sides: threads wake and bytes are copied. The
cost of a pass beside its layers was measured with a message beside it (``pass_seconds``) and, in
one stage of all layers, without one (``lone_pass_seconds``, never more). The search uses a single
such cost, so plans of one stage are searched separately, at their own cost.
"""

from collections.abc import Callable
from dataclasses import replace

from ...planning.costs.pipeline import fixed_seconds, slowest_of_all
from ...schema.errors import BackendError, HetflowError, InfeasibleError, ProblemError
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan
from ..effort import Effort
from .prediction import predicted, with_proof

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


# The least step where device types have unlike fixed costs.
#
# The search leaves out fixed costs, which are equal for all plans on one type. A plan on several
# types pays the largest fixed cost of its types. So for each distinct fixed cost we search the
# plans on the types whose fixed cost is at most that, add the cost, and take the shortest of these
# steps.

"""The least plan of a problem without its steps' fixed cost."""


def least_with_fixed(problem: PipelineProblem, search: Search, effort: Effort) -> Plan:
    """The least plan, the step's fixed cost included.

    After the limit of ``effort`` no fewer types are searched. No plan on some of the types beats
    the bound of all of them.

    Raises:
        InfeasibleError: No types of devices have a plan.
        BackendError: The search was stopped before it had one.
    """
    costs = sorted({fixed_seconds(problem, {pool.device_type}) for pool in problem.pools})
    is_one = len(costs) == 1 or problem.workers == "exactly" or problem.minimises != "step_seconds"
    if is_one:
        return predicted(problem, search(problem))
    plans: list[Plan] = []
    bounds, of_all = list[float](), 0.0
    refusals: list[HetflowError] = []
    for cost in reversed(costs):
        if plans and effort.should_stop():
            bounds.append(of_all + cost)
            continue
        try:
            plan = search(_without_dearer(problem, cost))
        except (InfeasibleError, ProblemError) as error:
            refusals.append(error)
            continue
        except BackendError as error:
            bounds.append(cost)
            refusals.append(error)
            continue
        if cost == costs[-1]:
            of_all = plan.proof.lower_bound or 0.0
        plans.append(predicted(problem, plan))
        bounds.append((plan.proof.lower_bound or 0.0) + cost)
    if not plans:
        raise _worst(refusals)
    best = min(plans, key=lambda plan: (plan.proof.objective, len(plan.stages), plan.num_devices))
    return with_proof(best, best.proof.objective, min(bounds))


def _without_dearer(problem: PipelineProblem, cost: float) -> PipelineProblem:
    pools = tuple(pool for pool in problem.pools if pool.fixed_seconds <= cost)
    # What tied weights cost depends on the links of all types, used or not.
    return replace(problem, pools=pools, tied_bytes_per_second=slowest_of_all(problem))


def _worst(refusals: list[HetflowError]) -> HetflowError:
    """The error to raise where no types have a plan: a stopped search, else why none exists."""
    stopped = [error for error in refusals if isinstance(error, BackendError)]
    return [*stopped, *refusals][0]
