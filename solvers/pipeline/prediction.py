"""What a problem knows of a step beside the stages' work, and the least plans that this decides.

Sending and receiving a message takes time on both sides: threads wake and bytes are copied. The
cost of a pass beside its layers was measured with a message beside it (``pass_seconds``) and, in
one stage of all layers, without one (``lone_pass_seconds``, never more). A search uses a single
such cost, so plans of one stage are searched apart, at their own (``least_of_one_or_more``).

A search also leaves out fixed costs, which are equal for all plans on one type. A plan on several
types pays the largest of theirs. So ``least_with_fixed`` searches once for each distinct fixed
cost, the plans on the types whose fixed cost is at most that. It adds the cost, and takes the
shortest of these steps.

    fixed costs: A 1 ms, B 30 ms; the best on both types takes 100 ms of passes, on A alone 120
    on both 100 + 30 = 130, on A alone 120 + 1 = 121: A alone is taken
"""

from collections.abc import Callable
from dataclasses import replace

from ...planning.costs.pipeline import fixed_seconds, overheads, slowest_of_all
from ...planning.schedules.replay import StepStage, flush_step_seconds
from ...planning.schedules.terms import StepOf, step_terms
from ...schema.errors import BackendError, HetflowError, InfeasibleError, ProblemError
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan, Prediction, Stage
from ..effort import Effort
from .assemble import proof_of


def predicted(problem: PipelineProblem, plan: Plan) -> Plan:
    """A solver's plan with all that its problem knows of a step."""
    # The step's fixed cost, which no choice but that of device types changes, is added to the step
    # and, where that was minimised, to the proof. Where nothing but layers and bytes is known the
    # plan stays as it is. Its stages' times hold what passes and messages cost.
    if _counts(problem):
        plan = _told_apart(problem, _with_fixed(problem, plan))
    error = problem.step_error
    if error is None:
        return plan
    step = plan.predicted.step_seconds
    low, high = max(step * (1 - error), 0.0), step * (1 + error)
    return replace(
        plan, predicted=replace(plan.predicted, step_seconds_low=low, step_seconds_high=high)
    )


def with_proof(plan: Plan, objective: float, bound: float | None) -> Plan:
    """The plan with another objective and bound of it, and what then is proved."""
    if bound is None:
        return replace(plan, proof=replace(plan.proof, objective=objective))
    return replace(plan, proof=proof_of(objective, bound, plan.proof.method))


def _counts(problem: PipelineProblem) -> bool:
    """Whether anything is known of a step beside layers, bytes, reductions and updates."""
    known = overheads(problem)
    fixed = [fixed_seconds(problem, {pool.device_type}) for pool in problem.pools]
    reduced = (pool.reduce_bytes_per_second for pool in problem.pools)
    is_reduced = problem.stage_cost == "ring" and any(rate is not None for rate in reduced)
    return is_reduced or any((*known.forward_seconds, *fixed, known.message_seconds))


def _with_fixed(problem: PipelineProblem, plan: Plan) -> Plan:
    fixed = fixed_seconds(problem, {stage.device_type for stage in plan.stages})
    step = plan.predicted.step_seconds + fixed
    rate = problem.global_batch_size / step if step > 0 else 0.0
    known = overheads(problem)
    own = dict(
        zip((pool.device_type for pool in problem.pools), known.forward_seconds, strict=True)
    )
    latencies = {
        pool.device_type: pool.reduce_latency_seconds
        for pool in problem.pools
        if problem.stage_cost == "ring" and pool.reduce_bytes_per_second is not None
    }
    last = len(plan.stages) - 1
    stages = tuple(
        replace(
            stage,
            pass_seconds=own[stage.device_type],
            message_seconds=known.message_seconds if index < last else 0.0,
            reduce_latency_seconds=latencies.get(stage.device_type),
        )
        for index, stage in enumerate(plan.stages)
    )
    whole = Prediction(step_seconds=step, samples_per_second=rate, fixed_seconds=fixed)
    plan = replace(plan, stages=stages, predicted=whole)
    if plan.objective != "step_seconds":
        return plan
    proof = plan.proof
    bound = None if proof.lower_bound is None else proof.lower_bound + fixed
    return with_proof(plan, proof.objective + fixed, bound)


def _told_apart(problem: PipelineProblem, plan: Plan) -> Plan:
    """The prediction's parts; all but the fixed cost in one where the stages do not tell more."""
    whole = plan.predicted
    replay: StepOf | None = None
    if problem.traits.order != "own" and problem.traits.flushes:  # without a list of operations

        def replay(plan: Plan) -> float:
            stages = tuple(map(_timed, plan.stages))
            return flush_step_seconds(problem.schedule, stages, plan.num_microbatches)

    found = step_terms(plan, replay)
    if found is None:
        rest = whole.step_seconds - (whole.fixed_seconds or 0.0)
        return replace(plan, predicted=replace(whole, compute_seconds=rest))
    return replace(
        plan,
        predicted=replace(
            whole,
            compute_seconds=found.layer_seconds + found.waiting_seconds,
            virtual_node_seconds=found.pass_seconds,
            transfer_seconds=found.message_seconds + found.byte_seconds,
            sync_seconds=found.reduce_seconds,
            update_seconds=found.update_seconds,
        ),
    )


def _timed(stage: Stage) -> StepStage:
    forward = stage.forward_seconds or 0.0
    return StepStage(
        num_replicas=stage.num_replicas,
        forward_seconds=forward,
        backward_seconds=(stage.compute_seconds or 0.0) - forward,
        transfer_seconds=(stage.output_seconds or 0.0) / 2,
        reduce_seconds=stage.reduce_seconds or 0.0,
        update_seconds=(stage.update_seconds or 0.0) + (stage.tied_seconds or 0.0),
    )


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
