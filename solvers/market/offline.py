"""The least that a job can cost under a deadline, with all zones' windows known in advance.

A dynamic program over ticks, the zone of the last launch, what is held, and the work left in whole
units. It is exact where seconds of work are whole and few (``unit_seconds``). Else work is rounded
down and progress up, so that the answer is at most the optimum. So it bounds the cost of every
policy from below. O(ticks x zones^2 x modes x units).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ...schema.errors import ProblemError
from .deadline import DeadlineJob, Held
from .grid import Modes, Values, unit_seconds, units_down, units_up


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
    most = units_up(job.worked(job.num_machines, 0.0) / unit)  # in a tick
    steps_at = cache(lambda prices: _steps(modes, job.at(prices), unit))
    values: Values = np.full((modes.num_places, modes.num_modes, num_units + 1), np.inf, np.float32)
    values[..., 0] = 0.0
    for tick in range(num_ticks - 1, -1, -1):
        there = [window[tick] for window in available]
        launches, stays = steps_at(prices_in(spot_dollars_per_hour, tick))
        # No other work can be left, or done in time.
        low, high = max(0, num_units - tick * most), min(num_units, (num_ticks - tick) * most) + 1
        best = values[:, 0, low:high].copy()
        for step in launches:
            if step.num_spot <= there[step.zone]:
                _lower(best[step.place], values[step.zone, step.after], step, low)
        least: Values = np.full(values.shape, np.inf, np.float32)
        least[..., low:high] = best[:, None]  # what is held may be given up
        for step in stays:
            if step.num_spot <= there[step.zone]:
                _lower(
                    least[step.zone, step.before, low:high],
                    values[step.zone, step.after],
                    step,
                    low,
                )
        least[..., 0] = 0.0
        values = least
    return float(values[-1, 0, num_units])


class _Step(NamedTuple):
    """A tick of holding: from a place or a mode to a mode, what it takes and does."""

    place: int
    before: int
    zone: int
    after: int
    num_spot: int
    units: int
    dollars: np.float32


def prices_in(
    spot_dollars_per_hour: Sequence[Sequence[float]] | None, tick: int
) -> tuple[float, ...] | None:
    """The prices [zones] of a tick, from those of all ticks [zones][ticks]."""
    prices = spot_dollars_per_hour
    return None if prices is None else tuple(zone[tick] for zone in prices)


def _steps(modes: Modes, job: DeadlineJob, unit: float) -> tuple[list[_Step], list[_Step]]:
    """Launches and stays at the prices that a job has."""
    return _launches(modes, job, unit), _stays(modes, job, unit)


def _launches(modes: Modes, job: DeadlineJob, unit: float) -> list[_Step]:
    steps = []
    for holding, held, work in modes.launches:
        for place in range(modes.num_places):
            moving = job.moving_dollars(place if place < job.num_zones else None, held.zone)
            dollars, units = np.float32(job.tick_dollars(held) + moving), units_up(work / unit)
            after = modes.first_of(holding)
            steps.append(_Step(place, 0, held.zone, after, held.num_spot, units, dollars))
    return steps


def _stays(modes: Modes, job: DeadlineJob, unit: float) -> list[_Step]:
    steps = []
    for mode, holding, work, after in modes.staying:
        for zone in range(job.num_zones):
            held = Held(*modes.holdings[holding], zone)
            dollars, units = np.float32(job.tick_dollars(held)), units_up(work / unit)
            steps.append(_Step(zone, mode, zone, after, held.num_spot, units, dollars))
    return steps


def _lower(least: Values, later: Values, step: _Step, low: int) -> None:
    """Take a step where that is less; ``least`` is of work left from ``low`` units on."""
    ended = min(max(step.units - low, 0), len(least))
    if ended:  # no work left costs nothing
        np.minimum(least[:ended], step.dollars, out=least[:ended])
    first = low + ended - step.units
    more = later[first : first + len(least) - ended] + step.dollars
    np.minimum(least[ended:], more, out=least[ended:])
