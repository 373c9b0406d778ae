"""Check a batch split from its definition (VirtualFlow 5.1.2, EasyScale 3.4).

The code is slow and simple on purpose, and shares nothing with the solvers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...schema.plan import Plan, ReplicaGroup
from ...schema.problem import DeviceCosts, DeviceOption, SplitProblem
from ...schema.profile import BatchPoint
from . import definitions, split_bound
from .methods import METHOD_JUDGES
from .plan import TOLERANCE, device_faults, differ, question_faults, step_faults, unlike
from .proofs import Verdict


def check(plan: Plan, problem: SplitProblem | None) -> Verdict:
    """List every fault of a plan; an empty list means that it is valid.

    Without a problem, checks only whether the plan's own values agree with each other.

    Returns:
        One sentence per fault, and how the bound is known.
    """
    faults = [*own_faults(plan)]
    if plan.objective == "waste" or plan.est is not None:
        faults += METHOD_JUDGES.get("easyscale-waste").faults(plan, problem)
    if problem is None:
        return Verdict(faults)
    faults += _against_problem(plan, problem)
    bound = plan.proof.lower_bound
    if faults or bound is None or plan.objective != "step_seconds":
        return Verdict(faults)
    stated = plan.proof.certificate
    if stated is not None and stated.kind != "refuted-splits":
        return Verdict(["proof.certificate: is of plans that share states"])
    sets = split_bound.whole_sets(problem) if stated is None else stated.refuted
    try:
        found = split_bound.replay_faults(problem, bound, sets)
    except split_bound.TooLargeError:
        return Verdict()
    if stated is None:
        return Verdict((), "stated" if found else "recomputed")
    return Verdict(found, "replayed")


def own_faults(plan: Plan) -> Iterator[str]:
    """List what of a split's values does not agree with each other."""
    predicted = plan.predicted
    needed = (predicted.compute_seconds, predicted.sync_seconds, predicted.update_seconds)
    # The slowest device's seconds before synchronisation.
    parts = (predicted.compute_seconds, predicted.load_seconds, predicted.virtual_node_seconds)
    device = sum(seconds or 0.0 for seconds in parts)
    if None not in needed:
        whole = device + sum(
            seconds or 0.0
            for seconds in (
                predicted.fixed_seconds, predicted.sync_seconds, predicted.update_seconds
            )
        )  # fmt: skip
        if differ(whole, predicted.step_seconds):
            yield (
                f"predicted: its parts add up to {whole} s, "
                f"not to step_seconds {predicted.step_seconds}"
            )
    low, high = predicted.step_seconds_low, predicted.step_seconds_high
    if (low is None) != (high is None):
        yield "predicted: step_seconds_low and step_seconds_high come together or not at all"
    elif low is not None and high is not None and not low <= predicted.step_seconds <= high:
        yield f"predicted: step_seconds {predicted.step_seconds} is not within {low} to {high}"
    if predicted.transfer_seconds is not None:
        yield f"predicted: transfer_seconds is {predicted.transfer_seconds}, a split sends nothing"
    yield from step_faults(plan, TOLERANCE)
    yield from _uniform_faults(plan)
    if plan.num_devices == 1 and any(group.exposed_seconds for group in plan.groups):
        yield "groups[0]: one device has nothing to synchronise, but exposed_seconds"
    if plan.num_devices == 1 and plan.shard is None and predicted.sync_seconds:
        yield f"predicted: one device has nothing to synchronise, got {predicted.sync_seconds} s"
    timed = [
        (g.virtual_nodes * g.pass_seconds, g.exposed_seconds or 0.0)
        for g in plan.groups
        if g.pass_seconds is not None
    ]
    if len(timed) == len(plan.groups) and predicted.compute_seconds is not None:
        longest = max(passes + exposed for passes, exposed in timed)
        if all(differ(passes, device) for passes, _ in timed):
            yield (
                f"predicted: compute, loading and virtual nodes take {device} s, as long as the "
                "passes of no group"
            )
        elif longest > predicted.step_seconds * (1 + TOLERANCE):
            yield (
                f"predicted: step_seconds is {predicted.step_seconds}, but a group takes "
                f"{longest} s before its update"
            )


def _uniform_faults(plan: Plan) -> Iterator[str]:
    nodes = plan.uniform_virtual_nodes
    if nodes is None:
        return
    if plan.num_virtual_nodes != nodes:
        yield f"groups: {plan.num_virtual_nodes} virtual nodes, not uniform_virtual_nodes {nodes}"
    if {group.virtual_node_batch_size for group in plan.groups} != {plan.global_batch_size / nodes}:
        yield f"groups: virtual nodes differ from {plan.global_batch_size}/{nodes} samples each"


def _against_problem(plan: Plan, problem: SplitProblem) -> list[str]:
    options = {option.device_type: option for option in problem.devices}
    faults = [*question_faults(plan, problem), *_groups_faults("", plan.groups, options, problem)]
    for number, other in enumerate(plan.alternatives):
        faults += _groups_faults(f"alternatives[{number}].", other.groups, options, problem)
    faults += device_faults(plan, {name: one.num_devices for name, one in options.items()})
    if not faults:  # the next checks need known types and sizes
        faults += _prediction_faults(plan, options)
        faults += _bound_faults(plan, problem)
    return faults


def _groups_faults(
    where: str,
    groups: Sequence[ReplicaGroup],
    options: dict[str, DeviceOption],
    problem: SplitProblem,
) -> Iterator[str]:
    used = {group.device_type for group in groups}
    link = definitions.ring_link([one for name, one in options.items() if name in used])
    in_use = sum(group.num_devices for group in groups)
    for index, group in enumerate(groups):
        for fault in _group_faults(group, options.get(group.device_type), problem, in_use, link):
            yield f"{where}groups[{index}]: {fault}"


def _group_faults(
    group: ReplicaGroup,
    option: DeviceOption | None,
    problem: SplitProblem,
    num_devices: int,
    link: definitions.RingLink | None,
) -> Iterator[str]:
    if option is None:
        known = ", ".join(option.device_type for option in problem.devices)
        yield f"device type {group.device_type!r} is not usable; there are {known}"
        return
    size = group.virtual_node_batch_size
    costs = definitions.terms(option, num_devices)
    point = definitions.point(costs, size)
    if point is None:
        yield f"a pass of {size} samples on {group.device_type} is not profiled or does not fit"
    else:
        counted = replace(
            group,
            pass_seconds=point.step_seconds,
            exposed_seconds=definitions.exposed_seconds(option, num_devices, size, link) or 0.0,
            interpolated=size in costs.interpolated_sizes,
            measured_busy=num_devices > 1 and option.alone is not None,
        )
        yield from unlike(group, counted, "", TOLERANCE)
    if problem.virtual_nodes is not None:
        share = problem.global_batch_size // problem.virtual_nodes
        if size != share:
            yield f"virtual nodes hold {size} samples; {problem.virtual_nodes} of them need {share}"


def _prediction_faults(plan: Plan, options: dict[str, DeviceOption]) -> list[str]:
    """List what of the prediction is not as counted, for the slowest group that it fits best."""
    used, number = [options[group.device_type] for group in plan.groups], plan.num_devices
    link = definitions.ring_link(used)
    costs = [definitions.terms(option, number) for option in used]
    work = [_work(group, cost) for group, cost in zip(plan.groups, costs, strict=True)]
    exposed = [
        definitions.exposed_seconds(option, number, group.virtual_node_batch_size, link) or 0.0
        for group, option in zip(plan.groups, used, strict=True)
    ]
    least = max(definitions.split_sync_seconds(option, number) for option in used)
    # Of each group: its passes, and what it takes once.
    passes = [
        (seconds, more + cost.update_seconds + cost.fixed_seconds, point.step_seconds_error)
        for (seconds, point), more, cost in zip(work, exposed, costs, strict=True)
    ]
    longest = max(seconds + once for seconds, once, _ in passes)
    step = longest + least
    spread = definitions.spread_seconds(step, passes, [option.step_error for option in used])
    stated, found = plan.predicted, list[list[str]]()
    if stated.compute_seconds is not None:  # then what is not stated apart is 0
        names = ("load_seconds", "virtual_node_seconds", "fixed_seconds")
        stated = replace(stated, **{name: getattr(stated, name) or 0.0 for name in names})
    for group, (_, point), more, cost, (seconds, once, _) in zip(
        plan.groups, work, exposed, costs, passes, strict=True
    ):
        if differ(seconds + once, longest):
            continue
        load, own = point.load_seconds or 0.0, point.virtual_node_seconds or 0.0
        counted = replace(
            plan.predicted,
            step_seconds=step,
            step_seconds_low=None if spread is None else max(0.0, step - spread),
            step_seconds_high=None if spread is None else step + spread,
            sync_seconds=least + more,
            compute_seconds=group.virtual_nodes * (point.step_seconds - load - own),
            load_seconds=group.virtual_nodes * load,
            virtual_node_seconds=group.virtual_nodes * own,
            update_seconds=cost.update_seconds,
            fixed_seconds=cost.fixed_seconds,
        )
        rounding = max(1e-14 * definitions.fitted_ring_seconds(option) for option in used)
        rounding = max(rounding, 1e-12 * step)
        found.append([*unlike(stated, counted, "predicted.", TOLERANCE, rounding)])
    return min(found, key=len)


def _work(group: ReplicaGroup, costs: DeviceCosts) -> tuple[float, BatchPoint]:
    """Return the seconds of all passes of one device of a group, and its measured point."""
    point = definitions.point(costs, group.virtual_node_batch_size)
    if point is None:
        raise AssertionError("judged before: the size is one of the curve")
    return group.virtual_nodes * point.step_seconds, point


def bound_faults(plan: Plan, problem: SplitProblem) -> list[str]:
    """What of a larger problem refutes the proof of a plan that uses some of its devices."""
    return [fault for fault in _bound_faults(plan, problem) if "lower_bound" in fault]


def _bound_faults(plan: Plan, problem: SplitProblem) -> Iterator[str]:
    """Compare the proof with simple plans, and with all that can be searched."""
    proof = plan.proof
    if plan.objective != "step_seconds" or proof.lower_bound is None:
        return
    obvious = list(_obvious_plans(problem))
    fast = min(obvious, default=None, key=lambda one: one.step_seconds)
    if fast is not None and proof.lower_bound > fast.step_seconds * (1 + TOLERANCE):
        yield (
            f"proof: lower_bound {proof.lower_bound} s is refuted by {fast.what}, "
            f"{fast.step_seconds} s"
        )
    elif (devices := split_bound.faster(problem, proof.lower_bound)) is not None:
        yield f"proof: lower_bound {proof.lower_bound} s is refuted: {devices} take less"
    if proof.tolerance is not None:
        yield from _tolerance_faults(plan, problem, obvious)


def _tolerance_faults(
    plan: Plan, problem: SplitProblem, obvious: list["_Obvious"]
) -> Iterator[str]:
    """List faults of the tolerance: wider than any measured spread, or a simpler plan fits it."""
    proof = plan.proof
    tolerance, best = proof.tolerance or 0.0, proof.lower_bound or 0.0
    widest = _widest_spread(problem)
    if tolerance > widest * (1 + TOLERANCE) + TOLERANCE:
        yield f"proof: tolerance {tolerance} is wider than any spread of the profiles, {widest}"
    if proof.termination != "optimal":
        return
    least = min(
        (one for one in obvious if one.step_seconds <= best * (1 + tolerance) * (1 - TOLERANCE)),
        default=None,
        key=lambda one: one.rank,
    )
    if _weighs_errors(problem):
        within = [one for one in obvious if one.step_seconds <= best * (1 + tolerance)]
        latest = _latest_seconds(plan, problem)
        yield from (
            f"proof: {one.what} is within the tolerance, and where estimates are wrong ends "
            f"earlier: after {one.latest_seconds} s"
            for one in within
            if one.latest_seconds * (1 + TOLERANCE) < latest
        )
    elif least is not None and least.rank < (plan.num_virtual_nodes, plan.num_devices):
        yield f"proof: {least.what} is within the tolerance, and simpler: {least.step_seconds} s"


def _weighs_errors(problem: SplitProblem) -> bool:
    """Whether the plan to take is that which is least late where estimated types are slower."""
    errors = {option.step_error for option in problem.devices}
    return len(errors) > 1 and any(option.is_estimated for option in problem.devices)


def _latest_seconds(plan: Plan, problem: SplitProblem) -> float:
    """Return a step in which each type's passes take as long as its error allows."""
    number, steps = plan.num_devices, [0.0]
    used = {group.device_type for group in plan.groups}
    link = definitions.ring_link([one for one in problem.devices if one.device_type in used])
    for group in plan.groups:
        option = next(one for one in problem.devices if one.device_type == group.device_type)
        costs = definitions.terms(option, number)
        exposed = definitions.exposed_seconds(option, number, group.virtual_node_batch_size, link)
        seconds = _work(group, costs)[0] * (1 + (option.step_error or 0.0))
        steps.append(seconds + (exposed or 0.0) + costs.update_seconds + costs.fixed_seconds)
    sync = max(
        definitions.split_sync_seconds(option, number)
        for option in problem.devices
        if option.device_type in used
    )
    return max(steps) + sync


def _widest_spread(problem: SplitProblem) -> float:
    """Return the largest relative error in the profiles; no plan's interval can be wider."""
    errors = [option.step_error for option in problem.devices]
    for option in problem.devices:
        for costs in (option, definitions.terms(option, 1)):
            errors += [point.step_seconds_error for point in costs.batch_curve]
    return max((error for error in errors if error is not None), default=0.0)


@dataclass(frozen=True)
class _Obvious:
    """A simple plan to compare with.

    ``latest_seconds`` is its step where passes take as long as the type's error allows. ``rank`` is
    (virtual nodes, devices): fewer is simpler. ``what`` describes it in a fault.
    """

    step_seconds: float
    latest_seconds: float
    rank: tuple[int, int]
    what: str


def _obvious_plans(problem: SplitProblem) -> Iterator[_Obvious]:
    """Yield the plans on devices of one type that all do equal work."""
    batch = problem.global_batch_size
    share = batch // problem.virtual_nodes if problem.virtual_nodes else None
    for option in problem.devices:
        for number in range(1, min(option.num_devices, batch) + 1):
            if batch % number:
                continue
            costs = definitions.terms(option, number)
            link = definitions.ring_link([option])
            fixed = definitions.split_sync_seconds(option, number)
            fixed += costs.update_seconds + costs.fixed_seconds
            for point in costs.batch_curve:
                passes, rest = divmod(batch // number, point.batch_size)
                if rest == 0 and share in (None, point.batch_size):
                    what = f"{number} {option.device_type} x {passes} x {point.batch_size}"
                    exposed = definitions.exposed_seconds(option, number, point.batch_size, link)
                    step = passes * point.step_seconds + (exposed or 0.0) + fixed
                    later = passes * point.step_seconds * (option.step_error or 0.0)
                    yield _Obvious(step, step + later, (number * passes, number), what)
