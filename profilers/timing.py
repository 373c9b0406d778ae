"""Repeat a measurement as often as its spread needs, and no more.

The stopping rule is free of distributions (`runtime.measurements`).
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..runtime.measurements import median_interval


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

    def is_enough(self, samples: Sequence[float], seconds: float) -> bool:
        """Whether these samples are, after so many seconds of wall time."""
        if len(samples) >= self.max_repeats:
            return True
        if len(samples) < self.min_repeats:
            return False
        interval, most = median_interval(samples), self.tolerance * statistics.median(samples)
        is_narrow = interval is not None and interval[1] - interval[0] <= most
        return is_narrow or seconds >= self.budget_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatTiming:
    """What the repeats gave. ``spread`` is the interquartile range over the median."""

    median_seconds: float
    low_seconds: float
    high_seconds: float
    spread: float
    repeats: int

    @property
    def error(self) -> float | None:
        """Half the interval's width over the median; None below two samples, or at 0."""
        if self.repeats < 2 or self.median_seconds <= 0:
            return None
        return (self.high_seconds - self.low_seconds) / 2 / self.median_seconds

    def minus(self, other: "RepeatTiming") -> "RepeatTiming":
        """The difference of two that were measured apart; its interval is the widest one."""
        median = self.median_seconds - other.median_seconds
        return RepeatTiming(
            median_seconds=median,
            low_seconds=self.low_seconds - other.high_seconds,
            high_seconds=self.high_seconds - other.low_seconds,
            spread=max(self.spread, other.spread),
            repeats=min(self.repeats, other.repeats),
        )

    @property
    def known_or_bound(self) -> tuple[float | None, float | None]:
        """A difference's seconds, and None; or None, and their bound, if it may be zero.

        It may be where the interval reaches zero. Where all of the interval is below zero, noise
        was at least as large as its far end, and may hide as much.
        """
        if self.low_seconds > 0:
            return self.median_seconds, None
        return None, self.high_seconds if self.high_seconds > 0 else -self.low_seconds

    @classmethod
    def of(cls, samples: Sequence[float]) -> "RepeatTiming":
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


def repeat(
    measure: Callable[[], float], policy: RepeatPolicy, clock: Callable[[], float]
) -> list[float]:
    """Call ``measure`` until its median is known well enough or the budget is spent.

    Returns:
        Every sample, in order.
    """
    start = clock()
    samples: list[float] = []
    while not policy.is_enough(samples, clock() - start):
        samples.append(measure())
    return samples


def _interquartile_range(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]
