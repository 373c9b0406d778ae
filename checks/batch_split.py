"""Judge a batch split from its definition (VirtualFlow 5.1.2, EasyScale 3.4).

Slow and obvious on purpose; shares no code with the solvers.
"""

from collections import Counter
from collections.abc import Iterator

from ..schema.plan import DeviceGroup, SplitPlan
from ..schema.problem import DeviceOption, SplitProblem
from . import definitions
from .est_mapping import est_faults

TOLERANCE = 1e-9


def check(plan: SplitPlan, problem: SplitProblem | None) -> list[str]:
    """List every fault of a plan; an empty list means that it holds.

    Args:
        plan: The plan to judge.
        problem: What it claims to answer. None judges the plan's own consistency only.
    """
    faults = [*_own_faults(plan), *_proof_faults(plan), *est_faults(plan, problem)]
    if problem is not None:
        faults += _against_problem(plan, problem)
    return faults


def differ(left: float, right: float, rounding: float = 0.0) -> bool:
    """Whether two numbers differ by more than 1e-9, relative to the larger, and than rounding."""
    return abs(left - right) > max(TOLERANCE * max(abs(left), abs(right)), rounding)


def _own_faults(plan: SplitPlan) -> Iterator[str]:
    predicted = plan.predicted
    parts = (predicted.compute_seconds, predicted.sync_seconds, predicted.update_seconds)
    known = [part for part in parts if part is not None]
    if len(known) == 3 and differ(sum(known), predicted.step_seconds):
        yield (
            f"predicted: compute, sync and update add up to {sum(known)} s, "
            f"not to step_seconds {predicted.step_seconds}"
        )
    if differ(predicted.samples_per_second * predicted.step_seconds, plan.global_batch_size):
        yield (
            f"predicted: {predicted.samples_per_second} samples/s in {predicted.step_seconds} s "
            f"is not the global batch of {plan.global_batch_size}"
        )
    yield from _uniform_faults(plan)
    if plan.num_devices == 1 and predicted.sync_seconds:
        yield f"predicted: one device has nothing to synchronise, got {predicted.sync_seconds} s"
    times = [g.virtual_nodes * g.pass_seconds for g in plan.groups if g.pass_seconds is not None]
    if len(times) == len(plan.groups) and predicted.compute_seconds is not None:
        if differ(max(times), predicted.compute_seconds):
            yield (
                f"predicted: compute_seconds is {predicted.compute_seconds}, "
                f"but the slowest group takes {max(times)} s"
            )


def _uniform_faults(plan: SplitPlan) -> Iterator[str]:
    nodes = plan.uniform_virtual_nodes
    if nodes is None:
        return
    if plan.num_virtual_nodes != nodes:
        yield f"groups: {plan.num_virtual_nodes} virtual nodes, not uniform_virtual_nodes {nodes}"
    if {group.virtual_node_batch_size for group in plan.groups} != {plan.global_batch_size / nodes}:
        yield f"groups: virtual nodes differ from {plan.global_batch_size}/{nodes} samples each"


def _proof_faults(plan: SplitPlan) -> Iterator[str]:
    proof = plan.proof
    optimal = proof.termination == "optimal"
    if plan.objective == "step_seconds" and differ(proof.objective, plan.predicted.step_seconds):
        yield (
            f"proof: objective {proof.objective} s is not the predicted step time "
            f"{plan.predicted.step_seconds} s"
        )
    if proof.lower_bound is None:
        if optimal:
            yield "proof: optimal without a lower_bound"
        return
    if proof.lower_bound > proof.objective * (1 + TOLERANCE):
        yield f"proof: lower_bound {proof.lower_bound} is above the objective {proof.objective}"
    gap = (proof.objective - proof.lower_bound) / proof.objective if proof.objective else 0.0
    if proof.gap is None or abs(gap - proof.gap) > TOLERANCE:
        yield f"proof: gap is {proof.gap}, but the bound leaves {gap}"
    if optimal and gap > TOLERANCE:
        yield f"proof: optimal, but the bound leaves a gap of {gap}"


def _against_problem(plan: SplitPlan, problem: SplitProblem) -> list[str]:
    options = {option.device_type: option for option in problem.devices}
    faults = [*_question_faults(plan, problem)]
    for index, group in enumerate(plan.groups):
        faults += [
            f"groups[{index}]: {fault}"
            for fault in _group_faults(group, options.get(group.device_type), problem)
        ]
    faults += _count_faults(plan, options)
    if not faults:  # the rest needs known types and sizes
        faults += _prediction_faults(plan, options)
        faults += _bound_faults(plan, problem)
    return faults


def _question_faults(plan: SplitPlan, problem: SplitProblem) -> Iterator[str]:
    if plan.model != problem.model:
        yield f"model is {plan.model!r}, the profiles are of {problem.model!r}"
    if plan.global_batch_size != problem.global_batch_size:
        yield (
            f"global_batch_size is {plan.global_batch_size}, "
            f"the problem asks for {problem.global_batch_size}"
        )
    if problem.virtual_nodes is not None and plan.num_virtual_nodes != problem.virtual_nodes:
        yield (
            f"the plan has {plan.num_virtual_nodes} virtual nodes, "
            f"the problem asks for {problem.virtual_nodes}"
        )


def _group_faults(
    group: DeviceGroup, option: DeviceOption | None, problem: SplitProblem
) -> Iterator[str]:
    if option is None:
        known = ", ".join(option.device_type for option in problem.devices)
        yield f"device type {group.device_type!r} is not usable; there are {known}"
        return
    size = group.virtual_node_batch_size
    times = {point.batch_size: point.step_seconds for point in option.batch_curve}
    if size not in times:
        yield f"a pass of {size} samples on {group.device_type} is not profiled or does not fit"
    elif group.pass_seconds is not None and differ(group.pass_seconds, times[size]):
        yield f"pass_seconds is {group.pass_seconds}, the profile says {times[size]}"
    if group.interpolated != (size in option.interpolated_sizes):
        yield f"interpolated is {group.interpolated}, which is not true of {size} samples"
    if problem.virtual_nodes is not None:
        share = problem.global_batch_size // problem.virtual_nodes
        if size != share:
            yield f"virtual nodes hold {size} samples; {problem.virtual_nodes} of them need {share}"


def _count_faults(plan: SplitPlan, options: dict[str, DeviceOption]) -> Iterator[str]:
    used: Counter[str] = Counter()
    for group in plan.groups:
        used[group.device_type] += group.num_devices
    for name, number in used.items():
        if name in options and number > options[name].num_devices:
            yield f"{number} devices of {name} are used, there are {options[name].num_devices}"


def _prediction_faults(plan: SplitPlan, options: dict[str, DeviceOption]) -> Iterator[str]:
    compute, sync, update, rounding = 0.0, 0.0, 0.0, 0.0
    for group in plan.groups:
        option = options[group.device_type]
        compute = max(compute, group.virtual_nodes * _pass(option, group.virtual_node_batch_size))
        sync = max(sync, definitions.split_sync_seconds(option, plan.num_devices))
        update = max(update, option.update_seconds)
        rounding = max(rounding, 1e-14 * definitions.fitted_ring_seconds(option))
    found = plan.predicted
    pairs = (
        ("compute_seconds", found.compute_seconds, compute),
        ("sync_seconds", found.sync_seconds, sync),
        ("update_seconds", found.update_seconds, update),
        ("step_seconds", found.step_seconds, compute + sync + update),
    )
    for name, claimed, true in pairs:
        if claimed is not None and differ(claimed, true, rounding):
            yield f"predicted.{name} is {claimed}, the profiles give {true}"


def _pass(option: DeviceOption, size: int) -> float:
    return next(p.step_seconds for p in option.batch_curve if p.batch_size == size)


def _bound_faults(plan: SplitPlan, problem: SplitProblem) -> Iterator[str]:
    """Hold the proof against a bound that cannot be beaten and plans that are easy to see."""
    if plan.objective != "step_seconds":
        return
    floor = continuous_bound(problem)
    proof = plan.proof
    if proof.objective < floor * (1 - TOLERANCE):
        yield f"proof: objective {proof.objective} s is below {floor} s, which no plan can beat"
    if proof.lower_bound is None:
        return
    step, what = min(_obvious_plans(problem), default=(float("inf"), ""))
    if proof.lower_bound > step * (1 + TOLERANCE):
        yield f"proof: lower_bound {proof.lower_bound} s is refuted by {what}, {step} s"


def continuous_bound(problem: SplitProblem) -> float:
    """Seconds per step that no split can beat: all devices at their best rate, work divided
    at will, nothing to synchronise, the cheapest update.
    """  # noqa: D205
    rate = sum(
        option.num_devices * max(p.batch_size / p.step_seconds for p in option.batch_curve)
        for option in problem.devices
    )
    return problem.global_batch_size / rate + min(o.update_seconds for o in problem.devices)


def _obvious_plans(problem: SplitProblem) -> Iterator[tuple[float, str]]:
    """Plans on equal devices of one type with equal work: (step seconds, in words)."""
    batch = problem.global_batch_size
    share = batch // problem.virtual_nodes if problem.virtual_nodes else None
    for option in problem.devices:
        sizes = [p for p in option.batch_curve if share in (None, p.batch_size)]
        for number in range(1, min(option.num_devices, batch) + 1):
            if batch % number:
                continue
            fixed = definitions.split_sync_seconds(option, number) + option.update_seconds
            for point in sizes:
                passes, rest = divmod(batch // number, point.batch_size)
                if rest == 0:
                    what = f"{number} {option.device_type} x {passes} x {point.batch_size}"
                    yield passes * point.step_seconds + fixed, what
