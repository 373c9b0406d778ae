"""The time that a plan on fewer devices would take: the best plans of parts of the pool."""

from dataclasses import replace
from itertools import product

from ...schema.errors import InfeasibleError
from ...schema.parallel import ParallelAlternative, ParallelPlan, ParallelPool, ParallelProblem
from .solve import solve

_SHARES = (1.0, 0.5, 0.25, 0.0)
_MOST_POOLS = 32  # parts of a pool that are solved


def alternatives(
    problem: ParallelProblem, plan: ParallelPlan, most: int
) -> tuple[ParallelAlternative, ...]:
    """Plans that no other found is at least as good as in time, devices and memory at once.

    The best plan of each part of the pool that keeps all, half, a quarter or none of each type's
    devices, in whole servers: as good as ``solve`` proves it.

    Args:
        problem: The whole pool's.
        plan: Its plan, which the alternatives are compared with.
        most: How many to give, the fastest first.
    """
    if most < 1:
        return ()
    found = [_as_alternative(plan)]
    for pools in _parts(problem):
        try:
            found.append(_as_alternative(solve(replace(problem, pools=pools))))
        except InfeasibleError:
            continue
    kept = [one for one in found if not any(_beats(other, one) for other in found)]
    unlike = {_figures(one): one for one in reversed(kept)}
    ordered = sorted(unlike.values(), key=_figures)
    return tuple(one for one in ordered if _figures(one) != _figures(found[0]))[:most]


def _parts(problem: ParallelProblem) -> list[tuple[ParallelPool, ...]]:
    parts = []
    for shares in product(_SHARES, repeat=len(problem.pools)):
        kept = []
        for pool, share in zip(problem.pools, shares, strict=True):
            width = pool.devices_per_server
            number = int(pool.num_devices * share)
            number -= number % width if number > width else 0
            if number:
                kept.append(replace(pool, num_devices=number))
        if kept and shares != (1.0,) * len(shares):
            parts.append(tuple(kept))
    return sorted(parts, key=lambda part: -sum(p.num_devices for p in part))[:_MOST_POOLS]


def _as_alternative(plan: ParallelPlan) -> ParallelAlternative:
    return ParallelAlternative(
        stages=plan.stages,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        predicted=plan.predicted,
    )


def _figures(one: ParallelAlternative) -> tuple[float, int, int]:
    """Seconds, devices, and bytes of the fullest device."""
    devices = sum(group.num_devices for stage in one.stages for group in stage.replicas)
    return one.predicted.step_seconds, devices, max(one.predicted.memory_bytes.values())


def _beats(one: ParallelAlternative, other: ParallelAlternative) -> bool:
    mine, its = _figures(one), _figures(other)
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))
