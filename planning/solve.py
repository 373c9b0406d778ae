"""Which solver answers which flags, and the comparison of kinds of plans."""

import dataclasses
import logging
from typing import Any, Literal

from ..schema.errors import BackendError, HetflowError, InfeasibleError, ProblemError
from ..schema.pipeline import PipelinePlan
from ..schema.plan import EmulatedDevice, PassTime, SplitPlan
from ..schema.problem import SplitProblem
from .choose_pipeline import best_pipeline, check_flags
from .limits import Limits
from .request import Question, SplitFlags
from .solve_pipeline import trace_for

_log = logging.getLogger("hetflow")


def answer(question: Question, strategy: str) -> SplitPlan | PipelinePlan:
    """Solve with the strategy asked for; ``auto`` takes the faster of the two, and says so.

    Raises:
        ProblemError: Flags that do not go together.
        InfeasibleError: No plan of the kind asked for exists; with ``auto``, of no kind.
        BackendError: A solver's plan fails its check.
    """
    _warn_about_update_time(question)
    if strategy == "pipeline":
        return best_pipeline(question)
    if question.split.objective == "bottleneck" and strategy != "pipeline":
        raise ProblemError("--objective bottleneck is a pipeline's", hint="add --strategy pipeline")
    if strategy == "split" or not _could_be_pipeline(question):
        _check_limits(question)
        return _split(question)
    return _faster(question)


def ended_early(plan: SplitPlan | PipelinePlan, limits: Limits) -> bool:
    """Whether a limit that was asked for ended the search with a plan that it does not prove.

    A search that ends by itself, its work done, has ended: what it leaves open is the plan's gap.
    """
    return limits.is_missed(plan)


def _check_limits(question: Question) -> None:
    """Refuse limits of a search that has none: the exact split takes milliseconds."""
    flags, limits = question.split, question.limits
    if limits.time_limit_seconds is not None and (
        flags.method == "exact" or flags.objective == "waste"
    ):
        raise ProblemError(
            "--time-limit concerns pipelines and the MILP, the exact split ends at once",
            hint="leave it out, or add --strategy pipeline, or --method cbc or highs",
        )
    if limits.gap is not None:
        raise ProblemError(
            "--gap concerns pipelines, a split is solved to a gap of 0",
            hint="leave it out, or add --strategy pipeline",
        )


def _could_be_pipeline(question: Question) -> bool:
    """Whether all types are profiled by layer, to be launched, and no flag is a split's."""
    in_pool = [p for p in question.profiles if p.device_type in question.pool.num_devices]
    layered = bool(in_pool) and all(profile.layers is not None for profile in in_pool)
    if not layered or question.split != SplitFlags():
        return False
    trace = trace_for(question.profiles, question.pool)
    if trace is None or trace.obstacle is None:
        return True
    _log.info(f"pipelines are not compared: layers were {trace.obstacle}")
    return False


def _faster(question: Question) -> SplitPlan | PipelinePlan:
    check_flags(question)
    plans: list[SplitPlan | PipelinePlan] = []
    refused: dict[str, HetflowError] = {}
    for kind, solve in (("split", _split), ("pipeline", best_pipeline)):
        try:
            plans.append(solve(question))
        except (InfeasibleError, ProblemError) as error:
            refused[kind] = error
    if not plans:
        said = "; ".join(f"{kind}: {error.message}" for kind, error in refused.items())
        first = refused["split"]
        raise type(first)(said, hint=first.hint)
    if refused:
        ((missing, reason),) = refused.items()
        say = _log.info if isinstance(reason, InfeasibleError) else _log.warning
        mend = f" ({reason.hint})" if reason.hint else ""
        say(f"there is no {missing} plan to compare with: {reason.message}{mend}")
        return _compared(plans[0], {"kind": missing, "refused": reason.message})
    best, other = sorted(plans, key=lambda plan: plan.predicted.step_seconds)
    gain = other.predicted.step_seconds / best.predicted.step_seconds - 1
    _log.info(f"{best.kind} is {gain:.1%} faster than {other.kind}")
    seconds = other.predicted.step_seconds
    return _compared(best, {"kind": other.kind, "step_seconds": seconds, "faster_by": gain})


def _compared(plan: SplitPlan | PipelinePlan, other: dict[str, Any]) -> SplitPlan | PipelinePlan:
    origin = {**(plan.provenance or {}), "compared_with": other}
    return dataclasses.replace(plan, provenance=origin)


def _split(question: Question) -> SplitPlan:
    from ..checks.batch_split import check
    from ..checks.profiled import split_faults
    from .split_problem import split_problem

    flags = question.split
    problem = split_problem(
        question.profiles, question.pool, question.batch_size, flags.virtual_nodes,
        flags.interpolate, question.optimizer,
    )  # fmt: skip
    _warn_about_free_communication(problem)
    plan = _with_origin(_solve_split(problem, question), question)
    faults = check(plan, problem)
    faults += split_faults(plan, question.profiles, question.pool, question.optimizer)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")
    _say_what_is_simpler(plan)
    return plan


def _say_what_is_simpler(plan: SplitPlan) -> None:
    fastest = (plan.provenance or {}).get("fastest")
    if fastest is None or plan.proof.tolerance is None:
        return
    slower = plan.predicted.step_seconds / fastest["step_seconds"] - 1
    _log.info(
        f"the fastest split on paper, {', '.join(fastest['groups'])}, is predicted at "
        f"{fastest['step_seconds'] * 1e3:.4g} ms; the one taken is simpler and {slower:.1%} "
        f"slower, within the {plan.proof.tolerance:.1%} that the measurements cannot tell "
        "(--fastest takes the other)"
    )


def _warn_about_update_time(question: Question) -> None:
    """Another optimizer than the profiled one keeps other state, and takes another time too."""
    asked = question.optimizer
    in_pool = [p for p in question.profiles if p.device_type in question.pool.num_devices]
    measured = {p.optimizer.name for p in in_pool if p.optimizer is not None}
    if asked is not None and measured - {asked.name}:
        names = ", ".join(sorted(map(str, measured)))
        _log.warning(f"memory counts {asked}; update_seconds are those of {names}, as profiled")


def _warn_about_free_communication(problem: SplitProblem) -> None:
    unsynced = [option.device_type for option in problem.devices if option.sync is None]
    if unsynced and sum(option.num_devices for option in problem.devices) > 1:
        _log.warning(
            f"no measured sync_seconds for {', '.join(unsynced)}: communication counts as free; "
            "profile with two devices to measure it"
        )


def _solve_split(problem: SplitProblem, question: Question) -> SplitPlan:
    flags = question.split
    if flags.objective == "waste":
        return _solve_waste(problem, flags)
    if flags.top != 1:
        raise ProblemError("--top lists EasyScale's configurations", hint="add --objective waste")
    if flags.method == "exact":
        from ..solvers.split import solve as batch_split

        return batch_split.solve(problem, fastest=question.fastest)
    from ..solvers.split import milp as batch_split_milp

    backend: Literal["cbc", "highs"] = "cbc" if flags.method == "cbc" else "highs"
    return batch_split_milp.solve(
        problem, backend=backend, time_limit_seconds=question.limits.time_limit_seconds
    )


def _solve_waste(problem: SplitProblem, flags: SplitFlags) -> SplitPlan:
    if problem.virtual_nodes is None:
        raise ProblemError("--objective waste needs maxP", hint="add --virtual-nodes maxP")
    if flags.method != "exact":
        raise ProblemError("--objective waste has one method", hint="leave --method out")
    from ..solvers.split import waste as est_mapping

    return est_mapping.solve(problem, top=flags.top)


def _with_origin(plan: SplitPlan, question: Question) -> SplitPlan:
    """Add what a launch needs of emulated devices, and where the plan came from."""
    used = {group.device_type for group in plan.groups}
    emulated = tuple(
        EmulatedDevice(
            device_type=profile.device_type,
            base_device_type=profile.emulation.base_device_type,
            speed=profile.emulation.speed,
            passes=tuple(
                PassTime(batch_size=point.batch_size, step_seconds=point.step_seconds)
                for point in profile.batch_curve
            ),
        )
        for profile in question.profiles
        if profile.emulation is not None and profile.device_type in used
    )
    origin = {**(plan.provenance or {}), "pool": question.pool_name}
    return dataclasses.replace(plan, emulated=emulated, provenance=origin)
