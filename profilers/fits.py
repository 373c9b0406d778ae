"""Fit a few non-negative costs to measured times, robustly against disturbed measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_ROUNDS = 50
_FLOOR = 1e-6
_LEAST_SHARE = 0.01  # of the longest message's time that its bytes must explain


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A fitted link. ``error`` is the median of |model - measured| / measured over sizes."""

    latency_seconds: float
    bytes_per_second: float
    error: float


def fit_link(message_bytes: Sequence[int], seconds: Sequence[float]) -> LinkFit | None:
    """Fit ``latency_seconds + bytes / bytes_per_second`` to the times of messages.

    Args:
        message_bytes: Sizes that were sent.
        seconds: The time of each, > 0.

    Returns:
        The fit; None where time does not grow with size, so that no bandwidth can be told.
    """
    return _fit(1.0, 1.0, message_bytes, seconds)


def fit_ring(
    num_devices: int, message_bytes: Sequence[int], seconds: Sequence[float]
) -> LinkFit | None:
    """Fit latency and bandwidth of a ring all-reduce (costs.comm.collective_seconds) to its times.

    Args:
        num_devices: Members of the ring.
        message_bytes: Sizes that were all-reduced.
        seconds: The time of each, > 0.

    Returns:
        As ``fit_link``.
    """
    hops = 2 * (num_devices - 1)
    return _fit(hops, hops / num_devices, message_bytes, seconds)


def _fit(
    hops: float, share: float, message_bytes: Sequence[int], seconds: Sequence[float]
) -> LinkFit | None:
    """Times of ``hops`` latencies and ``share`` of the bytes, by their relative errors.

    Short messages then decide the latency as much as long ones the bandwidth.
    """
    import numpy as np

    measured = np.asarray(seconds, dtype=np.float64)
    carried = share * np.asarray(message_bytes, dtype=np.float64)
    # Rows are divided by their time, so that the residuals are relative errors.
    terms = np.stack([np.full_like(measured, hops), carried], axis=1) / measured[:, None]
    latency, seconds_per_byte = least_deviations(terms, np.ones(len(measured))).tolist()
    if seconds_per_byte * carried.max() < _LEAST_SHARE * measured.max():
        return None
    errors = np.abs(terms @ [latency, seconds_per_byte] - 1)
    return LinkFit(
        latency_seconds=latency,
        bytes_per_second=1 / seconds_per_byte,
        error=float(np.median(errors)),
    )


def least_deviations(terms: "Array", values: "Array") -> "Array":
    """Minimise the sum of |terms @ x - values| over x >= 0, by reweighted least squares.

    Absolute values, not squares, so that a few disturbed measurements do not tilt the fit.

    Args:
        terms: [measurements, unknowns]; a handful of unknowns.
        values: [measurements], near 1: relative to what was measured.

    Returns:
        [unknowns].
    """
    import numpy as np

    weights = np.ones(len(terms))
    for _ in range(_ROUNDS):
        unknown = _non_negative(terms * weights[:, None], values * weights)
        weights = np.maximum(np.abs(terms @ unknown - values), _FLOOR) ** -0.5
    return unknown


def _non_negative(terms: "Array", values: "Array") -> "Array":
    """Least squares over x >= 0: the best over every set of unknowns that are not 0."""
    import numpy as np

    number = terms.shape[1]
    best, least = np.zeros(number), float(np.linalg.norm(values))
    for size in range(number, 0, -1):
        for chosen in map(list, combinations(range(number), size)):
            found = np.linalg.lstsq(terms[:, chosen], values, rcond=None)[0]
            if (found < 0).any():
                continue
            if size == number:
                return np.asarray(found, dtype=np.float64)
            error = float(np.linalg.norm(terms[:, chosen] @ found - values))
            if error < least:
                best, least = np.zeros(number), error
                best[chosen] = found
    return best
