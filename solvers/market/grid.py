"""What may be held at the start of a tick, work in whole units, and a tick of the dynamic programs.

``TickBack`` is the step that the optimum of a known window and the policy that learns have in
common: the least dollars from a tick on, by those from the next tick on.
"""

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
    def launches(self) -> list[tuple[int, Held, float]]:
        """Of each zone and holding but nothing: mode after it, itself, work of its first tick."""
        return [
            (self.first_of(holding), held, self.job.worked(held, self.job.restart_seconds))
            for holding, each in enumerate(self.holdings)
            for zone in range(self.job.num_zones)
            if holding and (held := Held(*each, zone))
        ]

    @cached_property
    def staying(self) -> list[tuple[int, int, Held, float]]:
        """Of each zone and mode but nothing: itself, the one after it, what is held, its work."""
        last = len(self.levels) - 1
        return [
            (
                self.first_of(holding) + level,
                self.first_of(holding) + min(level + 1, last),
                held,
                self.job.worked(held, pending),
            )
            for holding in range(1, len(self.holdings))
            for level, pending in enumerate(self.levels)
            for zone in range(self.job.num_zones)
            if (held := Held(*self.holdings[holding], zone))
        ]

    def mode_of(self, held: Held, pending_seconds: float) -> int:
        """The mode of machines with so much of their restart to come."""
        gaps = [abs(level - pending_seconds) for level in self.levels]
        return self.first_of(self.holdings.index(held[:2])) + gaps.index(min(gaps))

    @property
    def most_worked(self) -> float:
        """Most seconds of work in a tick."""
        return self.job.worked(self.job.last_resort(0), 0.0)


def unit_seconds(job: DeadlineJob) -> float:
    """Work of a unit: the greatest number of seconds of which all work done is a whole number.

    Where that would be too many units, or none would do, it is as small as there is room for.
    """
    modes = Modes(job)
    most = min(MOST_UNITS, _MOST_CELLS // (modes.num_modes * modes.num_places))
    parts = [work for *_, work in modes.staying + modes.launches] + [job.work_seconds]
    whole = [round(work) for work in parts]
    exact = all(abs(a - b) < 1e-6 for a, b in zip(parts, whole, strict=True))
    return max(float(gcd(*whole)) if exact else 0.0, job.work_seconds / most)


def units_up(units: float) -> int:
    """Whole units, rounded up."""
    return ceil(units - 1e-6)


def units_down(units: float) -> int:
    """Whole units, rounded down."""
    return floor(units + 1e-6)


Span = tuple[int, int]
"""The first and the last number of units that can be left, both counted."""


def spans_of(num_ticks: int, num_units: int, most_units: float, *, must_end: bool) -> list[Span]:
    """What can be left at the start of each tick, and at the end.

    Args:
        num_ticks: Until the deadline.
        num_units: Of all work.
        most_units: Done in a tick.
        must_end: Whether what cannot end in time is left out.
    """
    ticks, most = np.arange(num_ticks + 1), units_up(most_units)
    first = np.maximum(num_units - ticks * most, 0)
    last = np.minimum((num_ticks - ticks) * most, num_units) if must_end else num_units + 0 * ticks
    return list(zip(first.tolist(), np.maximum(first, last).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class TickBack:
    """A tick of a dynamic program that goes backwards in time.

    Attributes:
        modes: What may be held.
        unit_seconds: Work of a unit.
        late_dollars: What is left when it cannot be done in time any more.
        is_bound: Work done is rounded up to whole units, else values are interpolated.
    """

    modes: Modes
    unit_seconds: float
    late_dollars: float
    is_bound: bool

    def values(
        self,
        job: DeadlineJob,
        available: NDArray[np.int64],
        later: Values,
        ahead: Span,
        span: Span,
        decided: tuple[NDArray[np.bool_], NDArray[np.integer]] | None = None,
    ) -> Values:
        """The least dollars from a tick on [places, modes, states, units of the span].

        Args:
            job: At the prices of the tick.
            available: [zones, states] spot machines that can be had.
            later: The same of the next tick, as expected in each state of this one.
            ahead: The next tick's span.
            span: The tick's.
            decided: Takes whether to keep what is held [zones, modes, states, units], and what to
                do else [places, states, units]: 0 nothing, or the place in ``modes.launches``, and
                one.
        """
        if span[1] > ahead[1]:
            more = (*later.shape[:-1], span[1] - ahead[1])
            later = np.concatenate((later, np.full(more, self.late_dollars, np.float32)), axis=-1)
        most = available.max(axis=1).tolist()
        best = _with_units_done(later[:, 0], ahead[0], span, 0).copy()
        for code, (after, held, work) in enumerate(self.modes.launches, start=1):
            if held.num_spot > most[held.zone]:
                continue
            offer = self._held(job, available, later[held.zone, after], ahead[0], span, held, work)
            for place in range(self.modes.num_places):
                before = place if place < job.num_zones else None
                moving = job.moving_dollars(before, held.zone)
                paid = offer + np.float32(moving) if moving else offer
                if decided is not None:
                    decided[1][place][paid < best[place]] = code
                np.minimum(paid, best[place], out=best[place])
        values: Values = np.repeat(best[:, None], self.modes.num_modes, axis=1)
        for mode, after, held, work in self.modes.staying:
            goes_on = self._held(
                job, available, later[held.zone, after], ahead[0], span, held, work
            )
            if goes_on is None:
                continue
            if decided is not None:
                np.less_equal(goes_on, best[held.zone], out=decided[0][held.zone, mode])
            np.minimum(goes_on, best[held.zone], out=values[held.zone, mode])
        if span[0] == 0:
            values[..., 0] = 0.0  # no work left costs nothing
        return values

    def _held(
        self,
        job: DeadlineJob,
        available: NDArray[np.int64],
        later: Values,
        first: int,
        span: Span,
        held: Held,
        work_seconds: float,
    ) -> Values:
        """Dollars [states, units] if so much is held in the tick."""
        units = work_seconds / self.unit_seconds
        whole = units_up(units) if self.is_bound else int(units)
        dollars = _with_units_done(later, first, span, whole)
        if not self.is_bound and units > whole:
            part = np.float32(units - whole)
            more = _with_units_done(later, first, span, whole + 1)
            dollars = (1 - part) * dollars + part * more
        dollars = dollars + np.float32(job.tick_dollars(held))
        if held.num_spot:
            dollars[available[held.zone] < held.num_spot] = np.inf  # some are lost
        return dollars


def _with_units_done(values: Values, first: int, span: Span, units: int) -> Values:
    """Values by work left [..., from ``first`` on], once so many units of a span's are done."""
    ended = min(max(units + first - span[0], 0), span[1] - span[0] + 1)
    kept = values[..., span[0] + ended - units - first : span[1] + 1 - units - first]
    if not ended:
        return kept
    return np.concatenate((np.zeros((*kept.shape[:-1], ended), np.float32), kept), axis=-1)
