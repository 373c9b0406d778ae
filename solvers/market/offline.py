"""The least that a job can cost under a deadline, with all zones' windows known in advance.

A dynamic program over ticks, the zone of the last launch, what is held, and the work left in whole
units. It is exact where seconds of work are whole and few (``unit_seconds``). Else work is rounded
down and progress up, so that the answer is at most the optimum. So it bounds the cost of every
policy from below. O(ticks x zones^2 x modes x units) a window; windows go back through time
together, each a state from which no other one is reached.
"""

from collections.abc import Sequence

import numpy as np

from ...schema.errors import ProblemError
from .grid import Modes, TickBack, Values, spans_of, unit_seconds, units_down
from .job import RentJob
from .windows import Window

_MOST_CELLS = 2_000_000  # of the values of one tick, for all windows at once


def least_dollars(
    job: RentJob,
    available: Sequence[Sequence[int]],
    spot_dollars_per_hour: Sequence[Sequence[float]] | None = None,
) -> float:
    """The least dollars on a window [zones][ticks], which goes to the deadline at least.

    Raises:
        ProblemError: A zone's window is missing, or is shorter than the deadline.
    """
    return least_of_each(job, [Window(available, spot_dollars_per_hour)])[0]


def least_of_each(job: RentJob, windows: Sequence[Window]) -> list[float]:
    """The least dollars on each window; prices move in all or in none.

    Raises:
        ProblemError: A zone's window is missing, or is shorter than the deadline.
    """
    num_ticks = job.num_ticks
    for available, _ in windows:
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
    widest = max(last - first + 1 for first, last in spans)
    together = max(1, _MOST_CELLS // (modes.num_places * modes.num_modes * widest))
    found: list[float] = []
    for begin in range(0, len(windows), together):
        some = windows[begin : begin + together]
        there = np.array([[zone[:num_ticks] for zone in one.available] for one in some])
        told = [one.spot_dollars_per_hour for one in some]
        prices = np.array([[zone[:num_ticks] for zone in one] for one in told if one is not None])
        shape = (modes.num_places, modes.num_modes, len(some), spans[-1][1] - spans[-1][0] + 1)
        values: Values = np.full(shape, np.inf, np.float32)
        if spans[-1][0] == 0:
            values[..., 0] = 0.0
        dollars = back.dollars()
        for tick in range(num_ticks - 1, -1, -1):
            if len(prices):
                dollars = back.dollars(prices[:, :, tick].T)
            values = back.values(
                dollars, there[:, :, tick].T, values, spans[tick + 1], spans[tick]
            )  # fmt: skip
        found += values[-1, 0, :, -1].tolist()
    return found
