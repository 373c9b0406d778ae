"""How long spot machines last: Kaplan-Meier and exponential estimates with their uncertainty.

A lifetime is a run of ticks in which a machine could be had and was kept. One that the window
ends, or that is followed by what nobody knows, is censored: it lasted at least so long. Of one
that the window begins with nobody knows its age. So it counts for the rate of preemptions over all
ages, and not for what depends on age.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from ...schema.market import PreemptionRate, Survivors

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
        if now == 1 and tick < len(available):
            continue
        if tick > start:
            before = available[start - 1] if start else None
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
    """The area under the curve up to the longest lifetime, and half its confidence interval.

    Greenwood: Var = sum over deaths of (area after it)^2 d / (n (n - d)).
    """
    from scipy.stats import norm

    edges = np.concatenate(([0.0], times))
    heights = np.concatenate(([1.0], alive))[:-1]
    areas = np.diff(edges) * heights
    after = areas[::-1].cumsum()[::-1] - areas  # from each time to the longest
    risk = np.array([(seconds >= time).sum() for time in times])
    died = np.array([((seconds == time) & preempted).sum() for time in times])
    left = risk - died
    terms = np.where(left > 0, after**2 * died / np.maximum(risk * left, 1), 0.0)
    half = float(norm.ppf(0.5 + CONFIDENCE / 2)) * float(np.sqrt(terms.sum()))
    return float(areas.sum()), half
