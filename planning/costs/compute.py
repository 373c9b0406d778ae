"""Computation: the time of one forward + backward pass, t_i(b) of VirtualFlow 5.1.2."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise, product
from math import ceil
from typing import Any

from ...schema.errors import ProblemError
from ...schema.layers import PassMoment
from ...schema.profile import BatchPoint
from .memory import most_of

_BYTES = (
    "peak_memory_bytes", "pass_bytes", "first_pass_bytes", "buffered_pass_bytes", "update_bytes",
    "pinned_bytes",
)  # fmt: skip


def point_at(batch_curve: Sequence[BatchPoint], batch_size: int) -> BatchPoint:
    """A profiled point, or one on the straight line between its two neighbours.

    Time, its parts and memory are taken as linear between profiled sizes, and the spread is the
    wider of the two. Nothing is assumed outside the profiled range.

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
    load = _part_between(low.load_seconds, high.load_seconds, share, seconds)
    rest = seconds - (load or 0.0)

    def linear(least: int, most: int) -> int:
        return ceil(least + share * (most - least))

    def taken(name: str) -> Any:
        least, most = getattr(low, name), getattr(high, name)
        return None if None in (least, most) else linear(least, most)

    # What is held at most is convex in the size: no more than that of both sizes' moments.
    moments = (
        PassMoment(
            **{one.name: linear(getattr(a, one.name), getattr(b, one.name)) for one in fields(a)}
        )
        for a, b in product(low.moments, high.moments)
    )

    sums = (
        replace(b, seconds_left=a.seconds_left + share * (b.seconds_left - a.seconds_left))
        for a, b in zip(low.sums, high.sums, strict=False)
    )
    return BatchPoint(
        batch_size=batch_size,
        step_seconds=seconds,
        **{name: taken(name) for name in _BYTES},
        moments=most_of(moments),
        sums=tuple(sums) if len(low.sums) == len(high.sums) else (),
        load_seconds=load,
        virtual_node_seconds=_part_between(
            low.virtual_node_seconds, high.virtual_node_seconds, share, rest
        ),
        step_seconds_error=_wider(low.step_seconds_error, high.step_seconds_error),
    )


def _part_between(low: float | None, high: float | None, share: float, most: float) -> float | None:
    """A part of the time, which rounding must not lift above the whole; None where unknown."""
    if low is None or high is None:
        return None
    return max(0.0, min(low + share * (high - low), most))


def _wider(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else max(low, high)


def busy_ratio(alone: Sequence[BatchPoint], busy: Sequence[BatchPoint], batch_size: int) -> float:
    """How many times as long the model's own passes take while the host's other devices work."""
    # Linear between sizes that both curves hold, as at the nearest outside of them; 1 where they
    # share none.
    known = {point.batch_size: point.pass_seconds for point in alone}
    ratios = [
        (point.batch_size, point.pass_seconds / known[point.batch_size])
        for point in busy
        if known.get(point.batch_size, 0.0) > 0
    ]
    return value_at(ratios, batch_size) if ratios else 1.0


def value_at(points: Sequence[tuple[int, float]], size: int) -> float:
    """The value on the straight line between neighbouring sizes; beyond them the nearest one's."""
    for (low, first), (high, second) in pairwise(points):
        if low <= size <= high:
            return first + (second - first) * (size - low) / (high - low)
    return points[0][1] if size < points[0][0] else points[-1][1]
