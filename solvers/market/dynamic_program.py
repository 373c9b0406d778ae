"""The least expected dollars, by dynamic programming over a chain learned from history.

A state is the tick, the chain's state of all zones, the zone of the last launch, what is held with
its restart, and the work left. Work is on a grid of units, between which values are interpolated.
With one machine a tick of work is a whole number of units. What cannot end in time whatever the
market does costs so much that it is never chosen while anything else is left. Several machines do
unlike parts of the work in a tick: then work left at the deadline costs several times what it costs
on demand. ``guarded`` takes care of what the units round. So no deadline is missed, however wrong
the chain is. O(ticks x states x (states + zones) x zones x modes x units) once, then a look-up a
tick. Where the table would take more than ``MOST_BYTES``, several ticks share a decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from .chain import Chain, num_states
from .grid import Modes, Span, TickBack, Values, spans_of, unit_seconds, units_down
from .job import Held, Moment, Prices, RentJob, guarded
from .windows import Window

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
        just_lost = now.pending_seconds >= job.restart_seconds > 0
        if now.held.num_machines and not just_lost:
            mode = self.modes.mode_of(now.held, now.pending_seconds)
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
        expected = moves @ values
        values = back.values(
            dollars, chain.available, expected, spans[tick + 1], spans[tick], (keeps, launch)
        )
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
        expected_dollars=tuple(map(float, values[-1, 0, :, -1])),
    )


def _width(span: Span) -> int:
    return span[1] - span[0] + 1


def late_dollars(job: RentJob, work_seconds: NDArray[Any]) -> NDArray[np.float64]:
    """What so much work costs in the program if it is left at the deadline."""
    if job.num_machines == 1:
        return np.where(work_seconds > 0, LATE_DOLLARS, 0.0)
    everything = job.last_resort(0)
    dollars = job.tick_dollars(everything) / job.worked(everything, 0.0)
    return np.asarray(_LATE * dollars * work_seconds)


def _unit(job: RentJob) -> float:
    """Seconds of work in a unit."""
    if job.num_machines > 1:
        return job.work_seconds / _UNITS_OF_SEVERAL
    ticks = job.work_seconds / job.tick_seconds
    most = min(_MOST_UNITS_A_TICK, max(1, int(_MOST_UNITS / ticks)))
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
