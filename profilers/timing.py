"""Repeat a measurement as often as its spread needs, and no more.

The stopping rule is free of distributions: n sorted samples hold the true median between two of
them with a probability that only the binomial law decides, so the interval between those two is
a confidence interval whatever the noise looks like (timing noise is skewed, never normal).
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatPolicy:
    """When to stop repeating.

    ``tolerance`` is the width of the median's 95 % confidence interval as a fraction of the
    median. At least ``min_repeats`` are made even past the budget.
    """

    max_repeats: int = 100
    min_repeats: int = 3
    tolerance: float = 0.04
    budget_seconds: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the repeats gave. ``spread`` is the interquartile range over the median."""

    median_seconds: float
    low_seconds: float
    high_seconds: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """Summarise at least one sample; the interval is the whole range below six."""
        median = statistics.median(samples)
        low, high = median_interval(samples) or (min(samples), max(samples))
        spread = _interquartile_range(samples) / median if median > 0 else 0.0
        return cls(
            median_seconds=median,
            low_seconds=low,
            high_seconds=high,
            spread=spread,
            repeats=len(samples),
        )


def median_interval(
    samples: Sequence[float], confidence: float = _CONFIDENCE
) -> tuple[float, float] | None:
    """The tightest symmetric order-statistic interval that holds the median.

    Between the k-th smallest and the k-th largest of n samples the median lies with probability
    ``1 - 2 * P(Binomial(n, 1/2) < k)``. None where n is too small for the confidence (below 6
    for 95 %).
    """
    ordered = sorted(samples)
    total = len(ordered)
    outside = 0.0
    best: tuple[float, float] | None = None
    for k in range(1, total // 2 + 1):
        outside += comb(total, k - 1) / 2**total
        if 1 - 2 * outside < confidence:
            break
        best = (ordered[k - 1], ordered[total - k])
    return best


def repeat(
    measure: Callable[[], float], policy: RepeatPolicy, clock: Callable[[], float]
) -> list[float]:
    """Call ``measure`` until its median is known well enough or the budget is spent.

    Args:
        measure: Does the work once and answers the seconds it took.
        policy: When to stop.
        clock: Wall seconds, for the budget.

    Returns:
        Every sample, in order.
    """
    start = clock()
    samples: list[float] = []
    while len(samples) < policy.max_repeats:
        samples.append(measure())
        if len(samples) >= policy.min_repeats and (
            clock() - start >= policy.budget_seconds or _tight(samples, policy.tolerance)
        ):
            break
    return samples


def _tight(samples: Sequence[float], tolerance: float) -> bool:
    interval = median_interval(samples)
    return interval is not None and interval[1] - interval[0] <= tolerance * statistics.median(
        samples
    )


def _interquartile_range(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]
