"""The step time of a batch split, straight from its definition (VirtualFlow 5.1.2)."""

from collections.abc import Iterable

from ..schema.errors import ProblemError
from ..schema.plan import DeviceGroup, Prediction
from ..schema.problem import DeviceOption, SplitProblem
from .comm import sync_seconds
from .compute import pass_seconds


def predict(problem: SplitProblem, groups: Iterable[DeviceGroup]) -> Prediction:
    """Predict a step: the slowest device, plus synchronisation, plus the slowest update.

    ``max_i v_i t_i(b_i / v_i) + sync(n) + max update``, the last two over the device types in
    use; nothing is synchronised on a single device.

    Args:
        problem: Profiles of the device types.
        groups: What each device does; sizes between profiled ones are interpolated.

    Raises:
        ProblemError: A group names a type or a size that the problem does not have.
    """
    used = tuple(groups)
    compute = max(
        group.virtual_nodes
        * pass_seconds(_option(problem, group).batch_curve, group.virtual_node_batch_size)
        for group in used
    )
    num_devices = sum(group.num_devices for group in used)
    sync = max(sync_seconds(_option(problem, group), num_devices) for group in used)
    update = max(_option(problem, group).update_seconds for group in used)
    step = compute + sync + update
    samples = sum(group.num_devices * group.device_batch_size for group in used)
    return Prediction(
        step_seconds=step,
        samples_per_second=samples / step,
        compute_seconds=compute,
        sync_seconds=sync,
        update_seconds=update,
    )


def _option(problem: SplitProblem, group: DeviceGroup) -> DeviceOption:
    for option in problem.devices:
        if option.device_type == group.device_type:
            return option
    known = ", ".join(option.device_type for option in problem.devices)
    raise ProblemError(f"no device of type {group.device_type!r}; the problem has {known}")
