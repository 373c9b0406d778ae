"""Devices that an allocation leaves idle, counted from the definition.

An idle device is usable if a job could run faster on it while everything else stays as it is. A
job could move there the time that it does not use, and the time that it spends on slower columns
or in a slower pair (if its partner does not lose by running alone). Of the columns that hold a
device type, the one that uses most idle devices of the type counts.
"""

from math import fsum, inf

import numpy as np

from ...schema.jobs import Allocation
from .allocation_policies import Floats, Pool
from .judges import judge_of

# Smaller fractions of a job's time, and of the devices of a type, are rounding errors.
NEGLIGIBLE_TIME = 1e-5
NEGLIGIBLE_PART = 1e-6
# A column on which a job runs slower than this fraction of its best rate is of no use to it.
NEGLIGIBLE_RATE = 1e-6
# Numbers of devices that differ by less than this fraction of the type's devices are the same.
SAME_PART = 2e-5


def idle_faults(allocation: Allocation, pool: Pool) -> list[str]:
    """List wrong counts of idle devices, and usable devices that filling should have shared."""
    idle = idle_devices(allocation, pool)
    usable = usable_devices(allocation, pool, idle)
    types = pool.problem.num_devices
    faults = [
        f"{number} idle {what}{name} stated, {counted[name]} counted"
        for what, stated, counted in (
            ("", allocation.idle_devices, idle),
            ("usable ", allocation.usable_idle_devices, usable),
        )
        if stated is not None
        for name, number in ({name: 0.0 for name in types} | stated).items()
        if name not in types or abs(number - counted[name]) > SAME_PART * types[name]
    ]
    if allocation.fill is None:
        return faults
    known = judge_of(allocation.policy)
    if known is not None and known.sees is not None:  # other columns stay idle on purpose
        usable = usable_devices(allocation, known.sees(pool), idle)
    return faults + [
        f"called filled, but {number} idle {name} could speed jobs up"
        for name, number in usable.items()
        if number > SAME_PART * types[name]
    ]


def idle_devices(allocation: Allocation, pool: Pool) -> dict[str, float]:
    """Count the devices of each resource that no job holds, on average over time."""
    held: dict[str, list[float]] = {name: [] for name in pool.capacity}
    for name, shares in allocation.x.items():
        for column, time in shares.items():
            for resource, number in pool.holds(name, column).items():
                held[resource].append(number * time)
    for pair in allocation.pairs:
        for column, time in pair.shares.items():
            for resource, number in pool.holds(pair.jobs[0], column).items():
                held[resource].append(number * time)
    left = {name: number - fsum(held[name]) for name, number in pool.capacity.items()}
    return {
        name: number if number > NEGLIGIBLE_PART * pool.capacity[name] else 0.0
        for name, number in left.items()
    }


def usable_devices(allocation: Allocation, pool: Pool, idle: dict[str, float]) -> dict[str, float]:
    """Count the idle devices of each type that jobs could use, each type considered alone."""
    moves = _movable(allocation, pool)
    held = {resource: pool.held(resource) for resource in pool.capacity}
    room = np.full_like(moves, inf)
    for resource, number in held.items():
        left = np.full_like(moves, inf)
        np.divide(idle[resource], number, out=left, where=number > 0)
        room = np.minimum(room, left)
    moves = np.where(moves > NEGLIGIBLE_TIME, np.minimum(moves, room), 0.0)
    return {
        device: min(idle[device], fsum((held[device] * moves).max(axis=1)))
        for device in pool.problem.num_devices
    }


def _movable(allocation: Allocation, pool: Pool) -> Floats:
    """Return the fraction of its time that each job could move to each column and run faster.

    Returns:
        Fractions [jobs, columns]; 0 where the job does not run.
    """
    rates = pool.rates
    place = {name: row for row, name in enumerate(pool.jobs)}
    column = {name: number for number, name in enumerate(pool.columns)}
    times = np.zeros_like(rates)
    for name, shares in allocation.x.items():
        for c, time in shares.items():
            times[place[name], column[c]] = time
    slower, spent = np.zeros_like(rates), times.sum(axis=1)
    for own_rate, time_there in zip(rates.T, times.T, strict=True):
        slower += np.where(own_rate[:, None] < rates, time_there[:, None], 0.0)
    for pair in allocation.pairs:
        for name, other in (pair.jobs, pair.jobs[::-1]):
            row = place[name]
            for c, time in pair.shares.items():
                spent[row] += time
                own, beside = pool.pair_rates((name, other), c)
                if pool.rate(other, c) >= beside:
                    slower[row] += np.where(own < rates[row], time, 0.0)
    useful = rates > NEGLIGIBLE_RATE * rates.max(axis=1, keepdims=True)
    unused = np.maximum(1.0 - spent, 0.0)
    return np.where(useful, slower + unused[:, None], 0.0)
