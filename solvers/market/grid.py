"""What may be held at the start of a tick, and work in whole units, for loops over arrays."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, gcd

import numpy as np
from numpy.typing import NDArray

from .deadline import DeadlineJob, Held

MOST_UNITS = 20_000
_MOST_CELLS = 20_000_000  # of the values of one tick

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Modes:
    """What a job may hold in a zone, with what is left of its restart.

    Mode 0 is nothing. Then come, for each of ``holdings`` but nothing, ``levels``: seconds of the
    restart still to come after each tick held, which end with 0.
    """

    job: DeadlineJob

    @cached_property
    def holdings(self) -> tuple[tuple[int, int], ...]:
        """Spot and on-demand machines, nothing first."""
        most = self.job.num_machines
        return tuple(
            (spot, on_demand) for spot in range(most + 1) for on_demand in range(most + 1 - spot)
        )

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """Seconds of a restart still to come."""
        levels, left = [], self.job.restart_seconds - self.job.tick_seconds
        while left > 1e-9:
            levels.append(left)
            left -= self.job.tick_seconds
        return (*levels, 0.0)

    @property
    def num_places(self) -> int:
        """Zones of the last launch; with several zones the last is that of a job without one."""
        return 1 if self.job.num_zones == 1 else self.job.num_zones + 1

    @property
    def num_modes(self) -> int:
        """Nothing, and each of the others at each level."""
        return 1 + (len(self.holdings) - 1) * len(self.levels)

    def first_of(self, holding: int) -> int:
        """The mode after the tick of a launch."""
        return 0 if holding == 0 else 1 + (holding - 1) * len(self.levels)

    @cached_property
    def staying(self) -> list[tuple[int, int, float, int]]:
        """Of each mode but nothing: itself, its holding, work of a tick, and the mode after it."""
        last = len(self.levels) - 1
        return [
            (
                self.first_of(holding) + level,
                holding,
                self.job.worked(sum(self.holdings[holding]), pending),
                self.first_of(holding) + min(level + 1, last),
            )
            for holding in range(1, len(self.holdings))
            for level, pending in enumerate(self.levels)
        ]

    @cached_property
    def launches(self) -> list[tuple[int, Held, float]]:
        """Of each zone and holding but nothing: the holding, itself, and work of its first tick."""
        return [
            (holding, Held(*held, zone), self.job.worked(sum(held), self.job.restart_seconds))
            for holding, held in enumerate(self.holdings)
            for zone in range(self.job.num_zones)
            if holding
        ]

    def mode_of(self, held: Held, pending_seconds: float) -> int:
        """The mode of machines with so much of their restart to come."""
        gaps = [abs(level - pending_seconds) for level in self.levels]
        return self.first_of(self.holdings.index(held[:2])) + gaps.index(min(gaps))


def unit_seconds(job: DeadlineJob) -> float:
    """Work of a unit: the greatest number of seconds of which all work done is a whole number.

    Where that would be too many units, or none would do, it is as small as there is room for.
    """
    modes = Modes(job)
    most = min(MOST_UNITS, _MOST_CELLS // (modes.num_modes * modes.num_places))
    parts = [work for _, _, work, _ in modes.staying] + [job.work_seconds]
    parts += [work for _, _, work in modes.launches]
    whole = [round(work) for work in parts]
    exact = all(abs(a - b) < 1e-6 for a, b in zip(parts, whole, strict=True))
    return max(float(gcd(*whole)) if exact else 0.0, job.work_seconds / most)


def done_between(values: Values, units: float) -> Values:
    """Values by work left [..., units + 1], once so many units of it are done.

    A part of a unit is interpolated between the points of the grid.
    """
    width = values.shape[-1]
    whole = min(int(units), width)
    part = np.float32(units - whole)
    moved = np.zeros_like(values)  # no work left costs nothing
    moved[..., whole:] = (1 - part) * values[..., : width - whole]
    if part > 0 and whole + 1 < width:
        moved[..., whole + 1 :] += part * values[..., : width - whole - 1]
    return moved


def units_up(units: float) -> int:
    """Whole units, rounded up."""
    return ceil(units - 1e-6)


def units_down(units: float) -> int:
    """Whole units, rounded down."""
    return floor(units + 1e-6)
