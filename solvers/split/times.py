"""Candidate compute times of a batch split: the least one within which the batch fits a level."""

from collections.abc import Callable

import numpy as np

from .feasible import counts_within
from .levels import Level, first_bound, holds
from .pool import Pool


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
    ceiling = min(cutoff, float(pool.device_seconds(pool.limits).max()))

    known: dict[bytes, tuple[int, ...] | None] = {}
    mine = np.repeat(np.array(level.counts) > 0, pool.ends - pool.starts)

    def fits(seconds: float) -> tuple[int, ...] | None:
        key = pool.passes(seconds)[mine].tobytes()  # the time matters only through the passes
        if key not in known:
            known[key] = counts_within(pool, level.counts, level.num_devices, seconds)
        return known[key]

    start = least_candidate(
        pool, max(floor, first_bound(pool, level)), ceiling, lambda t: holds(pool, level, t)
    )
    if start is None:
        return None
    counts = fits(start)
    if counts:
        return start, counts
    least = least_candidate(pool, start, ceiling, lambda t: fits(t) is not None)
    if least is None:
        return None
    counts = fits(least)
    return (least, counts) if counts else None


def least_candidate(
    pool: Pool, low: float, ceiling: float, fits: Callable[[float], bool]
) -> float | None:
    """The least candidate time in [low, ceiling] that fits; ``fits`` must be monotone in time."""
    width = low / 512
    below, above = low, low
    while not fits(above):
        if above >= ceiling:
            return None
        below, above = above, min(ceiling, above + width)
        width *= 2
    return bisect(candidates(pool, below, above), fits)


def bisect(times: list[float], fits: Callable[[float], bool]) -> float:
    """The least of ascending times that fits; the last one does."""
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(times[middle]) else (middle + 1, high)
    return times[low]


def candidates(pool: Pool, below: float, above: float) -> list[float]:
    """Every v t_i(s) + e_i(s) from the last one at or under ``below`` to the last under ``above``.

    One at ``above`` is among them.
    """
    first = np.maximum(pool.passes(below), 1)
    count = pool.passes(above) - first + 1
    keep = count > 0
    first, count = first[keep], count[keep]
    seconds, exposed = pool.seconds[keep], pool.exposed[keep]
    offsets = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    passes = np.repeat(first, count) + offsets
    times: list[float] = np.unique(
        passes * np.repeat(seconds, count) + np.repeat(exposed, count)
    ).tolist()
    return times
