"""Computation: the time of one forward + backward pass, t_i(b) of VirtualFlow 5.1.2."""

from collections.abc import Sequence

from ..schema.errors import ProblemError
from ..schema.profile import BatchPoint


def point_at(batch_curve: Sequence[BatchPoint], batch_size: int) -> BatchPoint:
    """A profiled point, or one on the straight line between its two neighbours.

    Time and memory are both taken as linear between profiled sizes. Nothing is assumed outside
    the profiled range.

    Args:
        batch_curve: Points in ascending order of batch size.
        batch_size: Samples per pass.

    Raises:
        ProblemError: ``batch_size`` lies outside the profiled range.
    """
    for low, high in zip(batch_curve, batch_curve[1:], strict=False):
        if low.batch_size < batch_size < high.batch_size:
            return _between(low, high, batch_size)
    for point in batch_curve:
        if point.batch_size == batch_size:
            return point
    sizes = [point.batch_size for point in batch_curve]
    raise ProblemError(
        f"batch size {batch_size} lies outside the profiled sizes {sizes[0]} to {sizes[-1]}"
    )


def _between(low: BatchPoint, high: BatchPoint, batch_size: int) -> BatchPoint:
    share = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
    seconds = low.step_seconds + share * (high.step_seconds - low.step_seconds)
    memory = low.peak_memory_bytes + share * (high.peak_memory_bytes - low.peak_memory_bytes)
    return BatchPoint(
        batch_size=batch_size, step_seconds=seconds, peak_memory_bytes=-int(-memory // 1)
    )


def pass_seconds(batch_curve: Sequence[BatchPoint], batch_size: int) -> float:
    """Seconds of one pass of ``batch_size`` samples, linear between profiled sizes.

    Raises:
        ProblemError: ``batch_size`` lies outside the profiled range.
    """
    return point_at(batch_curve, batch_size).step_seconds
