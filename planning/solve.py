"""Choose the solver for a request, and compare kinds of plans."""

import dataclasses
import logging
from typing import Any, Literal

from ..schema.errors import BackendError, HetflowError, InfeasibleError, ProblemError
from ..schema.files import Plan
from ..schema.pipeline import PipelinePlan
from ..schema.plan import EmulatedDevice, PassTime, SplitPlan
from ..schema.problem import SplitProblem
from .inputs import flat
from .request import SolveRequest, SplitOptions

_log = logging.getLogger("hetflow")


def solve(request: SolveRequest) -> Plan:
    """Find and check the best plan of the requested kind.

    The kind ``auto`` takes the fastest of the kinds of plans that can be launched. Notes and
    warnings for the user go to the logger ``hetflow``.

    Raises:
        ProblemError: Options contradict each other or do not fit the profiles and the pool.
        InfeasibleError: No plan of the requested kind exists; with ``auto``, no plan of any kind.
        BackendError: A solver's plan fails its check, which is a bug.
    """
    plan = _with_estimates(_plan(request), request)
    if request.pool != flat(request.pool):
        plan = dataclasses.replace(plan, cluster=request.pool)
    if not request.corrected_by:
        return plan
    origin = {**(plan.provenance or {}), "corrected_by": list(request.corrected_by)}
    return dataclasses.replace(plan, provenance=origin)


def _with_estimates(plan: Plan, request: SolveRequest) -> Plan:
    """Add to the plan the estimates of the types in use whose profiles were not measured."""
    if isinstance(plan, SplitPlan):
        used = {group.device_type for group in plan.groups}
    elif isinstance(plan, PipelinePlan):
        used = {stage.device_type for stage in plan.stages}
    else:
        used = {group.device_type for stage in plan.stages for group in stage.replicas}
    estimates = tuple(
        profile.estimate
        for profile in request.profiles
        if profile.estimate is not None and profile.device_type in used
    )
    return dataclasses.replace(plan, estimates=estimates) if estimates else plan


def _plan(request: SolveRequest) -> Plan:
    _warn_about_update_time(request)
    if request.strategy == "pipeline":
        from .choose_pipeline import best_pipeline

        return best_pipeline(request)
    if request.strategy == "parallel":
        from .solve_parallel import best_parallel

        return best_parallel(request)
    if request.split.objective == "bottleneck":
        raise ProblemError(
            "--objective bottleneck is for pipelines", hint="add --strategy pipeline"
        )
    if request.strategy == "split" or not _could_be_pipeline(request):
        _check_limits(request)
        return _split(request)
    return _faster(request)


def _check_limits(request: SolveRequest) -> None:
    """Refuse search limits for the exact split, which takes milliseconds and has none."""
    flags, limits = request.split, request.limits
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


def _could_be_pipeline(request: SolveRequest) -> bool:
    """Whether all types have layers that can be launched, and no flag is for splits only."""
    in_pool = [p for p in request.profiles if p.device_type in request.pool.num_devices]
    layered = bool(in_pool) and all(profile.layers is not None for profile in in_pool)
    if not layered or request.split != SplitOptions():
        return False
    from .solve_pipeline import trace_for

    trace = trace_for(request.profiles, request.pool)
    if trace is None or trace.obstacle is None:
        return True
    _log.info(f"pipelines are not compared: layers were {trace.obstacle}")
    return False


def _faster(request: SolveRequest) -> SplitPlan | PipelinePlan:
    from .choose_pipeline import best_pipeline, check_flags

    check_flags(request)
    plans: list[SplitPlan | PipelinePlan] = []
    refused: dict[str, HetflowError] = {}
    for kind, best in (("split", _split), ("pipeline", best_pipeline)):
        try:
            plans.append(best(request))
        except (InfeasibleError, ProblemError) as error:
            refused[kind] = error
    if not plans:
        said = "; ".join(f"{kind}: {error.message}" for kind, error in refused.items())
        first = refused["split"]
        raise type(first)(said, hint=first.hint)
    if refused:
        ((missing, reason),) = refused.items()
        say = _log.info if isinstance(reason, InfeasibleError) else _log.warning
        fix = f" ({reason.hint})" if reason.hint else ""
        say(f"there is no {missing} plan to compare with: {reason.message}{fix}")
        return _compared(plans[0], {"kind": missing, "refused": reason.message})
    taken, other = sorted(plans, key=lambda plan: plan.predicted.step_seconds)
    gain = other.predicted.step_seconds / taken.predicted.step_seconds - 1
    _log.info(f"{taken.kind} is {gain:.1%} faster than {other.kind}")
    seconds = other.predicted.step_seconds
    return _compared(taken, {"kind": other.kind, "step_seconds": seconds, "faster_by": gain})


def _compared(plan: SplitPlan | PipelinePlan, other: dict[str, Any]) -> SplitPlan | PipelinePlan:
    origin = {**(plan.provenance or {}), "compared_with": other}
    return dataclasses.replace(plan, provenance=origin)


def _split(request: SolveRequest) -> SplitPlan:
    from ..checks.batch_split import check
    from ..checks.profiled import split_faults
    from .split_problem import split_problem

    flags = request.split
    problem = split_problem(
        request.profiles, request.pool, request.batch_size, flags.virtual_nodes,
        flags.interpolate, request.optimizer,
    )  # fmt: skip
    _warn_about_free_communication(problem)
    plan = _with_origin(_solve_split(problem, request), request)
    faults = check(plan, problem)
    faults += split_faults(plan, request.profiles, request.pool, request.optimizer)
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


def _warn_about_update_time(request: SolveRequest) -> None:
    """Warn if another optimizer than the profiled one will train: its update time is unknown."""
    asked = request.optimizer
    in_pool = [p for p in request.profiles if p.device_type in request.pool.num_devices]
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


def _solve_split(problem: SplitProblem, request: SolveRequest) -> SplitPlan:
    flags = request.split
    if flags.objective == "waste":
        return _solve_waste(problem, flags)
    if flags.top != 1:
        raise ProblemError("--top lists EasyScale's configurations", hint="add --objective waste")
    if flags.method == "exact":
        from ..solvers.split import solve as batch_split

        return batch_split.solve(problem, fastest=request.fastest)
    from ..solvers.split import milp as batch_split_milp

    backend: Literal["cbc", "highs"] = "cbc" if flags.method == "cbc" else "highs"
    return batch_split_milp.solve(
        problem, backend=backend, time_limit_seconds=request.limits.time_limit_seconds
    )


def _solve_waste(problem: SplitProblem, flags: SplitOptions) -> SplitPlan:
    if problem.virtual_nodes is None:
        raise ProblemError("--objective waste needs maxP", hint="add --virtual-nodes maxP")
    if flags.method != "exact":
        raise ProblemError("--objective waste has one method", hint="leave --method out")
    from ..solvers.split import waste as est_mapping

    return est_mapping.solve(problem, top=flags.top)


def _with_origin(plan: SplitPlan, request: SolveRequest) -> SplitPlan:
    """Add the emulated devices' times, which a launch needs, and the plan's provenance."""
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
        for profile in request.profiles
        if profile.emulation is not None and profile.device_type in used
    )
    origin = {**(plan.provenance or {}), "pool": request.pool_name}
    return dataclasses.replace(plan, emulated=emulated, provenance=origin)
