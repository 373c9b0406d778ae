"""Work in whole units, so that a dynamic program over the work left is a loop over arrays.

With ticks of G seconds and restarts of d seconds, a unit is the greatest whole number of seconds
that divides G, d and the work, so nothing is rounded. Where that would give more than
``MOST_UNITS`` units, or the seconds are not whole, work is rounded down and progress up: the least
cost on the grid then bounds the cost off it.
"""

from dataclasses import dataclass
from math import ceil, floor, gcd

import numpy as np
from numpy.typing import NDArray

from .deadline import DeadlineJob, Hold

MOST_UNITS = 20_000

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Grid:
    """A job on the grid.

    Modes are what may be held at the start of a tick: 0 nothing; 1 to n a spot machine with each
    of ``levels`` of its restart still to come; n + 1 to 2n an on-demand machine likewise.
    """

    unit_seconds: float
    num_units: int
    levels: tuple[float, ...]
    launched_units: int
    """Work done in the tick of a launch."""
    progress_units: tuple[int, ...]
    """Work done in a tick that begins at each level."""

    @property
    def num_modes(self) -> int:
        """Nothing, and spot and on demand at each level."""
        return 2 * len(self.levels) + 1

    def first_of(self, hold: Hold) -> int:
        """The mode after the tick of a launch."""
        return 1 if hold is Hold.SPOT else len(self.levels) + 1

    def level_of(self, mode: int) -> int:
        """The level of a mode that holds a machine."""
        return (mode - 1) % len(self.levels)

    def after(self, mode: int) -> int:
        """The mode one tick on, with the same machine."""
        return mode if self.level_of(mode) == len(self.levels) - 1 else mode + 1

    def mode_of(self, held: Hold, pending_seconds: float) -> int:
        """The mode of a machine with so much of its restart to come."""
        if held is Hold.NOTHING:
            return 0
        gaps = [abs(level - pending_seconds) for level in self.levels]
        return self.first_of(held) + gaps.index(min(gaps))


def grid_of(job: DeadlineJob) -> Grid:
    """The grid of a job; O(restart / tick)."""
    levels = job.pending_levels()
    seconds = (job.tick_seconds, job.restart_seconds, job.work_seconds)
    whole = [round(value) for value in seconds]
    exact = all(abs(a - b) < 1e-6 for a, b in zip(seconds, whole, strict=True))
    unit = float(gcd(*whole)) if exact else job.work_seconds / MOST_UNITS
    if job.work_seconds / unit > MOST_UNITS:
        unit = job.work_seconds / MOST_UNITS
    return Grid(
        unit_seconds=unit,
        num_units=_down(job.work_seconds / unit),
        levels=levels,
        launched_units=_up(max(job.tick_seconds - job.restart_seconds, 0.0) / unit),
        progress_units=tuple(_up(max(job.tick_seconds - level, 0.0) / unit) for level in levels),
    )


def done(values: Values, units: int) -> Values:
    """Values by work left [..., units + 1], once so many units of it are done."""
    if units == 0:
        return values
    moved = np.zeros_like(values)  # no work left costs nothing
    moved[..., units:] = values[..., :-units]
    return moved


def done_between(values: Values, units: float) -> Values:
    """As ``done`` for a part of a unit too, by interpolating between the points of the grid."""
    width = values.shape[-1]
    whole = min(int(units), width)
    part = np.float32(units - whole)
    moved = np.zeros_like(values)  # no work left costs nothing
    moved[..., whole:] = (1 - part) * values[..., : width - whole]
    if part > 0 and whole + 1 < width:
        moved[..., whole + 1 :] += part * values[..., : width - whole - 1]
    return moved


def _up(units: float) -> int:
    return ceil(units - 1e-6)


def _down(units: float) -> int:
    return floor(units + 1e-6)
