"""A confidence interval for a median that assumes nothing about the distribution.

The probability that the true median lies between two given order statistics of n samples follows
from the binomial law alone. So the interval between these two samples is valid for any noise;
timing noise is skewed, never normal.
"""

from collections.abc import Sequence
from math import exp, lgamma, log

FEWEST_FOR_AN_INTERVAL = 6
"""Fewer values give no 95 % interval: the true median may lie outside their whole range."""
_CONFIDENCE = 0.95


def median_interval(
    samples: Sequence[float], confidence: float = _CONFIDENCE
) -> tuple[float, float] | None:
    """The tightest symmetric order-statistic interval that holds the median.

    The median lies between the k-th smallest and the k-th largest of n samples with probability
    ``1 - 2 * P(Binomial(n, 1/2) < k)``.

    Args:
        samples: In any unit, in any order.
        confidence: Least probability that the interval holds the median, 0 to 1.

    Returns:
        (low, high) in the samples' unit; None where n is too small (below 6 for 95 %).
    """
    ordered = sorted(samples)
    total = len(ordered)
    outside = 0.0
    best: tuple[float, float] | None = None
    for k in range(1, total // 2 + 1):
        outside += _probability(total, k - 1)
        if 1 - 2 * outside < confidence:
            break
        best = (ordered[k - 1], ordered[total - k])
    return best


def _probability(total: int, number: int) -> float:
    """P(Binomial(total, 1/2) = number), by logarithms: powers overflow for thousands of steps."""
    ways = lgamma(total + 1) - lgamma(number + 1) - lgamma(total - number + 1)
    return exp(ways - total * log(2))


def half_width(samples: Sequence[float]) -> float | None:
    """Half the width of `median_interval`, in the samples' unit; None for too few samples."""
    interval = median_interval(samples)
    return None if interval is None else (interval[1] - interval[0]) / 2
