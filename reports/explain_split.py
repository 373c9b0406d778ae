"""The terms of a split plan's predicted step."""

from collections.abc import Iterator

from ..schema.plan import Plan, Prediction, ReplicaGroup
from .explain import Explanation, Term


def explain_split(plan: Plan) -> Explanation:
    """Explain the predicted step of a split plan.

    Args:
        plan: Of any version of the format; what an older one does not separate stays in one term.

    Raises:
        ProblemError: The plan's terms do not add up to its step.
    """
    predicted = plan.predicted
    return Explanation(
        title=f"{plan.model}, global batch {plan.global_batch_size}, {_devices(plan.num_devices)}",
        step_seconds=predicted.step_seconds,
        terms=tuple(_terms(plan, predicted)),
        remarks=tuple(_remarks(plan, predicted)),
        low_seconds=predicted.step_seconds_low,
        high_seconds=predicted.step_seconds_high,
        is_estimated=bool(plan.estimates),
    )


def _terms(plan: Plan, predicted: Prediction) -> Iterator[Term]:
    if predicted.compute_seconds is None:
        yield Term("whole step", predicted.step_seconds, note="its parts are not in the plan")
        return
    slowest = _slowest(plan)
    count = 1 if slowest is None else slowest.virtual_nodes
    note = "" if slowest is None else f"{slowest.virtual_node_batch_size} samples"
    where = "of the slowest device" if slowest is None else f"on the slowest {slowest.device_type}"
    yield Term(f"passes {where}", predicted.compute_seconds, count, note)
    for name, seconds in (
        ("waiting for samples", predicted.load_seconds),
        ("the runtime's part of a virtual node", predicted.virtual_node_seconds),
    ):
        if seconds is not None:
            yield Term(name, seconds, count)
    for name, seconds, note in (
        ("fixed cost of the step", predicted.fixed_seconds, ""),
        (
            f"synchronisation over {_devices(plan.num_devices)}",
            predicted.sync_seconds,
            _hidden(slowest),
        ),
        ("update", predicted.update_seconds, ""),
    ):
        if seconds is not None:
            yield Term(name, seconds, note=note)


def _hidden(slowest: ReplicaGroup | None) -> str:
    """The batch size of the measurement, where sizes differ in how much of it passes hide."""
    if slowest is None or slowest.exposed_seconds is None:
        return ""
    return f"behind passes of {slowest.virtual_node_batch_size} samples"


def _slowest(plan: Plan) -> ReplicaGroup | None:
    """The group that takes longest; None where a group does not give the time of a pass."""
    timed = [group for group in plan.groups if group.pass_seconds is not None]
    if len(timed) < len(plan.groups):
        return None
    return max(
        timed,
        key=lambda group: (
            group.virtual_nodes * (group.pass_seconds or 0.0) + (group.exposed_seconds or 0.0)
        ),
    )


def _remarks(plan: Plan, predicted: Prediction) -> Iterator[str]:
    yield from map(str, plan.estimates)
    yield from map(str, plan.reserves)
    yield from map(str, plan.sync_bounds)
    if predicted.compute_seconds is None:
        return
    if predicted.load_seconds is None:
        yield "waiting for samples was not measured apart: where there is any, passes hold it"
    if predicted.virtual_node_seconds is None:
        yield "the runtime's part of a virtual node was not measured apart from its pass"
    if predicted.fixed_seconds is None:
        yield "the fixed cost of a step was not measured: it counts as nothing"
    if plan.num_devices > 1 and not predicted.sync_seconds:
        yield "synchronisation was not measured: it counts as nothing"
    estimated = {estimate.device_type for estimate in plan.estimates}
    alone = {group.device_type for group in plan.groups if not group.measured_busy} - estimated
    if plan.num_devices > 1 and alone:
        yield (
            f"{', '.join(sorted(alone))}: measured alone, so what devices of one host take from "
            "each other is not in the passes"
        )


def _devices(number: int) -> str:
    return f"{number} device{'' if number == 1 else 's'}"
