"""From windows of availability and price histories to every estimate there is.

Correlations are Pearson's: of two zones' prices, or of their availability.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...planning.costs.checkpoints import daly_seconds, lost_share, young_seconds
from ...schema.market import (
    Availability,
    OddsReport,
    PriceHistory,
    PriceOdds,
    ZoneCorrelation,
    ZoneOdds,
    utc_seconds,
)
from .lifetimes import Lifetime, Survival, lifetimes, rate, rates_by_age, survival
from .windows import joined

PARTS = (0.05, 0.25, 0.5, 0.75, 0.95)
AGES_SECONDS = (3600.0, 6 * 3600.0, 24 * 3600.0)

Zone = tuple[str, str | None]


def odds(
    windows: Mapping[Zone, Sequence[Availability]],
    prices: Sequence[PriceHistory],
    checkpoint_seconds: float | None = None,
) -> OddsReport:
    """Estimate what can be.

    Windows of a zone that say when they begin are joined, so that no time counts twice. No interval
    is told where nobody says what writing a checkpoint takes.

    Raises:
        ProblemError: A checkpoint's time that is not > 0, or windows that disagree.
    """
    traces = {zone: joined(found) for zone, found in windows.items()}
    return OddsReport(
        zones=tuple(
            _zone(zone, found, len(windows[zone]), checkpoint_seconds)
            for zone, found in traces.items()
            if any(1 in window.available for window in found)
        ),
        parts=PARTS,
        prices=tuple(
            PriceOdds(
                cloud=one.cloud,
                place=one.place,
                instance_type=one.instance_type,
                dollars_per_hour=tuple(told),
            )
            for one in prices
            if (told := one.quantiles(PARTS)) is not None
        ),
        together=(*_prices_together(prices), *_windows_together(traces)),
        checkpoint_seconds=checkpoint_seconds,
    )


def interval_seconds(
    ticks: Sequence[tuple[Sequence[int | None], float]], checkpoint_seconds: float
) -> float | None:
    """Daly's interval between checkpoints; None where no machine is taken away.

    ``ticks`` are numbers of machines, and the seconds of a tick.
    """
    seen = [
        lifetime
        for there, tick_seconds in ticks
        for lifetime in lifetimes(
            [None if number is None else min(number, 1) for number in there], tick_seconds
        )
    ]
    mean = rate(seen).mean_seconds
    return None if mean is None else daly_seconds(checkpoint_seconds, mean)


def _zone(
    zone: Zone,
    windows: Sequence[Availability],
    num_windows: int,
    checkpoint_seconds: float | None,
) -> ZoneOdds:
    seen: list[Lifetime] = []
    for window in windows:
        seen += lifetimes(window.available, window.tick_seconds)
    ticks = [tick for window in windows for tick in window.available if tick is not None]
    found, curve = rate(seen), survival(seen, AGES_SECONDS)
    mean, writing = found.mean_seconds, checkpoint_seconds
    intervals: dict[str, Any] = {}
    if mean is not None and writing:
        daly = daly_seconds(writing, mean)
        intervals = {
            "young_seconds": young_seconds(writing, mean),
            "daly_seconds": daly,
            "lost_share": lost_share(daly, writing, mean),
        }
    told: dict[str, Any]
    told = {} if curve is None else {one.name: getattr(curve, one.name) for one in fields(Survival)}
    return ZoneOdds(
        zone=zone[0],
        instance_type=zone[1],
        num_windows=num_windows,
        available_share=sum(ticks) / len(ticks),
        rate=found,
        by_age=tuple(rates_by_age(seen)),
        **told,
        **intervals,
    )


def _prices_together(prices: Sequence[PriceHistory]) -> list[ZoneCorrelation]:
    return [
        ZoneCorrelation(of="prices", first=one.title, second=other.title, correlation=found)
        for one, other in combinations(prices, 2)
        if one.instance_type == other.instance_type
        and (found := price_correlation(one, other)) is not None
    ]


def _windows_together(windows: Mapping[Zone, Sequence[Availability]]) -> list[ZoneCorrelation]:
    """Of zones with one trace each; of several nobody says which go together."""
    single = [(zone, found[0]) for zone, found in windows.items() if len(found) == 1]
    return [
        ZoneCorrelation(
            of="availability", first=_title(one), second=_title(other), correlation=correlation
        )
        for (one, first), (other, second) in combinations(single, 2)
        if (correlation := availability_correlation(first, second)) is not None
    ]


def _title(zone: Zone) -> str:
    return " ".join(part for part in zone if part)


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
