"""The prediction of a plan's step: fixed cost, parts, and how far it may be off."""

from dataclasses import replace

from ...planning.costs.pipeline import fixed_seconds, overheads
from ...planning.schedules.replay import StepStage, flush_step_seconds
from ...planning.schedules.terms import StepOf, step_terms
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan, Prediction, Stage


def predicted(problem: PipelineProblem, plan: Plan) -> Plan:
    """A solver's plan with all that its problem knows of a step.

    The step's fixed cost, which no choice but that of device types changes, is added to the step
    and, where that was minimised, to the proof. Where nothing but layers and bytes is known the
    plan stays as it is. Its stages' times hold what passes and messages cost.
    """
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
    bound = min(bound, objective)
    gap = (objective - bound) / objective if objective > 0 else 0.0
    return replace(
        plan,
        proof=replace(
            plan.proof,
            termination="optimal" if gap <= 1e-9 else "feasible",
            objective=objective,
            lower_bound=bound,
            gap=gap,
        ),
    )


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
