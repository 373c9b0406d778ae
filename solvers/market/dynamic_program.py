"""The least expected dollars, by dynamic programming over a chain learned from history.

States are the tick, the chain's state of all zones, the zone of the last launch, what is held with
its restart, and the work left on a grid of units, between which values are interpolated. With one
machine a tick of work is a whole number of units, and what cannot end in time whatever the market
does costs so much that it is never chosen while anything else is left. Several machines do unlike
parts of the work in a tick: then work left at the deadline costs several times what it costs on
demand. ``guarded`` takes care of what the units round. So no deadline is missed, however wrong the
chain is. O(ticks x states x (states + zones) x zones x modes x units) once, then a look-up a tick.
Where the table would take more than ``MOST_BYTES``, several ticks share a decision.
"""

from dataclasses import dataclass
from math import ceil, exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .chain import Chain, num_states
from .deadline import DeadlineJob, Held, Moment, guarded
from .grid import Modes, Values, done_between

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
        chain: The chain that it was made for.
        ticks_a_decision: Ticks that share one.
        unit_seconds: Work of a step of the grid.
        stays: [ticks, zones, modes, states, units + 1] whether to keep what is held, as bits of the
            last axis.
        launches: [ticks, places, states, units + 1] what to do else: 0 nothing, else the place in
            ``modes.launches`` and one.
        expected_dollars: [states] from the start, by the chain's state in the first tick.
    """

    modes: Modes
    chain: Chain
    ticks_a_decision: int
    unit_seconds: float
    stays: NDArray[np.uint8]
    launches: NDArray[np.int16]
    expected_dollars: tuple[float, ...]

    def __call__(self, job: DeadlineJob, now: Moment) -> Held:
        """Look the decision up, at a near point of the grid."""
        return guarded(job, now, self._wanted(job, now))

    def _wanted(self, job: DeadlineJob, now: Moment) -> Held:
        last = self.modes.num_places - 1
        place = last if now.zone is None else min(now.zone, last)
        ticks = self.ticks_a_decision
        tick = min(now.tick // ticks, len(self.stays) - 1)
        lengths = [(length - 1) // ticks + 1 for length in now.run_lengths]
        state = self.chain.state_of(now.available, lengths)
        units = now.work_left_seconds / self.unit_seconds
        # With one machine, rounding up keeps to what ends in time.
        unit = ceil(units - 1e-6) if job.num_machines == 1 else round(units)
        unit = min(max(unit, 1), self.launches.shape[-1] - 1)
        just_lost = now.pending_seconds >= job.restart_seconds > 0
        if now.held.num_machines and not just_lost:
            mode = self.modes.mode_of(now.held, now.pending_seconds)
            if self.stays[tick, now.held.zone, mode, state, unit // 8] >> (7 - unit % 8) & 1:
                return now.held
        code = int(self.launches[tick, place, state, unit])
        return self.modes.launches[code - 1][1] if code else Held(0, 0, now.place)

    def expected(self, available: tuple[int, ...]) -> float:
        """Expected dollars of a job that starts as spot machines come or go."""
        return self.expected_dollars[self.chain.state_of(available, (1,) * len(available))]


class Programs:
    """The program of a job at the prices of now, as if these stayed.

    Where prices move, those within two hundredths share a program; the latest few are kept.

    Args:
        job: The job.
        chain: How spot machines come and go, as for ``solve``.
    """

    def __init__(self, job: DeadlineJob, chain: Chain) -> None:
        self._chain = chain
        self._made = {job.spot_dollars_per_hour: solve(job, chain)}

    def __call__(self, job: DeadlineJob, now: Moment) -> Held:
        """Look the decision up."""
        return self.of(job)(job, now)

    def of(self, job: DeadlineJob) -> DynamicProgram:
        """The program at the prices that a job has."""
        prices = job.spot_dollars_per_hour
        if prices not in self._made:
            prices = tuple(map(_rounded, prices))
        program = self._made.pop(prices, None) or solve(job.at(prices), self._chain)
        self._made[prices] = program
        if len(self._made) > _KEPT:
            self._made.pop(next(iter(self._made)))
        return program


def _rounded(dollars: float) -> float:
    return exp(_STEP * round(log(dollars) / _STEP)) if dollars > 0 else 0.0


def ticks_a_decision(job: DeadlineJob) -> int:
    """The fewest ticks to a decision with which the table has room."""
    ticks = 1
    while ticks < job.num_ticks:
        longer = job.in_longer_ticks(ticks)
        modes, units = Modes(longer), ceil(longer.work_seconds / _unit(longer) - 1e-6)
        stays = job.num_zones * modes.num_modes * (units // 8 + 1)
        states = num_states(job.num_zones, job.num_machines)
        each = states * (stays + 2 * modes.num_places * (units + 1))
        if longer.num_ticks * each <= MOST_BYTES:
            break
        ticks += 1
    return ticks


def solve(job: DeadlineJob, chain: Chain, *, unit_seconds: float | None = None) -> DynamicProgram:
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
    num_units, states = ceil(job.work_seconds / unit - 1e-6), len(chain.transitions)
    shape = (modes.num_places, modes.num_modes, states, num_units + 1)
    values: Values = np.empty(shape, np.float32)
    values[:] = late_dollars(job, unit * np.arange(num_units + 1.0))
    moves, num_ticks = chain.transitions.astype(np.float32), job.num_ticks
    stays = np.empty(
        (num_ticks, job.num_zones, modes.num_modes, states, num_units // 8 + 1), np.uint8
    )
    launches = np.empty((num_ticks, modes.num_places, states, num_units + 1), np.int16)
    for tick in range(num_ticks - 1, -1, -1):
        expected = moves @ values
        values, keeps, launches[tick] = _before(modes, chain.available, unit, expected)
        stays[tick] = np.packbits(keeps, axis=-1)
    return DynamicProgram(
        modes=modes,
        chain=chain,
        ticks_a_decision=ticks,
        unit_seconds=unit,
        stays=stays,
        launches=launches,
        expected_dollars=tuple(map(float, values[-1, 0, :, num_units])),
    )


def late_dollars(job: DeadlineJob, work_seconds: NDArray[Any]) -> NDArray[np.float64]:
    """What so much work costs in the program if it is left at the deadline."""
    if job.num_machines == 1:
        return np.where(work_seconds > 0, LATE_DOLLARS, 0.0)
    everything = Held(0, job.num_machines)
    dollars = job.tick_dollars(everything) / job.worked(job.num_machines, 0.0)
    return np.asarray(_LATE * dollars * work_seconds)


def _unit(job: DeadlineJob) -> float:
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


def _before(
    modes: Modes, available: NDArray[np.int64], unit: float, expected: Values
) -> tuple[Values, NDArray[np.bool_], NDArray[np.int16]]:
    """Values of a tick from the expected ones of the next, whether to stay, and what to do else.

    ``expected`` and values are [places, modes, states, units + 1].
    """
    job, best = modes.job, expected[:, 0].copy()
    launch = np.zeros(best.shape, np.int16)
    for code, (holding, held, work) in enumerate(modes.launches, start=1):
        offer = done_between(expected[held.zone, modes.first_of(holding)], work / unit)
        offer += np.float32(job.tick_dollars(held))
        offer[available[held.zone] < held.num_spot] = np.inf
        for place in range(modes.num_places):
            before = place if place < job.num_zones else None
            moving = job.moving_dollars(before, held.zone)
            paid = offer + np.float32(moving) if moving else offer
            better = paid < best[place]
            np.copyto(best[place], paid, where=better)
            np.copyto(launch[place], code, where=better)
    values: Values = np.repeat(best[:, None], modes.num_modes, axis=1)
    keeps = np.zeros((job.num_zones, *expected.shape[1:]), np.bool_)
    for mode, holding, work, after in modes.staying:
        for zone in range(job.num_zones):
            held = Held(*modes.holdings[holding], zone)
            goes_on = done_between(expected[zone, after], work / unit)
            goes_on += np.float32(job.tick_dollars(held))
            goes_on[available[zone] < held.num_spot] = np.inf  # some are lost
            np.less_equal(goes_on, best[zone], out=keeps[zone, mode])
            np.minimum(goes_on, best[zone], out=values[zone, mode])
    np.minimum(values, np.float32(LATE_DOLLARS), out=values)
    values[..., 0] = 0.0
    return values, keeps, launch
