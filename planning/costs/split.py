"""The step time of a batch split, straight from its definition (VirtualFlow 5.1.2)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...schema.errors import ProblemError
from ...schema.plan import Prediction, ReplicaGroup
from ...schema.problem import DeviceCosts, DeviceOption, SplitProblem
from ...schema.profile import BatchPoint
from .comm import Wire, exposed_seconds, hides, slowest_wire, sync_seconds, unhidden_seconds
from .compute import point_at


@dataclass(frozen=True, slots=True)
class _Work:
    """What a group does: its passes, the point of the curve that they are of, its own rest."""

    count: int
    point: BatchPoint
    costs: DeviceCosts
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        return self.count * self.point.step_seconds + self.rest_seconds

    @property
    def rest_seconds(self) -> float:
        return self.exposed_seconds + closing_seconds(self.costs)

    @property
    def latest_seconds(self) -> float | None:
        """The most that the point's spread allows."""
        error = self.point.step_seconds_error
        if error is None:
            return None
        return self.count * self.point.step_seconds * (1 + error) + self.rest_seconds


def closing_seconds(costs: DeviceCosts) -> float:
    """What a step costs on a device beside its passes and synchronisation."""
    return costs.update_seconds + costs.fixed_seconds


def exposed_on(
    option: DeviceOption, point: BatchPoint, num_devices: int, wire: Wire | None
) -> float | None:
    """What a device waits for sums beyond what all devices do, after a last pass of this size.

    ``point`` is of the type's curve, ``wire`` the slowest of all types in use.

    Returns:
        Seconds; None where there is nothing to wait for, or sizes are not told apart.
    """
    if num_devices < 2:
        return None
    if wire is not None and hides(option):
        return float(unhidden_seconds(point, num_devices, wire))
    return exposed_seconds(option.sync, point.batch_size)


def with_exposed(problem: SplitProblem, groups: Iterable[ReplicaGroup]) -> tuple[ReplicaGroup, ...]:
    """The groups of a plan, each with its ``exposed_seconds``."""
    used = tuple(groups)
    options = [_option(problem, group) for group in used]
    number, wire = sum(group.num_devices for group in used), slowest_wire(options)

    def told(group: ReplicaGroup, option: DeviceOption) -> ReplicaGroup:
        curve = option.measured_with(number).batch_curve
        point = point_at(curve, group.virtual_node_batch_size)
        return replace(group, exposed_seconds=exposed_on(option, point, number, wire))

    return tuple(map(told, used, options))


def predict(problem: SplitProblem, groups: Iterable[ReplicaGroup]) -> Prediction:
    """Predict a step: the slowest device, plus synchronisation.

    ``max_i (v_i t_i(b_i / v_i) + e_i(b_i / v_i) + update_i + fixed_i) + sync(n)``; nothing is
    synchronised on a single device. A device begins its next passes when its own update has ended:
    it waits for others in the sums alone. ``e_i`` is what more of the synchronisation is exposed at
    that size than at the best (``exposed_seconds``, in ``sync_seconds`` of the prediction). Curves,
    updates and fixed costs are those of a device alone where the plan has one in all, else those of
    a busy host. The slowest device's time is told in parts where its profile tells them.

    Raises:
        ProblemError: A group names a type or a size that the problem does not have.
    """
    used = with_exposed(problem, groups)
    num_devices = sum(group.num_devices for group in used)
    options = [_option(problem, group) for group in used]
    costs = [option.measured_with(num_devices) for option in options]
    work = [
        _Work(
            group.virtual_nodes,
            point_at(cost.batch_curve, group.virtual_node_batch_size),
            cost,
            group.exposed_seconds or 0.0,
        )
        for group, cost in zip(used, costs, strict=True)
    ]
    slowest = max(work, key=lambda one: one.seconds)
    sync = max(sync_seconds(option, num_devices) for option in options)
    step = slowest.seconds + sync
    samples = sum(group.num_devices * group.device_batch_size for group in used)
    half = _half_width_seconds(step, work, [option.step_error for option in options])
    return Prediction(
        step_seconds=step,
        samples_per_second=samples / step,
        compute_seconds=slowest.count * slowest.point.pass_seconds,
        load_seconds=_times(slowest.count, slowest.point.load_seconds),
        virtual_node_seconds=_times(slowest.count, slowest.point.virtual_node_seconds),
        fixed_seconds=slowest.costs.fixed_seconds or None,
        sync_seconds=sync + slowest.exposed_seconds,
        update_seconds=slowest.costs.update_seconds,
        step_seconds_low=None if half is None else max(0.0, step - half),
        step_seconds_high=None if half is None else step + half,
    )


def _half_width_seconds(
    step_seconds: float, work: Sequence[_Work], step_errors: Sequence[float | None]
) -> float | None:
    """Half the width of what the measurements allow; None where their spread is unknown."""
    # The larger of two. One is how much later the last device is where each pass takes as long as
    # its spread allows. The other is how far steps put together from such terms were from measured
    # ones. Both hold the spread of the passes, so they are not added. One that a type in use does
    # not tell is left out.
    latest = [one.latest_seconds for one in work]
    known = [seconds for seconds in latest if seconds is not None]
    errors = [error for error in step_errors if error is not None]
    halves = []
    if len(known) == len(latest):
        halves.append(max(known) - max(one.seconds for one in work))
    if len(errors) == len(step_errors):
        first = max(one.seconds for one in work)
        last = max(one.seconds * (1 + error) for one, error in zip(work, errors, strict=True))
        is_alike = min(errors) == max(errors)
        rest = max(errors) * (step_seconds - first)
        halves.append(max(errors) * step_seconds if is_alike else last - first + rest)
    return max(halves, default=None)


def _times(count: int, seconds: float | None) -> float | None:
    return None if seconds is None else count * seconds


def _option(problem: SplitProblem, group: ReplicaGroup) -> DeviceOption:
    for option in problem.devices:
        if option.device_type == group.device_type:
            return option
    known = ", ".join(option.device_type for option in problem.devices)
    raise ProblemError(f"no device of type {group.device_type!r}; the problem has {known}")
