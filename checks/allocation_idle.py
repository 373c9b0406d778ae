"""Devices that an allocation leaves idle, from the definition; for the checker of allocations.

What jobs could use of an idle type, everything else staying as it is: the time that a job has
left, and the time that it spends on slower columns (or in slower company, where its partner is
no worse off alone), on the column that takes most of the type.
"""

from math import fsum, inf

from ..schema.jobs import Allocation, PairShare
from .allocation_policies import Pool
from .judges import judge_of

# Smaller parts of a job's time, and smaller parts of a type's devices, are rounding.
NEGLIGIBLE_TIME = 1e-5
NEGLIGIBLE_PART = 1e-6
# A column on which a job runs slower than this part of its best rate is of no use to it.
NEGLIGIBLE_RATE = 1e-6
# Figures that differ by less than this part of the type's devices are the same.
SAME_PART = 2e-5


def idle_faults(allocation: Allocation, pool: Pool) -> list[str]:
    """Faults of what is said of idle devices, and devices left idle that filling should share."""
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
    if known is not None and known.sees is not None:  # what it shuts is left idle on purpose
        usable = usable_devices(allocation, known.sees(pool), idle)
    return faults + [
        f"called filled, but {number} idle {name} could speed jobs up"
        for name, number in usable.items()
        if number > SAME_PART * types[name]
    ]


def idle_devices(allocation: Allocation, pool: Pool) -> dict[str, float]:
    """The amount of each resource that no job holds."""
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
    """How many of the idle devices of each type jobs could use, each type looked at alone."""
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
    """The part of its time that a job would rather spend on a column."""
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
