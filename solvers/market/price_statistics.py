"""How the prices, or the availability, of two zones go together."""

import numpy as np
from numpy.typing import NDArray

from ...schema.market import Availability, PriceHistory, utc_seconds


def price_correlation(one: PriceHistory, other: PriceHistory) -> float | None:
    """Pearson's, weighted by time, over the time in which both prices are known.

    None where that is no time at all, or a price does not change in it.
    """
    edges = np.unique(
        [
            time
            for each in (one, other)
            for start, end, _ in each.stretches()
            for time in (start, end)
        ]
    )
    if len(edges) < 2:
        return None
    seconds = np.diff(edges)
    values = np.array([_at(each, edges[:-1]) for each in (one, other)])
    return _correlation(values, np.where(np.isfinite(values).all(axis=0), seconds, 0.0))


def availability_correlation(one: Availability, other: Availability) -> float | None:
    """Pearson's over the ticks of the same time in which both are known (the phi coefficient).

    None where there are none, where one does not change in them, or where the ticks of one do not
    begin and end with those of the other.
    """
    if one.start is None or other.start is None or one.tick_seconds != other.tick_seconds:
        return None
    later = utc_seconds(other.start, other.zone, "start") - utc_seconds(
        one.start, one.zone, "start"
    )
    shift = round(later / one.tick_seconds)
    if abs(later - shift * one.tick_seconds) > 1e-3:
        return None
    first, second = (one, other) if shift >= 0 else (other, one)
    pairs = [
        (a, b)
        for a, b in zip(first.available[abs(shift) :], second.available, strict=False)
        if a is not None and b is not None
    ]
    if not pairs:
        return None
    return _correlation(np.array(pairs, dtype=float).T, np.ones(len(pairs)))


def _at(history: PriceHistory, times: NDArray[np.float64]) -> NDArray[np.float64]:
    starts = np.array(history.start_seconds())
    told = np.array([np.nan if price is None else price for price in history.dollars_per_hour])
    row = np.searchsorted(starts, times, side="right") - 1
    known = (row >= 0) & (times < history.end_seconds())
    return np.where(known, told[np.maximum(row, 0)], np.nan)


def _correlation(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float | None:
    total = weights.sum()
    if total <= 0:
        return None
    values = np.where(weights > 0, values, 0.0)
    centred = values - (values @ weights / total)[:, None]
    spread = np.sqrt((centred**2) @ weights)
    scale = np.sqrt((values**2) @ weights)
    if (spread <= 1e-9 * scale).any():
        return None
    return float((centred[0] * centred[1]) @ weights / (spread[0] * spread[1]))
