"""Split a global batch over unlike devices, exactly and fast.

VirtualFlow 5.1.2 minimises the time of the slowest device, plus synchronisation. The paper does not
describe its solver. This one searches the finite set of candidate times of a device; for each,
subset sums (feasible.py) decide whether the batch can be shared out. Synchronisation depends only
on the types in use and on the number of devices: these choices are the levels (levels.py), tried in
order of a lower bound.

    batch 12 on an A (passes of 2 samples: 1 s) and a B (passes of 2: 2 s)
    candidates are 1, 2, 3, 4, ... s; within 3 s A does up to 6, B up to 2: 8 < 12
    within 4 s A does 0, 2, .., 8 and B 0, 2, 4: 8 + 4 = 12, so A makes 4 passes, B 2
    a level of A alone has no synchronisation: 6 s, against 4 s and the sum of both

Bisection takes O(log candidates) decisions a level; a decision costs one sum of sets a type.

Where the profiles state their uncertainty, the simplest plan within it is taken (simplest.py). Of
types of which some are estimated, it is the plan whose latest step is the least (``least_latest``):
that of devices whose passes take as long as their types' errors allow. A measured type is hardly
slower than predicted, an estimated one may be; so work moves to measured types as far as the limit
allows. Scaling each type's passes by its error gives a split problem of its own. The same search
solves it, with the limit as a bound on each device's passes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ...planning.costs.split import predict, with_exposed
from ...schema.errors import InfeasibleError
from ...schema.plan import Plan, Proof, ReplicaGroup, split_plan
from ...schema.problem import DeviceCosts, DeviceOption, SplitProblem
from ..effort import MOST_GIVEN_UP
from .feasible import SplitPool, feasible_batches, feasible_sums, members, multiples
from .levels import Level, least_seconds, levels, refutation, single_devices
from .simplest import WORK_LIMIT, TooMuchWorkError, choose, groups_of, simplest

METHOD = "threshold search over candidate times, exact subset sums on bitsets"
_LEAST_LATE = "that ends first where types are as slow as their errors allow, of"
_ABOVE_ROUNDING = 1 - 1e-12


@dataclass(frozen=True, slots=True)
class _Best:
    """The best answer so far: its step time, and a function that gives its groups."""

    step_seconds: float
    groups: Callable[[], tuple[ReplicaGroup, ...]]


def solve(
    problem: SplitProblem,
    *,
    fastest: bool = False,
    work_limit: float = WORK_LIMIT,
    most_given_up: float = MOST_GIVEN_UP,
) -> Plan:
    """Minimise the predicted step; of plans within the measurements' uncertainty, the simplest.

    Exact in both regimes; devices of one type may differ, and devices may stay unused.
    Deterministic: of equally fast plans, the rule of ``choose``. Where the fastest plan's
    prediction has an interval, the plan is the simplest of all whose predicted step lies within
    it and is little more than the fastest's. The rule is that of simplest.py, or of
    ``least_latest`` where
    types are estimated. ``proof.tolerance`` says how much more it may be, ``proof.lower_bound`` is
    the fastest plan's step, and ``provenance["fastest"]`` that plan.

    Args:
        problem: Profiles, pool and batch.
        fastest: Take the fastest on paper, whatever the interval.
        work_limit: Where the simplest cannot be found in so much work, the fastest is taken, and
            ``proof.method`` says so.
        most_given_up: How much slower on paper the simplest may be, relative to the fastest.

    Returns:
        A plan that ``checks.batch_split.check`` accepts for ``problem``, proved optimal.

    Raises:
        InfeasibleError: No devices and sizes add up to the batch; the hint names the nearest
            batches that can be reached.
    """
    pool = SplitPool(problem)
    singles = single_devices(problem)
    if not _usable_sizes(problem):
        raise _no_size_fits(problem)
    first = _Best(singles[0].step_seconds, lambda: (singles[0].group,)) if singles else None
    best = _search_levels(problem, pool, first) if pool.options else first
    if best is None:
        raise _no_sum(problem)
    plan = _plan(problem, best.groups())
    certificate = refutation(pool, plan.proof.objective)
    plan = replace(plan, proof=replace(plan.proof, certificate=certificate))
    high = plan.predicted.step_seconds_high
    if fastest or high is None:
        return plan
    high = min(high, plan.predicted.step_seconds * (1 + most_given_up))
    if needs_least_latest(problem):
        groups = least_latest(problem, pool, high)
        chosen = _within_tolerance(plan, _plan(problem, groups), high, _LEAST_LATE)
        told = {**(chosen.provenance or {}), "taken": "less late where estimates are too short"}
        return replace(chosen, provenance=told)
    try:
        groups = simplest(problem, pool, plan.groups, high, work_limit)
    except TooMuchWorkError:
        said = f"{METHOD}; the fastest on paper: too large to look for a simpler one"
        return replace(plan, proof=replace(plan.proof, method=said))
    return _within_tolerance(plan, _plan(problem, groups), high, "the simplest of")


def _search_levels(problem: SplitProblem, pool: SplitPool, first: _Best | None) -> _Best | None:
    """The best of a plan on one device and all plans on more."""
    best = first
    if sum(pool.counts) == 1:
        return best
    everything = Level(pool.counts, sum(pool.counts), 0.0, pool)
    floor = least_seconds(pool, everything, np.inf)
    if floor is None:
        return best
    for bound, level in levels(pool, floor[0]):
        if best and bound * _ABOVE_ROUNDING >= best.step_seconds:
            break  # levels come in order of their bounds
        cutoff = best.step_seconds - level.overhead_seconds if best else np.inf
        own, same = level.pool, (everything.counts, everything.num_devices)
        if own is pool and (level.counts, level.num_devices) == same:
            found: tuple[float, tuple[int, ...]] | None = floor
        else:
            found = least_seconds(own, level, cutoff * _ABOVE_ROUNDING, floor[0])
        if found and (not best or found[0] + level.overhead_seconds < best.step_seconds):
            best = _Best(found[0] + level.overhead_seconds, _groups_within(own, found[1], found[0]))
    return best


def _groups_within(
    pool: SplitPool, counts: tuple[int, ...], seconds: float
) -> Callable[[], tuple[ReplicaGroup, ...]]:
    def groups() -> tuple[ReplicaGroup, ...]:
        found = feasible_sums(pool, counts, seconds)
        if found is None:
            raise AssertionError("the search returned counts that do not reach the batch")
        return groups_of(pool, choose(found), seconds)

    return groups


def _plan(problem: SplitProblem, groups: tuple[ReplicaGroup, ...]) -> Plan:
    predicted = predict(problem, groups)
    return split_plan(
        model=problem.model,
        global_batch_size=problem.global_batch_size,
        groups=with_exposed(problem, groups),
        uniform_virtual_nodes=problem.virtual_nodes,
        optimizer=problem.optimizer,
        predicted=predicted,
        proof=Proof(
            termination="optimal",
            objective=predicted.step_seconds,
            lower_bound=predicted.step_seconds,
            gap=0.0,
            method=METHOD,
        ),
    )


def _within_tolerance(fastest: Plan, chosen: Plan, high: float, claim: str) -> Plan:
    """A plan chosen of those with steps up to ``high``, proved against the fastest."""
    best, step = fastest.predicted.step_seconds, chosen.predicted.step_seconds
    tolerance = (high - best) / best
    best = min(best, step)  # equal but for rounding
    proof = Proof(
        termination="optimal",
        objective=step,
        lower_bound=best,
        gap=(step - best) / step,
        method=f"{METHOD}; optimal for these numbers: {claim} the plans within "
        f"{100 * tolerance:.2g} % of the fastest, which the measurements cannot tell apart",
        tolerance=tolerance,
        certificate=fastest.proof.certificate,
    )
    if chosen.groups == fastest.groups:
        return replace(chosen, proof=proof)
    return replace(chosen, proof=proof, provenance={"fastest": _described(fastest)})


def _described(plan: Plan) -> dict[str, Any]:
    return {
        "step_seconds": plan.predicted.step_seconds,
        "devices": plan.num_devices,
        "virtual_nodes": plan.num_virtual_nodes,
        "groups": [
            f"{group.num_devices} x {group.device_type}: {group.virtual_nodes} x "
            f"{group.virtual_node_batch_size}"
            for group in plan.groups
        ],
    }


def _no_size_fits(problem: SplitProblem) -> InfeasibleError:
    sizes, batch = problem.batch_sizes, problem.global_batch_size
    if problem.virtual_nodes is None:
        return InfeasibleError(
            f"a global batch of {batch} is below {sizes[0]}, the smallest profiled batch size",
            hint=f"use a global batch of {sizes[0]}, or profile smaller batch sizes",
        )
    number = problem.virtual_nodes
    size = batch // number
    below = max((s for s in sizes if s < size), default=None)
    above = min((s for s in sizes if s > size), default=None)
    near = [str(number * s) for s in (below, above) if s]
    return InfeasibleError(
        f"{number} virtual nodes of a global batch of {batch} hold {size} samples each, a size "
        "that was not profiled or does not fit",
        hint=f"nearest batches with a plan for {number} virtual nodes: {' and '.join(near)}; "
        f"or choose virtual nodes of {', '.join(map(str, sizes))} samples",
    )


def _usable_sizes(problem: SplitProblem) -> list[int]:
    """Samples of a virtual node that the batch and the regime allow."""
    costs = [*problem.devices, *(option.measured_with(1) for option in problem.devices)]
    return sorted({point.batch_size for each in costs for point in problem.points(each)})


def _no_sum(problem: SplitProblem) -> InfeasibleError:
    below, above = nearest_batches(problem)
    usable = _usable_sizes(problem)
    sizes = ", ".join(map(str, usable))
    number = sum(
        option.num_devices
        for option in problem.devices
        if any(point.batch_size in usable for point in option.batch_curve)
    )
    near = [str(batch) for batch in (below, above) if batch]
    return InfeasibleError(
        f"no plan adds up to a global batch of exactly {problem.global_batch_size}: each of the "
        f"{number} devices runs whole passes of one profiled size ({sizes})",
        hint=f"nearest batches with a plan: {' and '.join(near)}; or profile more batch sizes",
    )


def nearest_batches(problem: SplitProblem) -> tuple[int | None, int | None]:
    """The largest reachable batch below the problem's, and the smallest above it.

    The problem's virtual nodes are not considered.
    """
    batch = problem.global_batch_size
    alone = [
        point.batch_size
        for option in problem.devices
        for point in option.measured_with(1).batch_curve
    ]
    smallest = min(alone)
    wider = SplitProblem(
        model=problem.model,
        global_batch_size=batch + smallest,  # one device alone reaches a multiple in here
        devices=problem.devices,
    )
    sums = feasible_batches(SplitPool(wider), batch + smallest)
    for size in alone:  # one device may have sizes of its own
        sums |= multiples(size, (batch + smallest) // size)
    below = sums & ((1 << batch) - 1)
    above = sums >> (batch + 1)
    return (
        below.bit_length() - 1 if below > 1 else None,
        members(above & -above)[0] + batch + 1 if above else None,
    )


_ROUNDING = 1 + 1e-12
Costs = TypeVar("Costs", bound=DeviceCosts)


def needs_least_latest(problem: SplitProblem) -> bool:
    """Whether some type is estimated, and types' errors are unlike."""
    errors = {option.step_error for option in problem.devices}
    return len(errors) > 1 and any(option.is_estimated for option in problem.devices)


def least_latest(
    problem: SplitProblem, pool: SplitPool, limit_seconds: float
) -> tuple[ReplicaGroup, ...]:
    """The split with the least latest step of all that are predicted to stay within the limit."""
    latest = replace(problem, devices=tuple(map(_slowest, problem.devices)))
    step, best = np.inf, tuple[ReplicaGroup, ...]()
    planned = {_named(one.group): one for one in single_devices(problem)}
    for one in single_devices(latest):
        own = planned[_named(one.group)]
        if one.step_seconds < step and own.step_seconds <= limit_seconds * _ROUNDING:
            step, best = one.step_seconds, (own.group,)
    slowed = SplitPool(latest)
    slowed.options = pool.options  # groups say what their passes are predicted to take
    unlimited = slowed.limits
    for bound, level in levels(slowed, 0.0) if sum(pool.counts) > 1 else ():
        if bound >= step:
            break
        left = limit_seconds * _ROUNDING - level.overhead_seconds
        narrowed = level.pool
        narrowed.limits = np.minimum(unlimited, pool.at(narrowed.rests).passes(max(left, 0.0)))
        found = least_seconds(narrowed, level, step - level.overhead_seconds)
        if found is None or found[0] + level.overhead_seconds >= step:
            continue
        sums = feasible_sums(narrowed, found[1], found[0])
        assert sums is not None
        step = found[0] + level.overhead_seconds
        best = groups_of(narrowed, choose(sums), found[0])
    return best


def _named(group: ReplicaGroup) -> tuple[str, int]:
    return group.device_type, group.virtual_node_batch_size


def _slowest(option: DeviceOption) -> DeviceOption:
    """A type whose passes take as long as its error allows."""
    times = 1 + (option.step_error or 0.0)

    def slower(costs: Costs) -> Costs:
        curve = (
            replace(point, step_seconds=times * point.step_seconds) for point in costs.batch_curve
        )
        return replace(costs, batch_curve=tuple(curve))

    alone = None if option.alone is None else slower(option.alone)
    return replace(slower(option), alone=alone)
