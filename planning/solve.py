"""Choose the solver for a question, and compare kinds of plans."""

import dataclasses
import logging
from functools import partial
from typing import Any, get_args

from ..schema.errors import HetflowError, InfeasibleError, ProblemError
from ..schema.layers import cannot_spread
from ..schema.options import Shard, asked_of, option
from ..schema.parallel import parallel_schedule
from ..schema.plan import EmulatedDevice, PassTime, Plan, Restrictions, SyncBound
from ..schema.problem import ShardedProblem, SplitProblem
from ..schema.profile import MemoryReserve, Profile
from ..schema.requests.solve import SolveRequest
from ..solvers.methods import METHODS
from .costs.memory import reserve_of
from .inputs import flat
from .judging import confirmed
from .limits import TimeShares
from .pool_parts import Parts, best_of_parts, parts_of
from .request import Kind, Question, refuse_unread

_log = logging.getLogger("hetflow")


def solve(question: Question, clock: TimeShares | None = None) -> Plan:
    """Find and check the best plan of the requested kind.

    The kind ``auto`` takes the fastest of the kinds of plans that can be launched: split, pipeline
    and parallel. Notes and warnings for the user go to the logger ``hetflow``. Without a ``clock``
    the time limit counts from now.

    Raises:
        ProblemError: Options contradict each other or do not fit the profiles and the pool.
        InfeasibleError: No plan of the requested kind exists; with ``auto``, no plan of any kind.
        BackendError: A solver's plan fails its check, which is a bug.
    """
    clock, pool = clock or TimeShares(question.limits), question.pool
    kinds = _kinds_to_try(question)
    _warn_about_update_time(question)
    one_kind = len(kinds) == 1
    plan = _best(question, kinds[0], clock) if one_kind else _fastest_kind(question, kinds, clock)
    used = [p for p in question.profiles if p.device_type in plan.devices_by_type]
    reserves = [_reserve(plan, profile, question) for profile in used]
    plan = dataclasses.replace(
        plan,
        estimates=tuple(p.estimate for p in used if p.estimate is not None),
        reference_seconds={p.device_type: p.reference_seconds for p in used if p.reference_seconds}
        or None,
        reserves=tuple(reserve for reserve in reserves if reserve.total_bytes),
        predicted=plan.predicted.at(pool.hourly_dollars(plan.devices_by_type)),
        cluster=pool if plan.cluster is None and pool != flat(pool) else plan.cluster,
        blocks=None if plan.shard is None or plan.layers else _blocks_for(question),
    )
    plan = dataclasses.replace(plan, restrictions=_restrictions(plan, question))
    if question.corrected_by:
        origin = {**(plan.provenance or {}), "corrected_by": list(question.corrected_by)}
        plan = dataclasses.replace(plan, provenance=origin)
    return confirmed(plan, question.profiles, pool)


def _blocks_for(question: Question) -> tuple[str, ...] | None:
    from .split_problem import planned_blocks

    return planned_blocks(question.profiles_in_pool)


def _restrictions(plan: Plan, question: Question) -> Restrictions | None:
    """What of the request restricts the plan, besides what the plan states elsewhere."""
    devices = question.pool.num_devices
    found = Restrictions(
        devices=devices if plan.cluster is None and devices != plan.devices_by_type else None,
        shard=_asked_shard(plan, question),
    )
    if question.planners["pipeline"] == "stages":
        plain = question.asked.schedule == parallel_schedule(is_chunked=False)
        found = dataclasses.replace(
            found, tensor_parallel=False, num_model_chunks=1 if plain else None
        )
    for asked in asked_of(SolveRequest):
        value = getattr(question.asked, asked.name)
        if asked.option.recorded and plan.kind in asked.option.read_by and value != asked.default:
            if plan.layers and asked.name == "microbatch_size":
                value = plan.microbatch_size  # the nearest profiled
            found = dataclasses.replace(found, **{asked.name: value})
    if plan.sequence_parallel and cannot_spread(plan.trace):
        found = dataclasses.replace(found, num_stages=1)
    return None if found == Restrictions() else found


def _asked_shard(plan: Plan, question: Question) -> Shard | None:
    """What devices were to share, where the plan does not state it elsewhere."""
    asked = question.asked.shard
    if asked == "none" or asked == "auto" or (plan.layers and asked != "all"):
        return None
    return asked


def _reserve(plan: Plan, profile: Profile, question: Question) -> MemoryReserve:
    """What a plan leaves free of tensors on a device; of a split, at no larger sizes than its."""
    if plan.layers:
        from .pipeline_problem import reserve_in_pipeline

        problem = dataclasses.replace(question, pool=plan.cluster or question.pool).problem
        return reserve_in_pipeline(profile, problem, plan.schedule)
    mine = [g for g in plan.groups if g.device_type == profile.device_type]
    largest, curve = max(g.virtual_node_batch_size for g in mine), profile.batch_curve
    used = tuple(point for point in curve if point.batch_size <= largest) or curve[:1]
    return reserve_of(
        dataclasses.replace(profile, batch_curve=used),
        question.asked.memory_reserve_bytes,
        num_devices=plan.num_devices,
    )


def _best(question: Question, kind: Kind, clock: TimeShares, kinds_left: int = 1) -> Plan:
    """Find the best plan of one kind, in a fair part of the time that is left."""
    if kind == "split":
        return _split(question, clock)
    if kind == "pipeline" and question.planners[kind] != "stages":
        from .pipelines import best_pipeline

        return best_pipeline(question, clock.part(kinds_left))
    from .solve_parallel import best_parallel

    return best_parallel(question, clock)


def _kinds_to_try(question: Question) -> list[Kind]:
    """List the kinds of plans to compare, simplest first."""
    # Without a requested kind these are all that read the options that ask for something of the
    # plan. Kinds that need layers which the profiles do not hold are left out.
    planners, options = question.planners, question.options
    if question.asked.strategy != "auto":
        refuse_unread(options, [planners[question.asked.strategy]], "")
        return [question.asked.strategy]
    refuse_unread(options, list(planners.values()), "")
    wishes = [one for one in options if one.narrows]
    tried = {
        kind: planner
        for kind, planner in planners.items()
        if all(planner in one.read_by for one in wishes)
    }
    if not tried:
        flags = " and ".join(map(str, wishes))
        raise ProblemError(
            f"{flags}: no kind of plan reads them all",
            hint="leave some out; the help of `hetflow solve split`, `pipeline` and `parallel` "
            "lists what goes together",
        )
    reason = _no_layers(question) if tried.keys() - {"split"} else ""
    if reason:
        tried = {"split": planners["split"]}
    refuse_unread(options, list(tried.values()), reason)
    unread = [kind for kind in planners if kind not in tried]
    if "parallel" in unread and "pipeline" in tried:
        _log.info(f"{' and '.join(unread)} plans are not compared: they do not read "
                  f"{', '.join(map(str, wishes))}")  # fmt: skip
    return list(tried)


def _no_layers(question: Question) -> str:
    """Why no pipeline over the pool's types could be launched; empty where one could."""
    in_pool = question.profiles_in_pool
    if not in_pool or any(profile.layers is None for profile in in_pool):
        return "the profiles hold no layers"
    from .pipelines import trace_for

    trace = trace_for(question)
    if trace is None or trace.obstacle is None:
        return ""
    _log.info(f"pipelines are not compared: layers were {trace.obstacle}")
    return f"layers were {trace.obstacle}"


def _fastest_kind(question: Question, kinds: list[Kind], clock: TimeShares) -> Plan:
    """The fastest plan of several kinds, and for each other kind a line that says why it lost."""
    from .pipelines import check_flags

    check_flags(question)
    plans: dict[str, Plan] = {}
    others: list[dict[str, Any]] = []
    refused: dict[str, HetflowError] = {}
    for number, kind in enumerate(kinds):
        try:
            plans[kind] = _best(question, kind, clock, len(kinds) - number)
        except (InfeasibleError, ProblemError) as error:
            refused[kind] = error
    if not plans:
        said = "; ".join(f"{kind}: {error.message}" for kind, error in refused.items())
        first = refused[kinds[0]]
        raise type(first)(said, hint=first.hint)
    known_as = _expressed_as(plans)
    if known_as is not None:
        seconds = plans.pop("parallel").predicted.step_seconds
        reason = (
            f"the best parallel plan shares no layer and is a {known_as}: left to the planner of "
            f"{known_as}s, which counts more of what was measured"
            + (" (schedule auto interleaves too)" if known_as == "pipeline" else "")
        )
        _log.info(reason)
        others.append({"kind": "parallel", "step_seconds": seconds, "reason": reason})
    if not plans:
        raise refused[kinds[0]]
    least = min(plan.predicted.step_seconds for plan in plans.values())
    taken = next(p for p in plans.values() if p.predicted.step_seconds <= least * (1 + 1e-9))
    slower = sorted(
        (plan for plan in plans.values() if plan is not taken),
        key=lambda plan: plan.predicted.step_seconds,
    )
    compared = [_why_slower(taken, other) for other in slower]
    compared += [*others, *(_why_refused(kind, error) for kind, error in refused.items())]
    origin = {**(taken.provenance or {}), "compared_with": compared}
    return dataclasses.replace(taken, provenance=origin)


def _expressed_as(plans: dict[str, Plan]) -> str | None:
    """The other kind of plan that the parallel plan is an instance of; None if there is none."""
    # The plans train alike, but the planner of that kind counts more of what was measured: memory
    # and synchronisation of whole passes for splits, overheads of a step for pipelines.
    plan = plans.get("parallel")
    if plan is None:
        return None
    shares_layers = any(
        group.tensor_parallel_size > 1 for stage in plan.stages for group in stage.replicas
    )
    recomputes = any(stage.recompute != "none" for stage in plan.stages)
    mixes = any(len(stage.replicas) > 1 for stage in plan.stages)
    if shares_layers or recomputes:
        return None
    if len(plan.stages) == 1:
        return "split"  # also where the memory measured for whole passes allows none
    return "pipeline" if "pipeline" in plans and not mixes else None


def _why_slower(taken: Plan, other: Plan) -> dict[str, Any]:
    seconds, least = other.predicted.step_seconds, taken.predicted.step_seconds
    gain = seconds / least - 1
    reason = (
        f"{taken.kind} is {gain:.1%} faster than {other.kind} ({least * 1e3:.4g} against "
        f"{seconds * 1e3:.4g} ms a step)"
    )
    _log.info(reason)
    return {"kind": other.kind, "step_seconds": seconds, "faster_by": gain, "reason": reason}


def _why_refused(kind: str, reason: HetflowError) -> dict[str, Any]:
    say = _log.info if isinstance(reason, InfeasibleError) else _log.warning
    fix = f" ({reason.hint})" if reason.hint else ""
    say(f"there is no {kind} plan to compare with: {reason.message}{fix}")
    return {"kind": kind, "refused": reason.message}


def _split(question: Question, clock: TimeShares) -> Plan:
    """The best split of the pool and of its parts without slow links, with the bound of all."""
    _warn_about_one_size(question)
    pools = Parts([question.pool], are_all=True)
    if question.asked.objective == "step_seconds":
        from .split_problem import split_keys

        pools = parts_of(question.pool, partial(split_keys, question.problem))
    _, plan = best_of_parts(
        pools,
        clock,
        lambda part, share: _split_in(
            dataclasses.replace(question, pool=part), share, warns=part is question.pool
        ),
    )
    for bound in plan.sync_bounds:
        _log.warning(f"{bound}; measure longer with {option('thorough', True)}")
    _say_what_is_simpler(plan)
    return plan


def _split_in(question: Question, clock: TimeShares, *, warns: bool) -> Plan:
    """The best split of a pool; with ``shard`` one whose devices share states."""
    # With ``auto``: the better of both, and of equally good ones that of whole states.
    from .split_problem import split_problem

    asked, problem, whole = question.asked, question.problem, None
    if asked.shard == "auto":
        alone = dataclasses.replace(question, asked=dataclasses.replace(asked, shard="none"))
        try:
            whole = _split_in(alone, clock, warns=False)
        except InfeasibleError as error:
            _log.info(f"no split with whole states: {error.message}")
    only = () if asked.shard == "none" else (asked.shard,)
    shards = get_args(Shard) if asked.shard == "auto" else only
    try:
        view = split_problem(problem, asked.virtual_nodes, asked.interpolate, shards)
        if warns and not shards:
            _warn_about_free_communication(view)
        plan = _with_origin(_solve_split(view, question, clock), question)
    except (InfeasibleError, ProblemError):
        if whole is None:
            raise
        return whole
    if whole is not None and whole.predicted.step_seconds <= plan.predicted.step_seconds:
        _log.info(f"no split that shares states is faster than {plan.predicted.step_seconds:.4g} s")
        return whole
    if isinstance(view, ShardedProblem) and view.bytes_per_second is None:
        _log.warning("no link's rate is known: gathers and reductions of states count as free")
    return plan


def _say_what_is_simpler(plan: Plan) -> None:
    fastest = (plan.provenance or {}).get("fastest")
    if fastest is None or plan.proof.tolerance is None:
        return
    slower = plan.predicted.step_seconds / fastest["step_seconds"] - 1
    taken = (plan.provenance or {}).get("taken", "simpler")
    _log.info(
        f"the fastest split on paper, {', '.join(fastest['groups'])}, is predicted at "
        f"{fastest['step_seconds'] * 1e3:.4g} ms; the one taken is {taken} and {slower:.1%} "
        f"slower, within the {plan.proof.tolerance:.1%} that the measurements cannot tell "
        f"({option('fastest', True)} takes the other)"
    )


def _warn_about_update_time(question: Question) -> None:
    """Warn if another optimizer than the profiled one will train: its update time is unknown."""
    asked = question.optimizer
    said = [p.optimizer for p in question.profiles_in_pool if p.optimizer is not None]
    measured = {optimizer.name for optimizer in said}
    if asked is not None and measured - {asked.name}:
        names = ", ".join(sorted(map(str, measured)))
        _log.warning(f"memory counts {asked}; update_seconds are those of {names}, as profiled")


def _warn_about_one_size(question: Question) -> None:
    """Warn of a sweep that ended at one size: the plan is the best of that size alone."""
    for profile in question.profiles_in_pool:
        size = profile.only_batch_size
        if size is not None:
            reason = (profile.provenance or {})["curve_stopped"]
            _log.warning(
                f"the profile of {profile.device_type} holds batch size {size} alone ({reason}), "
                f"so each virtual node there has {size} sample{'' if size == 1 else 's'}; larger "
                "ones may be many times faster: profile them, for example with "
                f"{option('batch_sizes')} "
                f"{size},{8 * size},{32 * size}"
            )


def _warn_about_free_communication(problem: SplitProblem) -> None:
    unsynced = [option.device_type for option in problem.devices if option.sync is None]
    if unsynced and problem.num_devices > 1:
        _log.warning(
            f"no measured sync_seconds for {', '.join(unsynced)}: communication counts as free; "
            "profile with two devices to measure it"
        )


def _solve_split(view: SplitProblem, question: Question, clock: TimeShares) -> Plan:
    asked = question.asked
    if isinstance(view, ShardedProblem):
        from ..solvers.split.sharded import solve as share_states

        return share_states(view)
    if asked.objective == "waste":
        if view.virtual_nodes is None:
            raise ProblemError(
                f"{option('objective', 'waste')} needs maxP",
                hint=f"add {option('virtual_nodes', 'maxP')}",
            )
        return METHODS.get("easyscale-waste")(view, top=asked.top)
    if asked.method == "exact":
        from ..solvers.split import solve as batch_split

        return batch_split.solve(view, fastest=asked.fastest)
    from ..solvers.split import milp as batch_split_milp

    return batch_split_milp.solve(view, backend=asked.method, time_limit_seconds=clock.seconds_left)


def _with_origin(plan: Plan, question: Question) -> Plan:
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
        for profile in question.profiles
        if profile.emulation is not None and profile.device_type in used
    )
    bounds = tuple(
        SyncBound(device_type=profile.device_type, at_most_seconds=profile.sync.bound_seconds)
        for profile in question.profiles
        if profile.sync is not None
        and profile.sync.bound_seconds is not None
        and profile.device_type in used
        and plan.num_devices > 1
        and plan.shard is None  # shares count gathers and reductions over links
    )
    origin = {**(plan.provenance or {}), "pool": question.pool_name}
    return dataclasses.replace(plan, emulated=emulated, sync_bounds=bounds, provenance=origin)
