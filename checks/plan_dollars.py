"""Check the dollars that a plan states for its devices."""

from collections import Counter
from collections.abc import Iterator
from math import isclose

from ..schema.files import Plan
from ..schema.parallel import ParallelPlan
from ..schema.plan import SplitPlan

_TOLERANCE = 1e-9


def check(plan: Plan) -> list[str]:
    """List what is wrong with a plan's dollars per hour and per million samples.

    They are counted from the prices of the pool that the plan states. A plan without dollars has no
    fault; nor has a plan of an older version that states only dollars per hour.

    Returns:
        One sentence per fault.
    """
    return list(_faults(plan))


def _faults(plan: Plan) -> Iterator[str]:
    hourly = plan.predicted.dollars_per_hour
    per_million = plan.predicted.dollars_per_million_samples
    if hourly is None:
        if per_million is not None:
            yield "predicted: dollars_per_million_samples without dollars_per_hour"
        return
    counted = _hourly(plan)
    if counted is None:
        yield "predicted: dollars_per_hour, and the plan's cluster does not state every price"
    elif not isclose(hourly, counted, rel_tol=_TOLERANCE):
        yield f"predicted.dollars_per_hour is {hourly}, the cluster's prices give {counted}"
    if per_million is not None:
        # What an hour costs is what its samples cost.
        paid = per_million * plan.predicted.samples_per_second * 3600 / 1e6
        if not isclose(paid, hourly, rel_tol=_TOLERANCE):
            yield (
                f"predicted.dollars_per_million_samples is {per_million}: an hour's samples cost "
                f"{paid}, not dollars_per_hour {hourly}"
            )


def _hourly(plan: Plan) -> float | None:
    """Count the price of the devices in use; None if one is not known."""
    if plan.cluster is None:
        return None
    exact = {name: kind.dollars_per_hour for name, kind in plan.cluster.device_types.items()}
    prices = {name.lower(): price for name, price in exact.items()} | exact
    total = 0.0
    for name, number in _devices(plan).items():
        price = prices.get(name, prices.get(name.lower()))
        if price is None:
            return None
        total += number * price
    return total


def _devices(plan: Plan) -> Counter[str]:
    used: Counter[str] = Counter()
    if isinstance(plan, SplitPlan):
        for group in plan.groups:
            used[group.device_type] += group.num_devices
    elif isinstance(plan, ParallelPlan):
        for parallel_stage in plan.stages[: plan.num_positions]:
            for replicas in parallel_stage.replicas:
                used[replicas.device_type] += replicas.tensor_parallel_size * replicas.num_replicas
    else:
        seen = set()
        for stage in plan.stages:  # several stages may be on the same devices
            if (stage.device_type, stage.first_device) not in seen:
                seen.add((stage.device_type, stage.first_device))
                used[stage.device_type] += stage.num_replicas
    return used
