"""The least expected dollars, by dynamic programming over a chain learned from history.

A state is the tick, the chain's state of all zones, the zone of the last launch, what is held with
its restart, and the work left. Work is on a grid of units, between which values are interpolated.
With one machine a tick of work is a whole number of units. What cannot end in time whatever the
market does costs so much that it is never chosen while anything else is left. Several machines do
unlike parts of the work in a tick: then work left at the deadline costs several times what it costs
on demand. ``guarded`` takes care of what the units round. So no deadline is missed, however wrong
the chain is.

    one zone, 1 h ticks, no restart; 1 h of work, deadline 2 h; spot 1 $/h, on demand 3 $/h
    last tick, work left: spot is there 1 $, else 3 $
    first tick, spot gone now: on demand 3 $, or wait: 0.5 x 1 + 0.5 x 3 = 2 $ where the chain says
    that it comes back half of the time; so it waits, and there 2 $ is the value

O(ticks x states x (states + zones) x zones x modes x units) once, then a look-up a tick. Where the
table would take more than ``MOST_BYTES``, several ticks share a decision.

``TickBack`` is the step that the policy which learns and the optimum of a known window have in
common: the least dollars from a tick on, by those from the next tick on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, floor, gcd, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from .chain import Chain, num_states
from .job import Held, Moment, Prices, RentJob, guarded
from .windows import Window

MOST_UNITS = 20_000
_MOST_CELLS_TO_COUNT_IN = 20_000_000  # of the values of one tick

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
    """Choose the work of a unit: the greatest number of seconds that divides all work done."""
    modes = Modes(job)
    most = min(MOST_UNITS, _MOST_CELLS_TO_COUNT_IN // (modes.num_modes * modes.num_places))
    # Where that makes too many units, or seconds are no whole numbers, a unit is as small as there
    # is room for.
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
    # At best all ticks so far did the most; at worst (``must_end``) the ticks to come must.
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
        # More work left than the next tick allows: it ends late, whatever happens.
        if span[1] > ahead[1]:
            more = (*later.shape[:-1], span[1] - ahead[1])
            later = np.concatenate((later, np.full(more, self.late_dollars, np.float32)), axis=-1)
        # Holding nothing is always possible; everything else must be better than that.
        best = _with_units_done(later[:, 0], ahead[0], span, 0).copy()
        holdings = [
            (number, self.modes.first_of(number))
            for number in range(1, len(self.modes.holdings))
            # A holding with more spot machines than any zone has can be held nowhere.
            if self.modes.holdings[number][0] <= available.max()
        ]
        zones, levels = self.modes.job.num_zones, self.modes.levels
        leaving = np.array(
            [self.modes.job.leaving_dollars(zone) for zone in range(zones)], np.float32
        )[:, None, None]  # fmt: skip
        for number, after in holdings:
            # [zones, states, units] after a launch in each zone.
            first = later[:zones, after]
            held = dollars[number], available >= self.modes.holdings[number][0]
            offers = self._held(*held, first, ahead[0], span, number, -1)
            # [places, states, units] dollars of launching this holding, by the zone of the last
            # launch: a move costs what leaving does.
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
                # Before ``best`` is lowered: of equal ways the first in the order of holdings
                # stays.
                np.copyto(decided[1], codes, where=paid < best)
            np.minimum(paid, best, out=best)
        # Whoever holds something may give it up and do what one who holds nothing does.
        values: Values = np.repeat(best[:, None], self.modes.num_modes, axis=1)
        for number, after in holdings:
            held = dollars[number], available >= self.modes.holdings[number][0]
            for level in range(len(levels)):
                # A tick held brings the restart one level on; at the last level nothing of it is
                # left.
                then = later[:zones, after + min(level + 1, len(levels) - 1)]
                goes_on = self._held(*held, then, ahead[0], span, number, level)
                if decided is not None:
                    # At a tie it stays: a launch that gains nothing would lose a restart if the
                    # chain is wrong.
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
        # Zones of equal speed share an array.
        dollars = done[works[0]]
        if len(done) > 1:
            dollars = np.stack([done[work][zone] for zone, work in enumerate(works)])
        dollars = dollars + tick_dollars[..., None]
        if self.modes.holdings[holding][0]:
            # Fewer are there: what is left is another holding, which begins with a restart.
            dollars[~is_there] = np.inf  # some are lost
        return dollars

    def _with_done(self, later: Values, first: int, span: Span, work_seconds: float) -> Values:
        """Values by work left before so much of it is done."""
        units = work_seconds / self.unit_seconds
        # A bound rounds work up (the job ends sooner than it can); else the value lies between two
        # points of the grid.
        whole = units_up(units) if self.is_bound else int(units)
        found = _with_units_done(later, first, span, whole)
        if self.is_bound or units <= whole:
            return found
        part = np.float32(units - whole)
        return (1 - part) * found + part * _with_units_done(later, first, span, whole + 1)


def _with_units_done(values: Values, first: int, span: Span, units: int) -> Values:
    """Values by work left [..., from ``first`` on], once so many units of a span's are done."""
    # So many entries of the span are done with this tick: they cost nothing any more.
    ended = min(max(units + first - span[0], 0), span[1] - span[0] + 1)
    kept = values[..., span[0] + ended - units - first : span[1] + 1 - units - first]
    if not ended:
        return kept
    return np.concatenate((np.zeros((*kept.shape[:-1], ended), np.float32), kept), axis=-1)


LATE_DOLLARS = 1e9
"""What is late costs in the program: more than any job, less than what float32 cannot hold."""
MOST_BYTES = 100_000_000
"""What a table may take."""
_MOST_UNITS, _MOST_UNITS_A_TICK = 1500, 20
_UNITS_OF_SEVERAL = 200
_KEPT = 4  # tables, of MOST_BYTES at most
_STEP = log(1.02)
_LATE = 4.0  # times the dollars of all machines on demand, for work left at the deadline


@dataclass(frozen=True, slots=True)
class DynamicProgram:
    """Decisions for one job.

    Attributes:
        modes: What is held, in ticks as long as a decision.
        unit_seconds: Work of a step of the grid.
        spans: [ticks + 1] units of work that can be left.
        stays: [ticks][zones, modes, states, units of the span] whether to keep what is held, as
            bits of the last axis.
        launches: [ticks][places, states, units of the span] what to do else: 0 nothing, else the
            place in ``modes.launches`` and one.
        expected_dollars: [states] from the start, by the chain's state in the first tick.
    """

    modes: Modes
    chain: Chain
    ticks_a_decision: int
    unit_seconds: float
    spans: list[Span]
    stays: list[NDArray[np.uint8]]
    launches: list[NDArray[np.integer]]
    expected_dollars: tuple[float, ...]

    def __call__(self, job: RentJob, now: Moment) -> Held:
        """Look the decision up, at a near point of the grid."""
        return guarded(job, now, self._wanted(job, now))

    def _wanted(self, job: RentJob, now: Moment) -> Held:
        last = self.modes.num_places - 1
        place = last if now.zone is None else min(now.zone, last)
        ticks = self.ticks_a_decision
        tick = min(now.tick // ticks, len(self.stays) - 1)
        lengths = [(length - 1) // ticks + 1 for length in now.run_lengths]
        state = self.chain.state_of(now.available, lengths)
        units = now.work_left_seconds / self.unit_seconds
        # With one machine, rounding up keeps to what ends in time.
        unit = ceil(units - 1e-6) if job.num_machines == 1 else round(units)
        first, most = self.spans[tick]
        unit = min(max(unit, first, 1), most) - first
        # A machine lost in this tick leaves its whole restart to come; keeping it is no choice.
        just_lost = now.pending_seconds >= job.restart_seconds > 0
        if now.held.num_machines and not just_lost:
            mode = self.modes.mode_of(now.held, now.pending_seconds)
            # ``packbits`` puts the first of eight at the highest bit.
            if self.stays[tick][now.held.zone, mode, state, unit // 8] >> (7 - unit % 8) & 1:
                return now.held
        code = int(self.launches[tick][place, state, unit])
        return self.modes.launches[code - 1] if code else Held(0, 0, now.place)

    def expected(self, available: tuple[int, ...]) -> float:
        """Expected dollars of a job that starts as spot machines come or go."""
        return self.expected_dollars[self.chain.state_of(available, (1,) * len(available))]


class Programs:
    """The program of a job at the prices of now, as if these stayed.

    Where prices move, those within two hundredths share a program; the latest few are kept.
    """

    def __init__(self, job: RentJob, chain: Chain) -> None:
        self._job, self._chain = job, chain
        self._made = {job.spot_dollars_per_hour: solve(job, chain)}

    def __call__(self, job: RentJob, now: Moment) -> Held:
        """Look the decision up."""
        return self.of(now.spot_dollars_per_hour)(job, now)

    def of(self, spot_dollars_per_hour: Prices) -> DynamicProgram:
        """The program at some prices [zones]."""
        prices = tuple(spot_dollars_per_hour)
        if prices not in self._made:
            prices = tuple(map(_rounded, prices))
        # Taken out and put back last: the first in the dictionary is the one not asked for
        # longest.
        program = self._made.pop(prices, None) or solve(self._job.at(prices), self._chain)
        self._made[prices] = program
        if len(self._made) > _KEPT:
            self._made.pop(next(iter(self._made)))
        return program


def _rounded(dollars: float) -> float:
    return exp(_STEP * round(log(dollars) / _STEP)) if dollars > 0 else 0.0


def ticks_a_decision(job: RentJob) -> int:
    """The fewest ticks to a decision with which the table has room."""
    ticks, states = 1, num_states(job.num_zones, job.num_machines)
    # The longer a tick, the fewer units and modes: the first length that has room decides most
    # often.
    while ticks < job.num_ticks:
        modes, unit = Modes(job.in_longer_ticks(ticks)), _unit(job.in_longer_ticks(ticks))
        spans = np.array(_spans(modes, unit)[:-1])
        width = spans[:, 1] - spans[:, 0] + 1
        stays = job.num_zones * modes.num_modes * (width // 8 + 1)
        launches = modes.num_places * width * _kind_of(modes)().itemsize
        if states * int((stays + launches).sum()) <= MOST_BYTES:
            break
        ticks += 1
    return ticks


def _spans(modes: Modes, unit: float) -> list[Span]:
    job = modes.job
    num_units, must_end = ceil(job.work_seconds / unit - 1e-6), job.num_machines == 1
    return spans_of(job.num_ticks, num_units, modes.most_worked / unit, must_end=must_end)


def _kind_of(modes: Modes) -> type[np.integer]:
    """Of the numbers of launches."""
    return np.uint8 if len(modes.launches) < 256 else np.int16


def solve(job: RentJob, chain: Chain, *, unit_seconds: float | None = None) -> DynamicProgram:
    """Decide for every tick and state what to hold.

    Args:
        job: The job.
        chain: How spot machines come and go in its zones, in ticks as long as a decision
            (``ticks_a_decision``).
        unit_seconds: Work of a unit. None: with one machine, as many to a tick as make at most
            1,500, and if possible so many that a restart is a whole number of them; else the 200th
            part of the work.
    """
    ticks = ticks_a_decision(job)
    job = job.in_longer_ticks(ticks)
    modes, unit = Modes(job), unit_seconds or _unit(job)
    spans, states = _spans(modes, unit), len(chain.transitions)
    back = TickBack(modes, unit, late_dollars=LATE_DOLLARS, is_bound=False)
    shape = modes.num_places, modes.num_modes, states, _width(spans[-1])
    values: Values = np.empty(shape, np.float32)
    values[:] = late_dollars(job, unit * np.arange(spans[-1][0], spans[-1][1] + 1.0))
    dollars = back.dollars()
    moves, kind = chain.transitions.astype(np.float32), _kind_of(modes)
    stays, launches = [], []
    for tick in range(job.num_ticks - 1, -1, -1):
        size = states, _width(spans[tick])
        keeps = np.zeros((job.num_zones, modes.num_modes, *size), np.bool_)
        launch = np.zeros((modes.num_places, *size), kind)
        # [places, modes, states, units] by the state of this tick: the chance of each next state
        # times its value.
        expected = moves @ values
        values = back.values(
            dollars, chain.available, expected, spans[tick + 1], spans[tick], (keeps, launch)
        )
        # Infinite values would make NaN where a chance of 0 meets them.
        np.minimum(values, np.float32(LATE_DOLLARS), out=values)
        stays.append(np.packbits(keeps, axis=-1))
        launches.append(launch)
    return DynamicProgram(
        modes=modes,
        chain=chain,
        ticks_a_decision=ticks,
        unit_seconds=unit,
        spans=spans,
        stays=stays[::-1],
        launches=launches[::-1],
        # No zone yet, nothing held, all work left.
        expected_dollars=tuple(map(float, values[-1, 0, :, -1])),
    )


def _width(span: Span) -> int:
    return span[1] - span[0] + 1


def late_dollars(job: RentJob, work_seconds: NDArray[Any]) -> NDArray[np.float64]:
    """What so much work costs in the program if it is left at the deadline."""
    if job.num_machines == 1:
        return np.where(work_seconds > 0, LATE_DOLLARS, 0.0)
    everything = job.last_resort(0)
    # Work left at the deadline must cost more than doing it in time, or the program would plan to
    # be late.
    dollars = job.tick_dollars(everything) / job.worked(everything, 0.0)
    return np.asarray(_LATE * dollars * work_seconds)


def _unit(job: RentJob) -> float:
    """Seconds of work in a unit."""
    if job.num_machines > 1:
        return job.work_seconds / _UNITS_OF_SEVERAL
    ticks = job.work_seconds / job.tick_seconds
    most = min(_MOST_UNITS_A_TICK, max(1, int(_MOST_UNITS / ticks)))
    # The most units to a tick with which a restart is whole: its end then needs no interpolation.
    for number in range(most, 0, -1):
        units = job.restart_seconds / job.tick_seconds * number
        if abs(units - round(units)) < 1e-9:
            return job.tick_seconds / number
    return job.tick_seconds / most


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
    """The least dollars on each window, known in advance; prices move in all or in none.

    A dynamic program over ticks, the zone of the last launch, what is held, and the work left in
    whole units. It is exact where seconds of work are whole and few (``unit_seconds``). Else work
    is rounded down and progress up, so that the answer is at most the optimum. So it bounds the
    cost of every policy from below. O(ticks x zones^2 x modes x units) a window; windows go back
    through time together, each a state from which no other one is reached.

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
    # Windows share the axis of states, as many at a time as the cells allow.
    together = max(1, _MOST_CELLS // (modes.num_places * modes.num_modes * widest))
    found: list[float] = []
    for begin in range(0, len(windows), together):
        some = windows[begin : begin + together]
        there = np.array([[zone[:num_ticks] for zone in one.available] for one in some])
        told = [one.spot_dollars_per_hour for one in some]
        prices = np.array([[zone[:num_ticks] for zone in one] for one in told if one is not None])
        shape = (modes.num_places, modes.num_modes, len(some), spans[-1][1] - spans[-1][0] + 1)
        values: Values = np.full(shape, np.inf, np.float32)
        # No work left costs nothing; all else at the deadline is late.
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
