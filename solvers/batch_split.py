"""Split a global batch over unlike devices, exactly and fast.

VirtualFlow 5.1.2: least is the compute time of the slowest device, plus synchronisation, plus
the largest update. The published solver is not described; this one searches the finite set of
candidate compute times, asking of each by subset sums (split_reach.py) whether the batch can be
shared out. What synchronisation and updates add depends only on which types and how many
devices may be used: those choices are the levels, tried in order of a lower bound.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..costs.split import predict
from ..schema.errors import InfeasibleError
from ..schema.plan import DeviceGroup, Proof, SplitPlan
from ..schema.problem import SplitProblem
from .bitsets import members
from .split_choose import choose, fewest_passes
from .split_levels import Level, first_bound, levels, single_device
from .split_reach import Pool, counts_within, reach, reachable_batches

METHOD = "threshold search over candidate times, exact subset sums on bitsets"
_ABOVE_ROUNDING = 1 - 1e-12


@dataclass(frozen=True, slots=True)
class _Best:
    """The best answer so far: step seconds, and the counts and compute bound that give it."""

    step_seconds: float
    counts: tuple[int, ...]
    compute_seconds: float


def solve(problem: SplitProblem) -> SplitPlan:
    """Minimise the predicted step time.

    Exact in both regimes; devices of one type may differ, and devices may stay unused.
    Deterministic: of equally fast plans, the rule of split_choose.py.

    Args:
        problem: Profiles, pool and batch.

    Returns:
        A plan that ``checks.batch_split.check`` accepts for ``problem``, proved optimal.

    Raises:
        InfeasibleError: No devices and sizes add up to the batch; the hint names the nearest
            batches that can be reached.
    """
    pool = Pool(problem)
    if not pool.options:
        raise _no_size_fits(problem)
    best = _search_levels(problem, pool)
    if best is None:
        raise _unreachable(problem, pool)
    return _plan(problem, pool, best)


def _search_levels(problem: SplitProblem, pool: Pool) -> _Best | None:
    best: _Best | None = None
    alone = single_device(problem, pool)
    if alone:
        best = _Best(alone.step_seconds, alone.counts, alone.compute_seconds)
    if sum(pool.counts) == 1:
        return best
    everything = Level(pool.counts, sum(pool.counts), 0.0)
    floor = least_seconds(pool, everything, np.inf)
    if floor is None:
        return best
    for bound, level in levels(problem, pool, floor[0]):
        if best and bound * _ABOVE_ROUNDING >= best.step_seconds:
            break  # levels come in order of their bounds
        cutoff = best.step_seconds - level.overhead_seconds if best else np.inf
        if (level.counts, level.num_devices) == (everything.counts, everything.num_devices):
            found: tuple[float, tuple[int, ...]] | None = floor
        else:
            found = least_seconds(pool, level, cutoff * _ABOVE_ROUNDING, floor[0])
        if found and (not best or found[0] + level.overhead_seconds < best.step_seconds):
            best = _Best(found[0] + level.overhead_seconds, found[1], found[0])
    return best


def least_seconds(
    pool: Pool, level: Level, cutoff: float, floor: float = 0.0
) -> tuple[float, tuple[int, ...]] | None:
    """The least compute time within a level, and device counts that reach it.

    Args:
        pool: Sizes and times.
        level: Devices that may be used.
        cutoff: Give up where the answer would be above this.
        floor: A known lower bound on the answer.
    """
    ceiling = min(cutoff, float((pool.limits * pool.seconds).max()))

    known: dict[bytes, tuple[int, ...] | None] = {}
    mine = np.repeat(np.array(level.counts) > 0, pool.ends - pool.starts)

    def fits(seconds: float) -> tuple[int, ...] | None:
        key = pool.passes(seconds)[mine].tobytes()  # the time matters only through the passes
        if key not in known:
            known[key] = counts_within(pool, level.counts, level.num_devices, seconds)
        return known[key]

    start = _least_candidate(
        pool, max(floor, first_bound(pool, level)), ceiling, lambda t: _holds(pool, level, t)
    )
    if start is None:
        return None
    counts = fits(start)
    if counts:
        return start, counts
    least = _least_candidate(pool, start, ceiling, lambda t: fits(t) is not None)
    if least is None:
        return None
    counts = fits(least)
    return (least, counts) if counts else None


def _holds(pool: Pool, level: Level, seconds: float) -> bool:
    """Whether the level's devices can do at least B, exactness aside."""
    tops = pool.tops(pool.passes(seconds))
    left, total = level.num_devices, 0
    for top, count in sorted(zip(tops, level.counts, strict=True), reverse=True):
        total += top * min(left, count)
        left -= min(left, count)
    return total >= pool.batch


def _least_candidate(
    pool: Pool, low: float, ceiling: float, fits: Callable[[float], bool]
) -> float | None:
    """The least candidate time in [low, ceiling] that fits; ``fits`` never turns back to False."""
    width = low / 512
    below, above = low, low
    while not fits(above):
        if above >= ceiling:
            return None
        below, above = above, min(ceiling, above + width)
        width *= 2
    return _bisect(_candidates(pool, below, above), fits)


def _bisect(times: list[float], fits: Callable[[float], bool]) -> float:
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(times[middle]) else (middle + 1, high)
    return times[low]


def _candidates(pool: Pool, below: float, above: float) -> list[float]:
    """Every v t_i(s) from the last one at or under ``below`` to the last at or under ``above``."""
    first = np.maximum(pool.passes(below), 1)
    count = pool.passes(above) - first + 1
    keep = count > 0
    first, count, seconds = first[keep], count[keep], pool.seconds[keep]
    offsets = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    times: list[float] = np.unique(
        (np.repeat(first, count) + offsets) * np.repeat(seconds, count)
    ).tolist()
    return times


def _plan(problem: SplitProblem, pool: Pool, best: _Best) -> SplitPlan:
    reached = reach(pool, best.counts, best.compute_seconds)
    if reached is None:
        raise AssertionError("the search returned counts that do not reach the batch")
    groups = _groups(pool, choose(reached), best.compute_seconds)
    predicted = predict(problem, groups)
    return SplitPlan(
        model=problem.model,
        global_batch_size=problem.global_batch_size,
        groups=groups,
        uniform_virtual_nodes=problem.virtual_nodes,
        optimizer=problem.optimizer,
        predicted=predicted,
        proof=Proof(
            termination="optimal",
            objective=predicted.step_seconds,
            lower_bound=predicted.step_seconds,
            gap=0.0,
            method=METHOD,
        ),
    )


def _groups(pool: Pool, work: dict[int, Counter[int]], bound: float) -> tuple[DeviceGroup, ...]:
    passes = pool.passes(bound)
    groups = []
    for kind, amounts in sorted(work.items()):
        option, points = pool.options[kind]
        times = {point.batch_size: point.step_seconds for point in points}
        for samples, num_devices in sorted(amounts.items(), reverse=True):
            size, count = fewest_passes(pool.entries(passes, kind), samples) or (0, 0)
            groups.append(
                DeviceGroup(
                    device_type=option.device_type,
                    num_devices=num_devices,
                    device_batch_size=samples,
                    virtual_nodes=count,
                    virtual_node_batch_size=size,
                    pass_seconds=times[size],
                    interpolated=size in option.interpolated_sizes,
                )
            )
    return tuple(groups)


def _sizes(problem: SplitProblem) -> list[int]:
    return sorted({p.batch_size for option in problem.devices for p in option.batch_curve})


def _no_size_fits(problem: SplitProblem) -> InfeasibleError:
    sizes, batch = _sizes(problem), problem.global_batch_size
    if problem.virtual_nodes is None:
        return InfeasibleError(
            f"a global batch of {batch} is below {sizes[0]}, the smallest profiled batch size",
            hint=f"use a global batch of {sizes[0]}, or profile smaller batch sizes",
        )
    number = problem.virtual_nodes
    size = batch // number
    below = max((s for s in sizes if s < size), default=None)
    above = min((s for s in sizes if s > size), default=None)
    near = [str(number * s) for s in (below, above) if s]
    return InfeasibleError(
        f"{number} virtual nodes of a global batch of {batch} hold {size} samples each, a size "
        "that was not profiled or does not fit",
        hint=f"nearest batches with a plan for {number} virtual nodes: {' and '.join(near)}; "
        f"or choose virtual nodes of {', '.join(map(str, sizes))} samples",
    )


def _unreachable(problem: SplitProblem, pool: Pool) -> InfeasibleError:
    below, above = nearest_batches(problem)
    sizes = ", ".join(str(size) for size in sorted({int(size) for size in pool.sizes}))
    near = [str(batch) for batch in (below, above) if batch]
    return InfeasibleError(
        f"no plan adds up to a global batch of exactly {pool.batch}: each of the "
        f"{sum(pool.counts)} devices runs whole passes of one profiled size ({sizes})",
        hint=f"nearest batches with a plan: {' and '.join(near)}; or profile more batch sizes",
    )


def nearest_batches(problem: SplitProblem) -> tuple[int | None, int | None]:
    """The largest reachable batch below the problem's, and the smallest above it.

    Args:
        problem: Profiles and pool; its virtual nodes are not considered.
    """
    batch, smallest = problem.global_batch_size, _sizes(problem)[0]
    wider = SplitProblem(
        model=problem.model,
        global_batch_size=batch + smallest,  # one device alone reaches a multiple in here
        devices=problem.devices,
    )
    sums = reachable_batches(Pool(wider), batch + smallest)
    below = sums & ((1 << batch) - 1)
    above = sums >> (batch + 1)
    return (
        below.bit_length() - 1 if below > 1 else None,
        members(above & -above)[0] + batch + 1 if above else None,
    )
