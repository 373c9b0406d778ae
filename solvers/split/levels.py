"""Levels of a batch split: which types and how many devices may be used, and what that adds.

The cost of synchronisation depends only on the set of used types and on the number of devices. What
is each device's own depends on the size of its passes, too. Neither falls when a type or a device
is added. So a level stands for all plans on a subset of its types and devices. Within a level the
least time of devices in which the batch fits is one of finitely many candidates.

    12 samples on an A (2 a second) and a B (1 a second); alone they take 6 and 12 s
    the level of both adds 1.5 s of synchronisation; if samples were fluid, its passes would take
    12 / (2 + 1) = 4 s, so its bound is 5.5 s: less than 6, so it is searched

Levels are searched in the order of these bounds; the first whose bound is no less than the best
plan ends the search. Sets of types are those below a limit on synchronisation, and on the links of
rings where devices hide sums: at most types^3 sets for each number of devices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...planning.costs.comm import Wire, slowest_wire, sync_seconds
from ...planning.costs.split import closing_seconds
from ...schema.plan import RefutedSplits, ReplicaGroup, SplitCertificate, device_group
from ...schema.problem import SplitProblem
from .feasible import Floats, SplitPool, counts_within, greedy_counts


@dataclass(frozen=True, slots=True)
class Level:
    """At most ``num_devices`` of ``counts``; the overhead is their step beside a device's own.

    ``pool`` has what devices take once there.
    """

    counts: tuple[int, ...]
    num_devices: int
    overhead_seconds: float
    pool: SplitPool


@dataclass(frozen=True, slots=True)
class OnOneDevice:
    """A plan on a single device: nothing to synchronise, and no other device busy."""

    step_seconds: float
    group: ReplicaGroup


def single_devices(problem: SplitProblem) -> list[OnOneDevice]:
    """Every plan on one device, the fastest first; of equally fast ones the fewest passes."""
    batch = problem.global_batch_size
    found = []
    for kind, option in enumerate(problem.devices):
        costs = option.measured_with(1)
        for point in problem.points(costs):
            size = point.batch_size
            if batch % size == 0:
                compute = batch // size * point.step_seconds
                group = device_group(
                    device_type=option.device_type,
                    num_devices=1,
                    virtual_nodes=batch // size,
                    virtual_node_batch_size=size,
                    memory_bytes=point.peak_memory_bytes,
                    pass_seconds=point.step_seconds,
                    interpolated=size in costs.interpolated_sizes,
                )
                step = compute + closing_seconds(costs)
                # Step, kind, compute, larger sizes first: ties are broken in this order.
                found.append((step, kind, compute, -size, OnOneDevice(step, group)))
    return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:-1])]


def first_bound(pool: SplitPool, level: Level) -> float:
    """Devices' time if work could be divided at will: B over the fastest devices' rates."""
    passes = float(_compute_bounds(pool, level.counts)[level.num_devices - 1])
    # Rounding must not make a bound of it that the optimum breaks.
    return (passes + float(_least_rests(pool, pool.rests, level.counts))) * (1 - 1e-12)


def holds(pool: SplitPool, level: Level, seconds: float) -> bool:
    """Whether the level's devices can do at least B within ``seconds``, exactness aside."""
    tops = pool.tops(pool.passes(seconds))
    most = greedy_counts(tops, level.counts, level.num_devices)
    return sum(count * top for count, top in zip(most, tops, strict=True)) >= pool.batch


def type_sets(
    pool: SplitPool,
) -> Iterator[tuple[tuple[int, ...], Floats, npt.NDArray[np.int64], Floats]]:
    """Yield the sets of types whose synchronisation costs no more than that of one of them.

    Yields:
        Counts of the set's types; [columns] what its plans cost beside devices, at most; [columns]
        the number of devices of which that is so; and [entries, columns] what devices take once.
    """
    sync, numbers = _sync_table(pool, sum(pool.counts))
    options = [option for option, _ in pool.options]
    wires = [slowest_wire([option]) if pool.hides else None for option in options]
    for kinds in _subsets(sync, wires):
        counts = tuple(n if kind in kinds else 0 for kind, n in enumerate(pool.counts))
        # What the dearest type of the set costs is what all its plans pay at most, so sets are
        # told apart by it.
        overheads = sync[sorted(kinds)].max(axis=0)
        wire = slowest_wire(options[kind] for kind in sorted(kinds)) if pool.hides else None
        rests = pool.rests_with(wire, numbers) if pool.hides else pool.rests[:, None]
        yield counts, overheads, np.minimum(numbers, sum(counts)), rests


def levels(pool: SplitPool, floor: float) -> Iterator[tuple[float, Level]]:
    """Every level that could hold the optimum on two or more devices, by its lower bound."""
    found = []
    for counts, overheads, own, rests in type_sets(pool):
        fluid = (_compute_bounds(pool, counts)[own - 1] + _least_rests(pool, rests, counts)) * (
            1 - 1e-12
        )
        found.append((np.maximum(floor, fluid) + overheads, overheads, counts, own, rests))
    yield from _in_order(pool, found)


def _in_order(
    pool: SplitPool,
    found: list[tuple[Floats, Floats, tuple[int, ...], npt.NDArray[np.int64], Floats]],
) -> Iterator[tuple[float, Level]]:
    bounds = np.concatenate([entry[0] for entry in found])
    width = len(found[0][0])
    for position in np.argsort(bounds, kind="stable").tolist():
        _, overheads, counts, own, rests = found[position // width]
        column = position % width
        # Column 0 is a level of its own always; later ones only while they add devices.
        if column and own[column] == own[column - 1]:
            continue  # more than the subset's devices: the same level again
        yield (
            float(bounds[position]),
            Level(
                counts,
                int(own[column]),
                float(overheads[column]),
                pool.at(rests[:, column]) if pool.hides else pool,
            ),
        )


def _sync_table(pool: SplitPool, total: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """[types, columns] synchronisation, and the number of devices of each column."""
    options = [option for option, _ in pool.options]
    ends = [(sync_seconds(option, 2), sync_seconds(option, total)) for option in options]
    # Between two equal ends it cannot differ.
    if not pool.hides and all(few == many for few, many in ends):  # never falls, so constant
        return np.array([[few] for few, _ in ends]), np.array([total], dtype=np.int64)
    table = [[sync_seconds(option, n) for n in range(2, total + 1)] for option in options]
    return np.array(table), np.arange(2, total + 1, dtype=np.int64)


def _subsets(sync: Floats, wires: list[Wire | None]) -> list[frozenset[int]]:
    """The sets of types below some bound on synchronisation, and no slower than some link."""
    # Below each limit all types are cheap enough at no cost: only such sets can be best.
    bits = 1 << np.arange(len(sync), dtype=np.int64)
    within = [((sync <= row) * bits[:, None]).sum(axis=0) for row in sync]
    late = np.array([wire.latency_seconds if wire else 0.0 for wire in wires])
    slow = np.array([1 / wire.bytes_per_second if wire else 0.0 for wire in wires])
    linked = {
        int((((late <= latency) & (slow <= each)) * bits).sum())
        for latency in np.unique(late)
        for each in np.unique(slow)
    }
    masks = {int(mask) & near for row in within for mask in np.unique(row) for near in linked}
    return [
        frozenset(kind for kind in range(len(sync)) if mask >> kind & 1)
        # Larger sets first: of equal bounds they hold the most plans.
        for mask in sorted(masks, reverse=True)
        if mask
    ]


def _compute_bounds(pool: SplitPool, counts: tuple[int, ...]) -> Floats:
    """[devices] the passes of ``first_bound`` for 1, 2, ... devices of ``counts``."""
    rates = np.maximum.reduceat(pool.sizes / pool.seconds, pool.starts)
    order = np.argsort(-rates, kind="stable")
    each = np.repeat(rates[order], np.array(counts)[order])
    bounds: Floats = pool.batch / np.cumsum(each)
    return bounds


def _least_rests(pool: SplitPool, rests: Floats, counts: tuple[int, ...]) -> Floats:
    """What each device of ``counts`` takes once, at least: of each column of [entries, ...]."""
    least = np.minimum.reduceat(rests, pool.starts)
    found: Floats = least[np.array(counts) > 0].min(axis=0)
    return found


def least_seconds(
    pool: SplitPool, level: Level, cutoff: float, floor: float = 0.0
) -> tuple[float, tuple[int, ...]] | None:
    """The least time of devices within a level, and device counts that reach it.

    Gives up above ``cutoff``; ``floor`` is a known lower bound.
    """
    # Not longer than all of the batch on one device.
    ceiling = min(cutoff, float(pool.device_seconds(pool.limits).max()))

    known: dict[bytes, tuple[int, ...] | None] = {}
    # Only passes of this level's types count: its answers are shared by times that allow the same.
    mine = np.repeat(np.array(level.counts) > 0, pool.ends - pool.starts)

    def fits(seconds: float) -> tuple[int, ...] | None:
        key = pool.passes(seconds)[mine].tobytes()  # the time matters only through the passes
        if key not in known:
            known[key] = counts_within(pool, level.counts, level.num_devices, seconds)
        return known[key]

    # First the cheap test, which ignores that samples must add up exactly: most often it is the
    # answer.
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
    pool: SplitPool, low: float, ceiling: float, fits: Callable[[float], bool]
) -> float | None:
    """The least candidate time in [low, ceiling] that fits; ``fits`` must be monotone in time."""
    # Steps that double from a small one: the answer is near the bound, and far looks are dear.
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


def candidates(pool: SplitPool, below: float, above: float) -> list[float]:
    """Every v t_i(s) + rest from the last one at or under ``below`` to the last under ``above``.

    One at ``above`` is among them.
    """
    first = np.maximum(pool.passes(below), 1)
    count = pool.passes(above) - first + 1
    keep = count > 0
    first, count = first[keep], count[keep]
    seconds, rests = pool.seconds[keep], pool.rests[keep]
    # All passes of each size between both times, as one flat array: ``offsets`` restarts at 0 for
    # each size.
    offsets = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    passes = np.repeat(first, count) + offsets
    times: list[float] = np.unique(
        passes * np.repeat(seconds, count) + np.repeat(rests, count)
    ).tolist()
    return times


def refutation(pool: SplitPool, step_seconds: float) -> SplitCertificate | None:
    """Show that every split on two or more devices takes ``step_seconds``, to 1e-9.

    Of each set of types (``type_sets``) the numbers of devices are taken together as long as the
    fewest devices' cost and the most devices' work refute them. Else they are halved.

    Returns:
        None if some split is faster.
    """
    names = [option.device_type for option, _ in pool.options]
    refuted = []
    for counts, overheads, numbers, rests in type_sets(pool) if sum(pool.counts) > 1 else ():
        most = sum(counts)
        # Columns up to the set's number of devices; later ones are the same level.
        spans = [(0, int(np.searchsorted(numbers, most)))] if most > 1 else []
        while spans:
            low, high = spans.pop()
            # The least overhead and rests of the span, with the work of its most devices: all only
            # help the split.
            seconds = step_seconds * (1 - 1e-9) - float(overheads[low : high + 1].min())
            least = pool.at(rests[:, low]) if pool.hides else pool
            if seconds > 0 and counts_within(least, counts, int(numbers[high]), seconds):
                if low == high:
                    return None
                middle = (low + high) // 2
                spans += [(middle + 1, high), (low, middle)]
                continue
            refuted.append(
                RefutedSplits(
                    device_types=tuple(n for n, count in zip(names, counts, strict=True) if count),
                    # Column 0 has 2 devices, or all where synchronisation is constant.
                    least_devices=int(numbers[low]) if low else 2,
                    most_devices=int(numbers[high]),
                )
            )
    return SplitCertificate(refuted=tuple(refuted))
