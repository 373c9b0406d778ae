"""How well a median is known, whatever its samples' distribution.

n sorted samples hold the true median between two of them with a probability that only the binomial
law decides, so the interval between those two is a confidence interval whatever the noise looks
like (timing noise is skewed, never normal).
"""

from collections.abc import Sequence
from math import exp, lgamma, log

FEWEST_FOR_AN_INTERVAL = 6
"""The median of fewer values has no 95 % interval: even their whole range may miss it."""
_CONFIDENCE = 0.95


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
        outside += _probability(total, k - 1)
        if 1 - 2 * outside < confidence:
            break
        best = (ordered[k - 1], ordered[total - k])
    return best


def _probability(total: int, number: int) -> float:
    """Of so many heads in so many throws; by logarithms, which thousands of steps need."""
    ways = lgamma(total + 1) - lgamma(number + 1) - lgamma(total - number + 1)
    return exp(ways - total * log(2))


def half_width(samples: Sequence[float]) -> float | None:
    """Half the width of `median_interval`, in the samples' unit; None for few samples."""
    interval = median_interval(samples)
    return None if interval is None else (interval[1] - interval[0]) / 2
