"""Devices that an allocation leaves idle, counted from the definition.

An idle device is usable if a job could run faster on it while everything else stays as it is. A
job could move there the time that it does not use, and the time that it spends on slower columns
or in a slower pair (if its partner does not lose by running alone). Of the columns that hold a
device type, the one that uses most idle devices of the type counts.
"""

from math import fsum, inf

from ..schema.jobs import Allocation, PairShare
from .allocation_policies import Pool
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
    answer = {}
    shared: dict[str, list[tuple[str, PairShare]]] = {name: [] for name in pool.jobs}
    for pair in allocation.pairs:
        shared[pair.jobs[0]].append((pair.jobs[1], pair))
        shared[pair.jobs[1]].append((pair.jobs[0], pair))
    moves = {
        (name, column): _movable(allocation, pool, name, column, shared[name])
        for name in pool.jobs
        for column in pool.columns
    }
    for device in pool.problem.num_devices:
        wanted = []
        for name in pool.jobs:
            most = 0.0
            for column in pool.columns:
                held = pool.holds(name, column)
                if device in held and moves[name, column] > NEGLIGIBLE_TIME:
                    room = min((idle[r] / number for r, number in held.items()), default=inf)
                    most = max(most, held[device] * min(moves[name, column], room))
            wanted.append(most)
        answer[device] = min(idle[device], fsum(wanted))
    return answer


def _movable(
    allocation: Allocation,
    pool: Pool,
    name: str,
    column: str,
    shared: list[tuple[str, PairShare]],
) -> float:
    """Return the fraction of its time that a job could move to a column and run faster."""
    rate = pool.rate(name, column)
    if rate <= NEGLIGIBLE_RATE * max(pool.rate(name, c) for c in pool.columns):
        return 0.0
    spent = list(allocation.x[name].values())
    slower = [t for c, t in allocation.x[name].items() if pool.rate(name, c) < rate]
    for other, pair in shared:
        for c, time in pair.shares.items():
            spent.append(time)
            own, beside = pool.pair_rates((name, other), c)
            if own < rate and pool.rate(other, c) >= beside:
                slower.append(time)
    return fsum(slower) + max(0.0, 1.0 - fsum(spent))
