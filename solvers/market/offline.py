"""The least that a job can cost under a deadline, with the whole window known in advance.

A dynamic program over ticks, what is held, and the work left. It is exact on the grid (grid.py):
the grid rounds nothing where seconds are whole and few, and otherwise so that the answer is at most
the optimum. So it bounds the cost of every policy from below. O(ticks x modes x units).
"""

from collections.abc import Sequence

import numpy as np

from ...schema.errors import ProblemError
from .deadline import DeadlineJob, Hold
from .grid import Grid, Values, done, grid_of


def least_dollars(job: DeadlineJob, available: Sequence[int]) -> float:
    """The least dollars on a window.

    Args:
        job: The job.
        available: [ticks] 1 where spot machines can be had, else 0; at least to the deadline.

    Raises:
        ProblemError: The window is shorter than the deadline.
    """
    if len(available) < job.num_ticks:
        raise ProblemError(
            f"the window has {len(available)} ticks, the deadline is after {job.num_ticks}"
        )
    grid = grid_of(job, bounds=True)
    values: Values = np.full((grid.num_modes, grid.num_units + 1), np.inf, np.float32)
    values[:, 0] = 0.0
    for tick in range(job.num_ticks - 1, -1, -1):
        values = _before(job, grid, values, has_spot=bool(available[tick]))
    return float(values[0, grid.num_units])


def _before(job: DeadlineJob, grid: Grid, values: Values, *, has_spot: bool) -> Values:
    """Least dollars from a tick on [modes, units + 1], from those of the next."""
    offers = (Hold.SPOT, Hold.ON_DEMAND) if has_spot else (Hold.ON_DEMAND,)
    launches = {
        hold: np.float32(job.tick_dollars(hold))
        + done(values[grid.first_of(hold)], grid.launched_units)
        for hold in offers
    }
    least = np.empty_like(values)
    least[0] = values[0]
    for launch in launches.values():
        np.minimum(least[0], launch, out=least[0])
    for hold in (Hold.SPOT, Hold.ON_DEMAND):
        for mode in range(grid.first_of(hold), grid.first_of(hold) + len(grid.levels)):
            if hold in launches:
                goes_on = np.float32(job.tick_dollars(hold)) + done(
                    values[grid.after(mode)], grid.progress_units[grid.level_of(mode)]
                )
                np.minimum(least[0], goes_on, out=least[mode])
            else:  # the machine is lost
                least[mode] = least[0]
    least[:, 0] = 0.0
    return least
