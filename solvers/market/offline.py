"""The least that a job can cost under a deadline, with all zones' windows known in advance.

A dynamic program over ticks, the zone of the last launch, what is held, and the work left in whole
units. It is exact where seconds of work are whole and few (``unit_seconds``). Else work is rounded
down and progress up, so that the answer is at most the optimum. So it bounds the cost of every
policy from below. O(ticks x zones^2 x modes x units).
"""

from collections.abc import Sequence

import numpy as np

from ...schema.errors import ProblemError
from .deadline import DeadlineJob, Held
from .grid import Modes, Values, unit_seconds, units_down, units_up


def least_dollars(job: DeadlineJob, available: Sequence[Sequence[int]]) -> float:
    """The least dollars on a window.

    Args:
        job: The job.
        available: [zones][ticks] spot machines that can be had; at least to the deadline.

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
    most = units_up(job.worked(job.num_machines, 0.0) / unit)  # in a tick
    values: Values = np.full((modes.num_places, modes.num_modes, num_units + 1), np.inf, np.float32)
    values[..., 0] = 0.0
    for tick in range(num_ticks - 1, -1, -1):
        # No other work can be left, or done in time.
        low, high = max(0, num_units - tick * most), min(num_units, (num_ticks - tick) * most)
        values = _before(modes, unit, values, [window[tick] for window in available], low, high + 1)
    return float(values[-1, 0, num_units])


def _before(
    modes: Modes, unit: float, values: Values, there: Sequence[int], low: int, high: int
) -> Values:
    """Least dollars from a tick on, from those of the next, of work left from low to below high.

    ``there`` [zones] are spot machines.
    """

    def lower(least: Values, later: Values, work_seconds: float, dollars: float) -> None:
        """Take what it costs to do so much work for some dollars first, where that is less."""
        cost, done = np.float32(dollars), units_up(work_seconds / unit)
        ended = min(max(done - low, 0), high - low)
        np.minimum(least[:ended], cost, out=least[:ended])  # no work left costs nothing
        more = later[low + ended - done : high - done] + cost if ended < high - low else cost
        np.minimum(least[ended:], more, out=least[ended:])

    job, best = modes.job, values[:, 0, low:high].copy()
    for holding, held, work in modes.launches:
        if held.num_spot > there[held.zone]:
            continue
        for place in range(modes.num_places):
            before = place if place < job.num_zones else None
            dollars = job.tick_dollars(held) + job.moving_dollars(before, held.zone)
            lower(best[place], values[held.zone, modes.first_of(holding)], work, dollars)
    least: Values = np.full(values.shape, np.inf, np.float32)
    least[..., low:high] = best[:, None]  # what is held may be given up
    for mode, holding, work, after in modes.staying:
        for zone in range(job.num_zones):
            held = Held(*modes.holdings[holding], zone)
            if held.num_spot <= there[zone]:
                dollars = job.tick_dollars(held)
                lower(least[zone, mode, low:high], values[zone, after], work, dollars)
    least[..., 0] = 0.0
    return least
