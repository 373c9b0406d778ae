"""What may be held at the start of a tick, work in whole units, and a tick of the dynamic programs.

``TickBack`` is the step that the optimum of a known window and the policy that learns have in
common: the least dollars from a tick on, by those from the next tick on.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, gcd

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from .job import Held, RentJob

MOST_UNITS = 20_000
_MOST_CELLS = 20_000_000  # of the values of one tick

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Modes:
    """What a job may hold in a zone, with what is left of its restart.

    Mode 0 is nothing. Then come, for each of ``holdings`` but nothing, ``levels``: seconds of the
    restart still to come after each tick held, which end with 0.
    """

    job: RentJob

    def __post_init__(self) -> None:
        if self.job.clouds:
            raise ProblemError("a program knows moves between zones, not between clouds")

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
    def launches(self) -> tuple[Held, ...]:
        """What can be launched: of each holding but nothing, that of each zone."""
        zones = range(self.job.num_zones)
        return tuple(Held(*each, zone) for each in self.holdings[1:] for zone in zones)

    @cached_property
    def worked(self) -> list[list[tuple[float, ...]]]:
        """[holdings][levels and a launch][zones] work of a tick held."""
        zones, waits = range(self.job.num_zones), (*self.levels, self.job.restart_seconds)
        return [
            [tuple(self.job.worked(Held(*each, zone), wait) for zone in zones) for wait in waits]
            for each in self.holdings
        ]

    def mode_of(self, held: Held, pending_seconds: float) -> int:
        """The mode of machines with so much of their restart to come."""
        gaps = [abs(level - pending_seconds) for level in self.levels]
        return self.first_of(self.holdings.index(held[:2])) + gaps.index(min(gaps))

    @property
    def most_worked(self) -> float:
        """Most seconds of work in a tick."""
        return self.job.worked(self.job.last_resort(0), 0.0)


def unit_seconds(job: RentJob) -> float:
    """Work of a unit: the greatest number of seconds of which all work done is a whole number.

    Where that would be too many units, or none would do, it is as small as there is room for.
    """
    modes = Modes(job)
    most = min(MOST_UNITS, _MOST_CELLS // (modes.num_modes * modes.num_places))
    parts = {work for each in modes.worked[1:] for works in each for work in works}
    parts.add(job.work_seconds)
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
    """What can be left of so many units at the start of each tick, and at the end.

    At most ``most_units`` are done in a tick; ``must_end`` leaves out what cannot end in time.
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

    def dollars(self, spot: NDArray[np.float64] | None = None) -> Values:
        """Dollars [holdings, zones, states] of a tick of each, at spot prices [zones, states].

        None: at the job's prices, in every state.
        """
        job = self.modes.job
        if spot is None:
            spot = np.array(job.spot_dollars_per_hour)[:, None]
        on_demand = np.array([job.on_demand(zone) for zone in range(job.num_zones)])[:, None]
        rates = [few * spot + many * on_demand for few, many in self.modes.holdings]
        return (np.array(rates) * job.tick_seconds / 3600).astype(np.float32)

    def values(
        self,
        dollars: Values,
        available: NDArray[np.int64],
        later: Values,
        ahead: Span,
        span: Span,
        decided: tuple[NDArray[np.bool_], NDArray[np.integer]] | None = None,
    ) -> Values:
        """The least dollars from a tick on [places, modes, states, units of the span].

        Args:
            dollars: Of the tick, as ``dollars`` has them.
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
        best = _with_units_done(later[:, 0], ahead[0], span, 0).copy()
        holdings = [
            (number, self.modes.first_of(number))
            for number in range(1, len(self.modes.holdings))
            if self.modes.holdings[number][0] <= available.max()
        ]
        zones, levels = self.modes.job.num_zones, self.modes.levels
        leaving = np.array(
            [self.modes.job.leaving_dollars(zone) for zone in range(zones)], np.float32
        )[:, None, None]  # fmt: skip
        for number, after in holdings:
            first = later[:zones, after]
            held = dollars[number], available >= self.modes.holdings[number][0]
            offers = self._held(*held, first, ahead[0], span, number, -1)
            paid = offers
            if zones > 1:  # the last place is that of a job without one, which does not move
                cheapest = offers.min(axis=0)
                moved = cheapest + leaving
                paid = np.concatenate((np.minimum(offers, moved), cheapest[None]))
            if decided is not None:
                code = 1 + (number - 1) * zones
                codes = np.full(paid.shape, code, decided[1].dtype)
                if zones > 1:
                    codes += offers.argmin(axis=0).astype(codes.dtype)
                    own = code + np.arange(zones, dtype=codes.dtype)[:, None, None]
                    codes[:zones] = np.where(offers < moved, own, codes[:zones])
                np.copyto(decided[1], codes, where=paid < best)
            np.minimum(paid, best, out=best)
        values: Values = np.repeat(best[:, None], self.modes.num_modes, axis=1)
        for number, after in holdings:
            held = dollars[number], available >= self.modes.holdings[number][0]
            for level in range(len(levels)):
                then = later[:zones, after + min(level + 1, len(levels) - 1)]
                goes_on = self._held(*held, then, ahead[0], span, number, level)
                if decided is not None:
                    np.less_equal(goes_on, best[:zones], out=decided[0][:, after + level])
                np.minimum(goes_on, best[:zones], out=values[:zones, after + level])
        if span[0] == 0:
            values[..., 0] = 0.0  # no work left costs nothing
        return values

    def _held(
        self,
        tick_dollars: Values,
        is_there: NDArray[np.bool_],
        later: Values,
        first: int,
        span: Span,
        holding: int,
        level: int,
    ) -> Values:
        """Dollars [zones, states, units] if so much is held in the tick; level -1: launched."""
        works = self.modes.worked[holding][level]
        done = {work: self._with_done(later, first, span, work) for work in set(works)}
        dollars = done[works[0]]
        if len(done) > 1:
            dollars = np.stack([done[work][zone] for zone, work in enumerate(works)])
        dollars = dollars + tick_dollars[..., None]
        if self.modes.holdings[holding][0]:
            dollars[~is_there] = np.inf  # some are lost
        return dollars

    def _with_done(self, later: Values, first: int, span: Span, work_seconds: float) -> Values:
        """Values by work left before so much of it is done."""
        units = work_seconds / self.unit_seconds
        whole = units_up(units) if self.is_bound else int(units)
        found = _with_units_done(later, first, span, whole)
        if self.is_bound or units <= whole:
            return found
        part = np.float32(units - whole)
        return (1 - part) * found + part * _with_units_done(later, first, span, whole + 1)


def _with_units_done(values: Values, first: int, span: Span, units: int) -> Values:
    """Values by work left [..., from ``first`` on], once so many units of a span's are done."""
    ended = min(max(units + first - span[0], 0), span[1] - span[0] + 1)
    kept = values[..., span[0] + ended - units - first : span[1] + 1 - units - first]
    if not ended:
        return kept
    return np.concatenate((np.zeros((*kept.shape[:-1], ended), np.float32), kept), axis=-1)
