"""Of splits whose predicted step stays within a limit, the one whose latest step is the least.

The latest step is that of devices whose passes take as long as their types' errors allow: a type
that was measured is hardly slower than predicted, one that is only estimated may be. Where errors
are unlike, work moves from estimated types to measured ones as far as the limit allows.

Scaling each type's passes by its error gives a split problem of its own. It is solved exactly by
the same search (levels.py), with the limit as a bound on each device's passes.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np

from ...schema.plan import ReplicaGroup
from ...schema.problem import DeviceCosts, DeviceOption, SplitProblem
from .feasible import feasible_sums
from .levels import least_seconds, levels, single_devices
from .pool import SplitPool
from .ties import choose, groups_of

_ROUNDING = 1 + 1e-12
Costs = TypeVar("Costs", bound=DeviceCosts)


def needs_least_latest(problem: SplitProblem) -> bool:
    """Whether some type is estimated, and types' errors are unlike."""
    errors = {option.step_error for option in problem.devices}
    return len(errors) > 1 and any(option.is_estimated for option in problem.devices)


def least_latest(
    problem: SplitProblem, pool: SplitPool, limit_seconds: float
) -> tuple[ReplicaGroup, ...]:
    """The split with the least latest step of all that are predicted to stay within the limit.

    Args:
        problem: Profiles, pool and batch.
        pool: Their sizes and times.
        limit_seconds: At least the fastest plan's predicted step.
    """
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
        slowed.limits = np.minimum(unlimited, pool.passes(max(left, 0.0)))
        found = least_seconds(slowed, level, step - level.overhead_seconds)
        if found is None or found[0] + level.overhead_seconds >= step:
            continue
        sums = feasible_sums(slowed, found[1], found[0])
        assert sums is not None
        step = found[0] + level.overhead_seconds
        best = groups_of(slowed, choose(sums), found[0])
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
