"""Refute the bound of a split: look for a faster split among all, by sums of samples.

For a time, each device of some types can do certain numbers of samples, as whole passes of one
size. The sums of such numbers over the devices are the bits of an integer: adding a device shifts
them. If the whole batch is among the sums for a time below the bound, the bound is wrong.
"""

from itertools import combinations
from math import gcd

from ..schema.problem import DeviceOption, SplitProblem
from . import definitions

MOST_STEPS = 4e5
"""Shifts of 10,000 bits that a refutation may take, about 0.1 s; larger problems are not searched.

Then only the bound that no split can beat and simple splits are compared (``batch_split``).
"""
_BELOW = 1 - 1e-9


def faster(problem: SplitProblem, seconds: float) -> str | None:
    """Describe the devices of a split whose step is shorter than ``seconds``.

    Returns:
        None if no split is shorter, or the problem is too large to search (``MOST_STEPS``).
    """
    limit, batch = seconds * _BELOW, problem.global_batch_size
    share = batch // problem.virtual_nodes if problem.virtual_nodes else None
    for option in problem.devices:
        costs = definitions.terms(option, 1)
        for point in costs.batch_curve:
            passes, rest = divmod(batch, point.batch_size)
            step = passes * point.step_seconds + costs.update_seconds + costs.fixed_seconds
            if rest == 0 and share in (None, point.batch_size) and step <= limit:
                return f"1 {option.device_type} alone"
    options = [o for o in problem.devices if o.batch_curve]
    total = sum(option.num_devices for option in options)
    in_all = [
        used for number in range(1, len(options) + 1) for used in combinations(options, number)
    ]
    plans = [(used, _amounts(used, limit, total, batch, share)) for used in in_all]
    steps = sum(
        option.num_devices * len(one)
        for used, amounts in plans
        for option, one in zip(used, amounts, strict=True)
    )
    if steps * (1 + batch / 1e4) > MOST_STEPS:
        return None
    for used, amounts in plans:
        if _reaches(used, amounts, batch):
            return "several of " + ", ".join(option.device_type for option in used)
    return None


def _amounts(
    used: tuple[DeviceOption, ...], limit: float, total: int, batch: int, share: int | None
) -> list[list[int]]:
    """[types] numbers of samples that one device can do, if all types in use end by ``limit``.

    Synchronisation counts as for the worst number of devices, and the slowest update.
    """
    sync = max(
        definitions.split_sync_seconds(option, number)
        for option in used
        for number in range(2, total + 1)
    ) if total > 1 else 0.0  # fmt: skip
    left = limit - sync - max(option.update_seconds + option.fixed_seconds for option in used)
    found = []
    for option in used:
        numbers: set[int] = set()
        for point in option.batch_curve:
            size = point.batch_size
            if share not in (None, size):
                continue
            exposed = definitions.exposed_seconds(option, 2, size) or 0.0
            most = int((left - exposed) / point.step_seconds) if left > exposed else 0
            numbers |= {passes * size for passes in range(1, min(most, batch // size) + 1)}
        found.append(sorted(numbers))
    return found


def _reaches(used: tuple[DeviceOption, ...], amounts: list[list[int]], batch: int) -> bool:
    """Whether two devices or more do exactly the batch."""
    stride = gcd(batch, *(each for one in amounts for each in one))
    mask = (1 << (batch // stride + 1)) - 1
    none, one, more = 1, 0, 0  # sums over no device, exactly one, and several
    for option, numbers in zip(used, amounts, strict=True):
        for _ in range(option.num_devices):
            joined, first = more, one
            for number in numbers:
                shift = number // stride
                joined |= (one | more) << shift
                first |= none << shift
            more, one = joined & mask, first & mask
    return bool(more >> (batch // stride) & 1)
