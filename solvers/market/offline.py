"""The least that a job can cost under a deadline, with all zones' windows known in advance.

A dynamic program over ticks, the zone of the last launch, what is held, and the work left in whole
units. It is exact where seconds of work are whole and few (``unit_seconds``). Else work is rounded
down and progress up, so that the answer is at most the optimum. So it bounds the cost of every
policy from below. O(ticks x zones^2 x modes x units).
"""

from collections.abc import Sequence

import numpy as np

from ...schema.errors import ProblemError
from .deadline import DeadlineJob
from .grid import Modes, TickBack, Values, spans_of, unit_seconds, units_down


def least_dollars(
    job: DeadlineJob,
    available: Sequence[Sequence[int]],
    spot_dollars_per_hour: Sequence[Sequence[float]] | None = None,
) -> float:
    """The least dollars on a window.

    Args:
        job: The job.
        available: [zones][ticks] spot machines that can be had; at least to the deadline.
        spot_dollars_per_hour: [zones][ticks] of one machine, where prices move.

    Raises:
        ProblemError: A zone's window is missing, or is shorter than the deadline.
    """
    num_ticks = job.num_ticks
    shortest = min(map(len, available), default=0)
    if len(available) != job.num_zones or shortest < num_ticks:
        raise ProblemError(
            f"{len(available)} windows of at least {shortest} ticks do not do for "
            f"{job.num_zones} zones and a deadline after {num_ticks} ticks"
        )
    modes, unit = Modes(job), unit_seconds(job)
    num_units = units_down(job.work_seconds / unit)
    back = TickBack(modes, unit, late_dollars=np.inf, is_bound=True)
    spans = spans_of(num_ticks, num_units, modes.most_worked / unit, must_end=True)
    there = np.array([zone[:num_ticks] for zone in available])
    shape = (modes.num_places, modes.num_modes, 1, spans[-1][1] - spans[-1][0] + 1)
    values: Values = np.full(shape, np.inf, np.float32)
    if spans[-1][0] == 0:
        values[..., 0] = 0.0
    for tick in range(num_ticks - 1, -1, -1):
        now = job.at(prices_in(spot_dollars_per_hour, tick))
        tick_there = there[:, tick : tick + 1]
        values = back.values(now, tick_there, values, spans[tick + 1], spans[tick])
    return float(values[-1, 0, 0, -1])


def prices_in(
    spot_dollars_per_hour: Sequence[Sequence[float]] | None, tick: int
) -> tuple[float, ...] | None:
    """The prices [zones] of a tick, from those of all ticks [zones][ticks]."""
    prices = spot_dollars_per_hour
    return None if prices is None else tuple(zone[tick] for zone in prices)
