"""Levels of a batch split: which types and how many devices may be used, and what that adds.

Synchronisation and updates depend on the set of used types and on the number of devices, never
on who does what. Both only grow with either, so a level stands for all plans within it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..costs.comm import sync_seconds
from ..schema.problem import SplitProblem
from .split_reach import Pool

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Level:
    """At most ``num_devices`` of ``counts``; synchronisation and update take the overhead."""

    counts: tuple[int, ...]
    num_devices: int
    overhead_seconds: float


@dataclass(frozen=True, slots=True)
class Alone:
    """The best plan on a single device."""

    step_seconds: float
    compute_seconds: float
    counts: tuple[int, ...]


def single_device(problem: SplitProblem, pool: Pool) -> Alone | None:
    """The fastest device that can do the whole batch alone: nothing to synchronise."""
    choices = [
        (
            pool.batch // point.batch_size * point.step_seconds + option.update_seconds,
            kind,
            pool.batch // point.batch_size * point.step_seconds,
        )
        for kind, (option, points) in enumerate(pool.options)
        for point in points
        if pool.batch % point.batch_size == 0
    ]
    if not choices:
        return None
    step, kind, compute = min(choices)
    return Alone(step, compute, tuple(int(k == kind) for k in range(len(pool.counts))))


def first_bound(pool: Pool, level: Level) -> float:
    """Compute time if work could be divided at will: B over the best devices' rates."""
    rates = np.maximum.reduceat(pool.sizes / pool.seconds, pool.starts)
    total, left = 0.0, level.num_devices
    for rate, count in sorted(zip(rates.tolist(), level.counts, strict=True), reverse=True):
        total += rate * min(left, count)
        left -= min(left, count)
    return pool.batch / total * (1 - 1e-12)


def levels(problem: SplitProblem, pool: Pool, floor: float) -> Iterator[tuple[float, Level]]:
    """Every level that could hold the optimum on two or more devices, by its lower bound.

    Args:
        problem: The profiles.
        pool: The same as arrays.
        floor: A lower bound on the compute time of any plan.
    """
    total = sum(pool.counts)
    updates = np.array([option.update_seconds for option, _ in pool.options])
    sync, numbers = _sync_table(pool, total)
    found: list[tuple[Floats, Floats, tuple[int, ...], npt.NDArray[np.int64]]] = []
    for kinds in _subsets(sync, updates):
        counts = tuple(n if kind in kinds else 0 for kind, n in enumerate(pool.counts))
        own = np.minimum(numbers, sum(counts))
        overheads = sync[sorted(kinds)].max(axis=0) + updates[sorted(kinds)].max()
        bounds = np.maximum(floor, _compute_bounds(pool, counts)[own - 1]) + overheads
        found.append((bounds, overheads, counts, own))
    yield from _in_order(found)


def _in_order(
    found: list[tuple[Floats, Floats, tuple[int, ...], npt.NDArray[np.int64]]],
) -> Iterator[tuple[float, Level]]:
    bounds = np.concatenate([entry[0] for entry in found])
    width = len(found[0][0])
    for position in np.argsort(bounds, kind="stable").tolist():
        _, overheads, counts, own = found[position // width]
        column = position % width
        if column and own[column] == own[column - 1]:
            continue  # more than the subset's devices: the same level again
        yield (
            float(bounds[position]),
            Level(counts, int(own[column]), float(overheads[column])),
        )


def _sync_table(pool: Pool, total: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """[types, columns] synchronisation, and the number of devices of each column."""
    options = [option for option, _ in pool.options]
    ends = [(sync_seconds(option, 2), sync_seconds(option, total)) for option in options]
    if all(few == many for few, many in ends):  # never falls, so it is constant
        return np.array([[few] for few, _ in ends]), np.array([total], dtype=np.int64)
    table = [[sync_seconds(option, n) for n in range(2, total + 1)] for option in options]
    return np.array(table), np.arange(2, total + 1, dtype=np.int64)


def _subsets(sync: Floats, updates: Floats) -> list[frozenset[int]]:
    """The sets of types below some bound on synchronisation and some bound on updates."""
    bits = 1 << np.arange(len(updates), dtype=np.int64)
    within = [((sync <= row) * bits[:, None]).sum(axis=0) for row in sync]
    cheap = [int(((updates <= most) * bits).sum()) for most in updates]
    masks = {int(mask) & most for row in within for mask in np.unique(row) for most in cheap}
    return [
        frozenset(kind for kind in range(len(updates)) if mask >> kind & 1)
        for mask in sorted(masks, reverse=True)
        if mask
    ]


def _compute_bounds(pool: Pool, counts: tuple[int, ...]) -> Floats:
    """[devices] ``first_bound`` for 1, 2, ... devices of ``counts``."""
    rates = np.maximum.reduceat(pool.sizes / pool.seconds, pool.starts)
    order = np.argsort(-rates, kind="stable")
    each = np.repeat(rates[order], np.array(counts)[order])
    bounds: Floats = pool.batch / np.cumsum(each) * (1 - 1e-12)
    return bounds
