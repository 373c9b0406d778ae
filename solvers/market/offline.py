"""The least that a job can cost under a deadline, with all zones' windows known in advance.

A dynamic program over ticks, the zone of the last launch, what is held, and the work left. It is
exact on the grid (grid.py): the grid rounds nothing where seconds are whole and few, and otherwise
so that the answer is at most the optimum. So it bounds the cost of every policy from below.
O(ticks x zones^2 x modes x units).
"""

from collections.abc import Sequence

import numpy as np

from ...schema.errors import ProblemError
from .deadline import DeadlineJob, Held, Hold
from .grid import Grid, Values, done, grid_of


def least_dollars(job: DeadlineJob, available: Sequence[Sequence[int]]) -> float:
    """The least dollars on a window.

    Args:
        job: The job.
        available: [zones][ticks] 1 where spot machines can be had, else 0; at least to the
            deadline.

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
    grid = grid_of(job)
    # [zones + 1, modes, units + 1]; the last place is that of a job that was never launched.
    shape = (job.num_zones + 1, grid.num_modes, grid.num_units + 1)
    values: Values = np.full(shape, np.inf, np.float32)
    values[..., 0] = 0.0
    for tick in range(num_ticks - 1, -1, -1):
        there = [bool(window[tick]) for window in available]
        values = _before(job, grid, values, there)
    return float(values[-1, 0, grid.num_units])


def _before(job: DeadlineJob, grid: Grid, values: Values, there: Sequence[bool]) -> Values:
    """Least dollars from a tick on, from those of the next."""
    least = np.empty_like(values)
    launches = [
        (
            zone,
            np.float32(job.tick_dollars(Held(hold, zone)))
            + done(values[zone, grid.first_of(hold)], grid.launched_units),
        )
        for zone in range(job.num_zones)
        for hold in (Hold.SPOT, Hold.ON_DEMAND)
        if hold is Hold.ON_DEMAND or there[zone]
    ]
    for place in range(job.num_zones + 1):
        before = place if place < job.num_zones else None
        least[place, 0] = values[place, 0]
        for zone, launch in launches:
            moved = launch + np.float32(job.moving_dollars(before, zone))
            np.minimum(least[place, 0], moved, out=least[place, 0])
        least[place, 1:] = least[place, 0]  # a machine may be given up, or is lost
    for zone in range(job.num_zones):
        for hold in (Hold.SPOT, Hold.ON_DEMAND):
            if hold is Hold.SPOT and not there[zone]:
                continue
            for mode in range(grid.first_of(hold), grid.first_of(hold) + len(grid.levels)):
                goes_on = np.float32(job.tick_dollars(Held(hold, zone))) + done(
                    values[zone, grid.after(mode)], grid.progress_units[grid.level_of(mode)]
                )
                np.minimum(least[zone, mode], goes_on, out=least[zone, mode])
    least[..., 0] = 0.0
    return least
