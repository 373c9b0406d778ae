"""Which layers of a stage take their slower and smaller choice, so that the stage fits its memory.

A knapsack problem: each layer frees some bytes for some seconds, and enough bytes must be free.
"""

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

import numpy as np

_MOST_PARTIAL = 2_000
"""Partial choices to compare at a time. Stages of Piper's models need at most a few dozen."""
_ROUNDING = 1 - 1e-12  # of sums of bytes


class Packed(NamedTuple):
    """Layers that take their second choice.

    ``more_seconds`` is what they take more than with the first, ``least_more_seconds`` what every
    choice takes more at least. ``is_exact`` says whether no choice takes less than
    ``more_seconds``; None until ``exact`` has looked, False where it had too many to look at.
    """

    more_seconds: float
    least_more_seconds: float
    slower: tuple[int, ...]
    is_exact: bool | None = None


def greedy(saved: np.ndarray, spent: np.ndarray, missing: float) -> Packed | None:
    """Layers in the order of seconds for each byte saved, until the rest fits.

    Args:
        saved: [layers] bytes that the second choice of each saves; below 0 where it takes more.
        spent: [layers] seconds that it takes more, at least 0.
        missing: Bytes that have to be saved.

    Returns:
        With the linear program's value as ``least_more_seconds``, where a fraction of a layer may
        take its second choice; None where all choices together save too little.
    """
    order = _by_ratio(saved, spent)
    reached = np.cumsum(saved[order])
    needed = int(np.searchsorted(reached, missing * _ROUNDING))
    if needed >= len(order):
        return None
    whole = float(spent[order[:needed]].sum())
    before = float(reached[needed - 1]) if needed else 0.0
    last = order[needed]
    least = whole + float(spent[last] * (missing - before) / saved[last])
    taken, spare = order[: needed + 1].tolist(), float(reached[needed]) - missing
    for layer in sorted(taken, key=lambda i: -spent[i]):  # the last one may make others needless
        if saved[layer] <= spare:
            taken.remove(layer)
            spare -= float(saved[layer])
    more = float(spent[taken].sum())
    return Packed(more, min(least, more), tuple(sorted(taken)))


def exact(saved: np.ndarray, spent: np.ndarray, missing: float, known: Packed) -> Packed:
    """The layers that take the fewest seconds more.

    A dynamic program over layers, in the order of seconds for each byte saved. Of partial choices
    those are kept that no other is as good as in both bytes and seconds, and that may still beat
    the best known by the linear program of the layers left.

    Args:
        saved: As for ``greedy``.
        spent: As for ``greedy``.
        missing: As for ``greedy``.
        known: What ``greedy`` returned.

    Returns:
        ``known``, not ``is_exact``, if more partial choices are left than are compared.
    """
    order = _by_ratio(saved, spent).tolist()
    bytes_of: list[float] = saved[order].tolist()
    seconds_of: list[float] = spent[order].tolist()
    all_bytes = list(accumulate(bytes_of, initial=0.0))
    all_seconds = list(accumulate(seconds_of, initial=0.0))
    needed = missing * _ROUNDING

    def least_more(first: int, freed: float) -> float:
        """Seconds that layers from ``first`` on take at least to save what is missing."""
        goal = all_bytes[first] + needed - freed
        place = bisect_left(all_bytes, goal, lo=first)
        if place >= len(all_bytes):
            return float("inf")
        if place == first:
            return 0.0
        rest = (goal - all_bytes[place - 1]) / bytes_of[place - 1]
        return all_seconds[place - 1] - all_seconds[first] + rest * seconds_of[place - 1]

    best, taken = known.more_seconds, sum(1 << order.index(layer) for layer in known.slower)
    partial = [(0.0, 0.0, 0)]  # seconds, bytes saved, layers as bits; both rise
    for place, (freed, more) in enumerate(zip(bytes_of, seconds_of, strict=True)):
        longer = [(s + more, b + freed, layers | 1 << place) for s, b, layers in partial]
        done = min((each for each in longer if each[1] >= needed), default=None)
        if done is not None and done[0] < best:
            best, taken = done[0], done[2]
        left: list[tuple[float, float, int]] = []
        for each in sorted([*partial, *longer], key=lambda one: (one[0], -one[1])):
            if each[1] < needed and (not left or each[1] > left[-1][1]):
                if each[0] + least_more(place + 1, each[1]) < best:
                    left.append(each)
        if len(left) > _MOST_PARTIAL:
            return known._replace(is_exact=False)
        partial = left
    slower = tuple(sorted(layer for place, layer in enumerate(order) if taken >> place & 1))
    return Packed(best, best, slower, True)


def _by_ratio(saved: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """The layers whose second choice saves anything, those of the fewest seconds a byte first."""
    order = np.argsort(spent / np.where(saved > 0, saved, np.nan), kind="stable")
    ordered: np.ndarray = order[saved[order] > 0]
    return ordered
