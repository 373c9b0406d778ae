"""What fewer devices would cost in time, and what more would save."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from ...schema.errors import BackendError, InfeasibleError
from ...schema.parallel import ParallelPool, ParallelProblem
from ...schema.plan import Alternative, Gain, Plan
from ..effort import DEFAULT, Effort
from .solve import solve

Efforts = Callable[[int], Effort]
"""How much a search may do of what is left for so many searches, itself included."""

_SHARES = (1.0, 0.5, 0.25, 0.0)
_MOST_POOLS = 32  # parts of a pool that are solved


def alternatives(
    problem: ParallelProblem, plan: Plan, most: int, effort: Efforts = lambda _: DEFAULT
) -> tuple[Alternative, ...]:
    """Plans that no other found is at least as good as in every figure at once.

    Figures are time, devices, memory and, where every device has a price, dollars an hour.

    The best plan of each part of the pool that keeps all, half, a quarter or none of each type's
    devices, in whole servers: as good as ``solve`` proves it.

    The fastest ``most`` are given; after the limit of ``effort`` no more parts are solved.
    """
    if most < 1:
        return ()
    prices = {pool.device_type: pool.dollars_per_hour for pool in problem.pools}
    found = [_as_alternative(plan)]
    parts = _parts(problem)
    for number, pools in enumerate(parts):
        share = effort(len(parts) - number)
        if share.should_stop():
            break
        try:
            found.append(_as_alternative(solve(replace(problem, pools=pools), effort=share)))
        except (InfeasibleError, BackendError):
            continue
    figures = {_figures(one, prices): one for one in reversed(found)}
    kept = {
        mine: one
        for mine, one in figures.items()
        if not any(other != mine and _is_no_worse(other, mine) for other in figures)
    }
    kept.pop(_figures(found[0], prices), None)
    return tuple(kept[mine] for mine in sorted(kept))[:most]


def gains(
    problem: ParallelProblem, plan: Plan, effort: Efforts = lambda _: DEFAULT
) -> tuple[Gain, ...]:
    """What one more device of each type would buy, and one more server of it.

    Never more than the plan's own step, which stays possible.

    A search that ``effort`` stops says nothing of what devices would buy.
    """
    asked = [
        (number, more)
        for number, pool in enumerate(problem.pools)
        for more in sorted({1, pool.devices_per_server})
    ]
    found = []
    for place, (number, more) in enumerate(asked):
        pool, pools = problem.pools[number], list(problem.pools)
        pools[number] = replace(pool, num_devices=pool.num_devices + more)
        share = effort(len(asked) - place)
        if share.should_stop():
            break
        try:
            larger = solve(replace(problem, pools=tuple(pools)), effort=share)
        except BackendError:
            continue
        if share.should_stop():
            continue
        step = min(larger.predicted.step_seconds, plan.predicted.step_seconds)
        found.append(Gain(device_type=pool.device_type, num_devices=more, step_seconds=step))
    return tuple(found)


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


def _as_alternative(plan: Plan) -> Alternative:
    return Alternative(
        stages=plan.stages,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        num_model_chunks=plan.num_model_chunks,
        predicted=plan.predicted,
    )


def _figures(one: Alternative, prices: dict[str, float | None]) -> tuple[float, ...]:
    """Seconds, devices, bytes of the fullest device, dollars an hour (0 where a price lacks)."""
    dollars = 0.0
    if all(price is not None for price in prices.values()):
        used = one.devices_by_type
        dollars = sum(number * (prices[name] or 0.0) for name, number in used.items())
    return (
        0.0 if one.predicted is None else one.predicted.step_seconds,
        one.num_devices,
        max(stage.memory_bytes or 0 for stage in one.stages),
        dollars,
    )


def _is_no_worse(mine: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(mine, other, strict=True))
