"""Candidate compute times of a batch split: the least one within which the batch fits a level."""

from collections.abc import Callable

import numpy as np

from ...schema.plan import RefutedSplits, SplitCertificate
from .feasible import counts_within
from .levels import Level, first_bound, holds, type_sets
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


def refutation(pool: Pool, step_seconds: float) -> SplitCertificate | None:
    """Show that every split on two or more devices takes ``step_seconds``, to 1e-9.

    Of each set of types (``type_sets``) the numbers of devices are taken together as long as the
    fewest devices' cost and the most devices' work refute them, and halved where they do not.

    Returns:
        None if some split is faster.
    """
    names = [option.device_type for option, _ in pool.options]
    refuted = []
    for counts, overheads, numbers in type_sets(pool) if sum(pool.counts) > 1 else ():
        most = sum(counts)
        spans = [(0, int(np.searchsorted(numbers, most)))] if most > 1 else []
        while spans:
            low, high = spans.pop()
            seconds = step_seconds * (1 - 1e-9) - float(overheads[low : high + 1].min())
            if seconds > 0 and counts_within(pool, counts, int(numbers[high]), seconds):
                if low == high:
                    return None
                middle = (low + high) // 2
                spans += [(middle + 1, high), (low, middle)]
                continue
            refuted.append(
                RefutedSplits(
                    device_types=tuple(n for n, count in zip(names, counts, strict=True) if count),
                    least_devices=int(numbers[low]) if low else 2,
                    most_devices=int(numbers[high]),
                )
            )
    return SplitCertificate(refuted=tuple(refuted))
