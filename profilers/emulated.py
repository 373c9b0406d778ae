"""Emulated device types: the CPU at a stated fraction of its speed.

The arithmetic is real and runs in a real process; each forward + backward pass is held to a
fixed time, table time = CPU pass time / speed (runtime.emulation). A fixed time from a table is
steady under load, where sleeping in proportion to the time just taken, CPU quotas and nice are
not (benchmarks/emulation_stability.py). Only the passes are stretched: the update and the
synchronisation take the CPU's own time.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..schema.plan import PassTime
from ..schema.profile import BatchPoint
from .measurer import Measurer
from .timing import Timing

STEADY_SECONDS = 0.01
_MAX_SIZES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSize:
    """What holding gave at one size: the table's time, the measured one, and missed deadlines."""

    batch_size: int
    table_seconds: float
    measured: Timing
    num_overruns: int

    @property
    def error(self) -> float:
        """(measured - table) / table of the median."""
        return self.measured.median_seconds / self.table_seconds - 1


def stretched(base: Sequence[BatchPoint], speed: float) -> tuple[BatchPoint, ...]:
    """The curve of a device at ``speed`` times the base device's speed; memory is the same."""
    return tuple(
        BatchPoint(
            batch_size=point.batch_size,
            step_seconds=point.step_seconds / speed,
            peak_memory_bytes=point.peak_memory_bytes,
        )
        for point in base
    )


def verify(
    measurer: Measurer, table: Sequence[BatchPoint], budget_seconds: float
) -> tuple[HeldSize, ...]:
    """Run held passes for real at a few sizes of the table and see how long they take.

    Args:
        measurer: Measures on the base device.
        table: The emulated curve.
        budget_seconds: Wall time to spend, about; at least three passes of one size are run.
    """
    chosen = sizes_to_verify(table, budget_seconds)
    passes = [
        PassTime(batch_size=point.batch_size, step_seconds=point.step_seconds) for point in table
    ]
    share = budget_seconds / len(chosen)
    held = []
    for point in chosen:
        repeats = max(3, min(20, int(share / point.step_seconds)))
        answer = measurer.hold(point.batch_size, passes, repeats)
        held.append(
            HeldSize(
                batch_size=point.batch_size,
                table_seconds=point.step_seconds,
                measured=Timing.of(answer["seconds"]),
                num_overruns=answer["num_overruns"],
            )
        )
    return tuple(held)


def sizes_to_verify(table: Sequence[BatchPoint], budget_seconds: float) -> list[BatchPoint]:
    """Up to three sizes spread over those that are steady and affordable; at least one."""
    share = budget_seconds / _MAX_SIZES
    usable = [p for p in table if STEADY_SECONDS <= p.step_seconds <= share / 5]
    if not usable:
        usable = [min(table, key=lambda p: abs(p.step_seconds - STEADY_SECONDS))]
    picks = {0, len(usable) // 2, len(usable) - 1}
    return [usable[index] for index in sorted(picks)]


def as_provenance(held: Sequence[HeldSize], speed: float) -> dict[str, Any]:
    """The verification as it stands in a profile's provenance."""
    return {
        "emulated": True,
        "method": "each pass is held to table time = CPU pass time / speed",
        "stated_speed": speed,
        "held_passes": [
            {
                "batch_size": size.batch_size,
                "table_seconds": size.table_seconds,
                "measured": asdict(size.measured),
                "measured_speed": speed / (1 + size.error),
                "error": size.error,
                "overruns": size.num_overruns,
            }
            for size in held
        ],
        "worst_error": max((abs(size.error) for size in held), default=None),
    }
