"""How long spot machines last, and all other estimates from availability and price histories.

Lifetimes: Kaplan-Meier and exponential estimates with their uncertainty. A lifetime is a run of
ticks in which a machine could be had and was kept. One that the window ends, or that is followed by
what nobody knows, is censored: it lasted at least so long. Of one that the window begins with
nobody knows its age. So it counts for the rate of preemptions over all ages, and not for what
depends on age.

Correlations are Pearson's: of two zones' prices, or of their availability.

    machines lasted 2 h and were lost, 3 h until the window ended, 5 h and were lost
    rate: two lost in 10 h, a mean of 5 h
    Kaplan-Meier: at 2 h one of three goes, 2/3 survive; at 5 h the only one left goes, 0 survive
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from ...schema.market import (
    Availability,
    OddsReport,
    PreemptionRate,
    PriceHistory,
    PriceOdds,
    Survivors,
    ZoneCorrelation,
    ZoneOdds,
    utc_seconds,
)
from .windows import joined, prices_at

AGES_HOURS = (0.0, 1.0, 6.0, 24.0)
"""From where each class of ages goes to the next one, the last without end."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A run of ticks with a machine.

    Attributes:
        seconds: How long it was seen.
        is_preempted: Whether it ended there; else it is censored.
        has_age: Whether its beginning was seen.
    """

    seconds: float
    is_preempted: bool
    has_age: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """The Kaplan-Meier estimate of lifetimes whose age is known, under the names of ``ZoneOdds``.

    ``mean_seconds`` is the area under the curve: a lower estimate of the mean where the longest
    lifetime is censored; its interval is by Greenwood's formula.
    """

    num_lifetimes: int
    num_censored: int
    horizon_seconds: float
    median_seconds: float | None
    mean_seconds: float
    mean_low_seconds: float
    mean_high_seconds: float
    survivors: tuple[Survivors, ...]


def lifetimes(available: Sequence[int | None], tick_seconds: float) -> list[Lifetime]:
    """The lifetimes in a window of availability [ticks]: 1 there, 0 gone, None unknown."""
    found: list[Lifetime] = []
    start = 0
    for tick in range(len(available) + 1):
        now = available[tick] if tick < len(available) else None
        # A run goes on while the machine is there; unknown ticks and the end close it like a loss.
        if now == 1 and tick < len(available):
            continue
        if tick > start:
            before = available[start - 1] if start else None
            # Lost only if the next tick is known to be without; aged only if the one before was.
            found.append(Lifetime((tick - start) * tick_seconds, now == 0, has_age=before == 0))
        start = tick + 1
    return found


def rate(seen: Iterable[Lifetime]) -> PreemptionRate:
    """How often machines go, whatever their age.

    Raises:
        ProblemError: There never was a machine.
    """
    each = list(seen)
    total, lost = sum(one.seconds for one in each), sum(one.is_preempted for one in each)
    return _rate(None, total, lost)


def rates_by_age(seen: Iterable[Lifetime]) -> list[PreemptionRate]:
    """The rates within each class of ``AGES_HOURS`` that a machine got to."""
    aged = [one for one in seen if one.has_age]
    edges = [3600 * hours for hours in AGES_HOURS]
    rows = []
    for low, high in zip(edges, [*edges[1:], inf], strict=True):
        # Each lifetime counts for the part of it within the class.
        total = sum(min(one.seconds, high) - low for one in aged if one.seconds > low)
        lost = sum(one.is_preempted and low < one.seconds <= high for one in aged)
        if total > 0:
            rows.append(_rate(low, total, lost))
    return rows


def _rate(age: float | None, at_risk_seconds: float, lost: int) -> PreemptionRate:
    """Its interval is exact for exponential lifetimes (chi-squared)."""
    from scipy.stats import chi2

    if at_risk_seconds <= 0:
        raise ProblemError(
            "there never was a spot machine, so nothing is known of how long one lasts"
        )
    tail = (1 - CONFIDENCE) / 2
    return PreemptionRate(
        from_age_seconds=age,
        at_risk_seconds=at_risk_seconds,
        num_preemptions=lost,
        mean_seconds=at_risk_seconds / lost if lost else None,
        # Where nothing was lost the upper end is unknown; the lower one still holds.
        low_seconds=2 * at_risk_seconds / float(chi2.ppf(1 - tail, 2 * lost + 2)),
        high_seconds=2 * at_risk_seconds / float(chi2.ppf(tail, 2 * lost)) if lost else None,
    )


def survival(seen: Iterable[Lifetime], ages_seconds: Sequence[float]) -> Survival | None:
    """Kaplan-Meier (scipy) of the lifetimes whose age is known; None where there are none.

    The surviving part is told at each of the ages up to the horizon.
    """
    aged = [one for one in seen if one.has_age]
    if not aged:
        return None
    from scipy.stats import CensoredData, ecdf

    seconds = np.array([one.seconds for one in aged])
    preempted = np.array([one.is_preempted for one in aged])
    data = CensoredData(uncensored=seconds[preempted], right=seconds[~preempted])
    curve = ecdf(data).sf
    with warnings.catch_warnings():  # undefined where all or none survive, which is not used
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = curve.confidence_interval(CONFIDENCE, method="log-log")
    horizon = float(seconds.max())
    mean, error = _restricted_mean(curve.quantiles, curve.probabilities, seconds, preempted)
    below = np.flatnonzero(curve.probabilities <= 0.5)

    def told(age: float) -> Survivors:
        part = float(curve.evaluate(age))
        low, high = (float(each.evaluate(age)) for each in (interval.low, interval.high))
        if part in (0.0, 1.0):  # Greenwood's formula says nothing here
            least = _least(int((preempted | (seconds >= age)).sum()))  # the others ended before
            low, high = (0.0, 1 - least) if part == 0.0 else (least, 1.0)
        return Survivors(age_seconds=age, part=part, low=low, high=high)

    return Survival(
        num_lifetimes=len(aged),
        num_censored=int((~preempted).sum()),
        horizon_seconds=horizon,
        median_seconds=float(curve.quantiles[below[0]]) if len(below) else None,
        mean_seconds=mean,
        mean_low_seconds=max(mean - error, 0.0),
        mean_high_seconds=mean + error,
        survivors=tuple(told(age) for age in ages_seconds if age <= horizon),
    )


def _least(number: int) -> float:
    """What may be the surviving part if of so many all survived (Clopper and Pearson)."""
    least: float = ((1 - CONFIDENCE) / 2) ** (1 / number)
    return least


def _restricted_mean(
    times: NDArray[np.float64],
    alive: NDArray[np.float64],
    seconds: NDArray[np.float64],
    preempted: NDArray[np.bool_],
) -> tuple[float, float]:
    """The area under the curve up to the longest lifetime, and half its confidence interval."""
    # Greenwood: Var = sum over deaths of (area after it)^2 d / (n (n - d)).
    from scipy.stats import norm

    # The curve is a step function: constant between losses, so areas are rectangles.
    edges = np.concatenate(([0.0], times))
    heights = np.concatenate(([1.0], alive))[:-1]
    areas = np.diff(edges) * heights
    after = areas[::-1].cumsum()[::-1] - areas  # from each time to the longest
    # At each loss: machines of at least that age.
    risk = np.array([(seconds >= time).sum() for time in times])
    died = np.array([((seconds == time) & preempted).sum() for time in times])
    left = risk - died
    # The last term is 0 / 0 where all go: nothing is left to be uncertain about.
    terms = np.where(left > 0, after**2 * died / np.maximum(risk * left, 1), 0.0)
    half = float(norm.ppf(0.5 + CONFIDENCE / 2)) * float(np.sqrt(terms.sum()))
    return float(areas.sum()), half


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
        # Whether any machine is there, whatever their number.
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
    values = np.array([prices_at(each, edges[:-1]) for each in (one, other)])
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
    # The later window's first tick lies beside this tick of the earlier one.
    first, second = (one, other) if shift >= 0 else (other, one)
    pairs = [
        (a, b)
        for a, b in zip(first.available[abs(shift) :], second.available, strict=False)
        if a is not None and b is not None
    ]
    if not pairs:
        return None
    return _correlation(np.array(pairs, dtype=float).T, np.ones(len(pairs)))


def _correlation(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float | None:
    total = weights.sum()
    if total <= 0:
        return None
    # Unknown prices are NaN, and NaN times 0 is NaN.
    values = np.where(weights > 0, values, 0.0)
    centred = values - (values @ weights / total)[:, None]
    spread = np.sqrt((centred**2) @ weights)
    # Constant but for rounding: no correlation.
    scale = np.sqrt((values**2) @ weights)
    if (spread <= 1e-9 * scale).any():
        return None
    return float((centred[0] * centred[1]) @ weights / (spread[0] * spread[1]))


# How often to write a checkpoint, from what one takes and how often machines are lost.


def young_seconds(checkpoint_seconds: float, mean_seconds: float) -> float:
    """Work between two checkpoints (Young 1974): sqrt(2 delta M).

    delta is what writing one takes, M the mean time between losses.
    """
    _refuse(checkpoint_seconds, mean_seconds)
    return sqrt(2 * checkpoint_seconds * mean_seconds)


def daly_seconds(checkpoint_seconds: float, mean_seconds: float) -> float:
    """Work between two checkpoints (Daly 2006, equation 37).

    sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta; M where delta >= 2M.
    """
    _refuse(checkpoint_seconds, mean_seconds)
    if checkpoint_seconds >= 2 * mean_seconds:
        return mean_seconds
    part = checkpoint_seconds / (2 * mean_seconds)
    series = 1 + sqrt(part) / 3 + part / 9
    return sqrt(2 * checkpoint_seconds * mean_seconds) * series - checkpoint_seconds


def lost_share(interval_seconds: float, checkpoint_seconds: float, mean_seconds: float) -> float:
    """The part of the time that checkpoints and repeated work take, to first order (Young).

    delta / tau for writing, and half an interval again, (tau + delta) / 2, for each loss.
    """
    _refuse(checkpoint_seconds, mean_seconds)
    again = (interval_seconds + checkpoint_seconds) / (2 * mean_seconds)
    return checkpoint_seconds / interval_seconds + again


def _refuse(checkpoint_seconds: float, mean_seconds: float) -> None:
    for name, value in (("checkpoint", checkpoint_seconds), ("mean time", mean_seconds)):
        if not (isfinite(value) and value > 0):
            raise ProblemError(f"a {name} must be finite and > 0 s, got {value:g}")
