"""The throughput-over-batch curve of one model on one device (VirtualFlow 5.1.1).

This module decides which sizes to measure and when to stop. Measuring itself happens in a process
of its own (``process``), so that running out of memory is only another answer.
"""

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..schema.errors import ProblemError, TargetError
from ..schema.layers import PassMoment
from ..schema.options import option, told
from .timing import RepeatPolicy, RepeatTiming

TOO_LARGE = (
    "use a smaller model, or a device with more memory; for a pipeline plan, "
    "{devices=spec:NAME} {layers=True} estimates the profile without a device"
)
"""What to do about a model that fits no device whole."""
_LARGEST = 1 << 20
_FLAT_SIZES = 6  # three octaves of batch size without gain
_FLAT_GAIN = 1.05
_FLAT_FLOOR_SECONDS = 0.1  # below it another size costs next to nothing

# Enough to tell what fits and what a pass takes about.
SCOUT_REPEATS = RepeatPolicy(max_repeats=4, min_repeats=1, tolerance=0.1, budget_seconds=0.25)

StopReason = Literal[
    "out of memory",
    "all sizes asked for were measured",
    "throughput no longer grows",
    "a pass would exceed the time limit",
    "the time budget is spent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """One batch size, measured. ``wall`` is by the clock on the wall, contention included.

    ``fragmentation_bytes`` and ``beside_bytes`` are what the allocator held beyond its peak, and
    what no allocator holds; the next three, and ``moments``, are those of a ``BatchPoint``. All are
    None, and there are none, where the peak is that of the whole process.
    """

    batch_size: int
    timing: RepeatTiming
    wall_seconds: float
    peak_memory_bytes: int
    fragmentation_bytes: int | None = None
    pass_bytes: int | None = None
    buffered_pass_bytes: int | None = None
    update_bytes: int | None = None
    beside_bytes: int | None = None
    pinned_bytes: int | None = None
    moments: tuple[PassMoment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveLimits:
    """How far to go. Zero, one or several of the limits end a curve; the reason is recorded.

    ``sizes`` None means powers of two and their midpoints from ``first`` until a limit ends
    them; a stated list is measured whole, unless memory ends.
    """

    repeats: RepeatPolicy = SCOUT_REPEATS
    sizes: tuple[int, ...] | None = None
    first: int = 1
    largest: int | None = None
    pass_limit_seconds: float = 10.0
    budget_seconds: float = 90.0
    stop_when_flat: bool = True

    @classmethod
    def quick(cls) -> "CurveLimits":
        """Limits that keep a whole profile within a minute on one core."""
        return cls(pass_limit_seconds=3.0, budget_seconds=10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Sizes that fit, ascending; the first size that did not; why measuring stopped.

    Times are of a few passes, enough to know what fits and pays; the profile's own are measured
    later, in the loop that trains (``loop_costs``).
    """

    results: tuple[SizeResult, ...]
    out_of_memory_batch_size: int | None
    stopped: StopReason


def growing_sizes(first: int = 1) -> Iterator[int]:
    """Powers of two and the midpoints between them: 1, 2, 3, 4, 6, 8, 12, ... (5.1.1)."""
    power = 1
    while power <= _LARGEST:
        yield from (size for size in dict.fromkeys((power, power + power // 2)) if size >= first)
        power *= 2


def parse_sizes(text: str, limits: CurveLimits) -> CurveLimits:
    """Read ``--batch-sizes``: a list ``8,48,256``, a range ``8-256``, or an open one ``8-``.

    A range means the powers of two and midpoints in it, and its ends.

    Raises:
        ProblemError: Not a list or range of whole numbers above 0.
    """
    span = re.fullmatch(r"\s*(\d+)\s*-\s*(\d*)\s*", text)
    if span and not span[2]:
        return replace(limits, first=_size(span[1], text))
    if span:
        first, last = _size(span[1], text), _size(span[2], text)
        if first > last:
            raise ProblemError(
                f"{option('batch_sizes', repr(text))}: the range is empty; write {last}-{first}"
            )
        inside = {size for size in growing_sizes(first) if size <= last}
        return replace(limits, sizes=tuple(sorted(inside | {first, last})))
    sizes = [_size(item, text) for item in text.split(",")]
    if len(set(sizes)) != len(sizes):
        raise ProblemError(f"{option('batch_sizes', repr(text))}: a size appears twice; keep one")
    return replace(limits, sizes=tuple(sorted(sizes)))


def _size(item: str, text: str) -> int:
    if not re.fullmatch(r"\s*\d{1,7}\s*", item) or not 1 <= int(item) <= _LARGEST:
        raise ProblemError(
            f"{option('batch_sizes', repr(text))}: {item.strip()!r} is not a whole "
            f"number from 1 to {_LARGEST}",
            hint="write for example 8,48,256 or 8-256",
        )
    return int(item)


def measure_curve(
    measure: Callable[[int], SizeResult | None],
    limits: CurveLimits,
    clock: Callable[[], float],
    on_size: Callable[[int], None] = lambda size: None,
) -> Curve:
    """Measure sizes in ascending order until memory, time or the gain ends.

    Args:
        measure: Measures one size; None says that it ran out of memory.
        limits: Which sizes, and when to stop.
        clock: Wall seconds.
        on_size: Told of each size before it is measured.

    Raises:
        TargetError: Not even the first size fits.
    """
    end = clock() + limits.budget_seconds
    results: list[SizeResult] = []
    stated = limits.sizes is not None
    for size in limits.sizes or growing_sizes(limits.first):
        if limits.largest is not None and size > limits.largest:
            break
        reason = None if stated else _reason_to_stop(results, size, limits, end - clock())
        if reason:
            return Curve(results=tuple(results), out_of_memory_batch_size=None, stopped=reason)
        on_size(size)
        result = measure(size)
        if result is None:
            return _ended_by_memory(results, size)
        results.append(result)
    if not results:
        raise ProblemError(f"no batch size to measure is <= {limits.largest}")
    return Curve(
        results=tuple(results),
        out_of_memory_batch_size=None,
        stopped="all sizes asked for were measured",
    )


def _ended_by_memory(results: Sequence[SizeResult], size: int) -> Curve:
    if not results:
        raise TargetError(
            f"the model does not fit the device's memory at batch size {size}", hint=told(TOO_LARGE)
        )
    return Curve(results=tuple(results), out_of_memory_batch_size=size, stopped="out of memory")


def _reason_to_stop(
    results: Sequence[SizeResult], size: int, limits: CurveLimits, left_seconds: float
) -> StopReason | None:
    if not results:
        return None
    last = results[-1]
    # Time grows at most in proportion to the batch once it is compute-bound.
    expected = last.wall_seconds * size / last.batch_size
    if last.timing.median_seconds * size / last.batch_size > limits.pass_limit_seconds:
        return "a pass would exceed the time limit"
    if expected * (limits.repeats.min_repeats + 2) > left_seconds:
        return "the time budget is spent"
    if limits.stop_when_flat and _is_flat(results):
        return "throughput no longer grows"
    return None


def _is_flat(results: Sequence[SizeResult]) -> bool:
    found = [result.batch_size / result.timing.median_seconds for result in results]
    # Of a few passes each: the highest of several noisy rates would always seem to have grown.
    rates = [
        statistics.median_low(found[max(0, place - 1) : place + 2]) for place in range(len(found))
    ]
    return are_flat(rates, results[-1].timing.median_seconds)


def are_flat(rates: Sequence[float], last_seconds: float) -> bool:
    """Whether samples per second have not grown over the last sizes, of which a pass takes long."""
    if len(rates) <= _FLAT_SIZES or last_seconds < _FLAT_FLOOR_SECONDS:
        return False
    return max(rates[-_FLAT_SIZES:]) < _FLAT_GAIN * max(rates[:-_FLAT_SIZES])
