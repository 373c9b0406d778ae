"""The least expected dollars, by dynamic programming over a chain learned from history.

States are the tick, the chain's state of all zones, the zone of the last launch, what is held with
its restart, and the work left in units. A tick of work is a whole number of units; values in
between, which only a restart leads to, are interpolated. What cannot end in time whatever the
market does costs so much that it is never chosen while anything else is left; ``guarded`` takes
care of what the units round. So no deadline is missed, however wrong the chain is.
O(ticks x states x (states + zones) x zones x modes x units) once, then a look-up a tick. Where the
table would take more than ``MOST_BYTES``, several ticks share a decision.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from .chain import Chain, num_states
from .deadline import DeadlineJob, Held, Hold, Moment, guarded
from .grid import Grid, Values, done_between, grid_of

LATE_DOLLARS = 1e9
"""What is late costs in the program: more than any job, less than what float32 cannot hold."""
MOST_BYTES = 100_000_000
"""What a table may take."""
_MOST_UNITS, _MOST_UNITS_A_TICK = 1500, 20
_NOTHING = 0


@dataclass(frozen=True, slots=True)
class DynamicProgram:
    """Decisions for one job.

    Attributes:
        grid: For the modes of what is held.
        chain: The chain that it was made for.
        ticks_a_decision: Ticks that share one.
        unit_seconds: Work of a step of the grid.
        stays: [ticks, states, zones, modes, units + 1] whether to keep what is held, as bits of the
            last axis.
        launches: [ticks, states, zones + 1, units + 1] what to do else: 0 nothing, 1 + zone a spot
            machine, 1 + zones + zone one on demand. The last place is before the first launch.
        expected_dollars: [states] from the start, by the chain's state in the first tick.
    """

    grid: Grid
    chain: Chain
    ticks_a_decision: int
    unit_seconds: float
    stays: NDArray[np.uint8]
    launches: NDArray[np.int8]
    expected_dollars: tuple[float, ...]

    def choose(self, job: DeadlineJob, now: Moment) -> Held:
        """Look the decision up, with the work rounded up."""
        return guarded(job, now, self._wanted(job, now))

    def _wanted(self, job: DeadlineJob, now: Moment) -> Held:
        place = job.num_zones if now.zone is None else now.zone
        ticks = self.ticks_a_decision
        tick = min(now.tick // ticks, len(self.stays) - 1)
        lengths = [(length - 1) // ticks + 1 for length in now.run_lengths]
        state = self.chain.state_of(now.has_spot, lengths)
        unit = ceil(now.work_left_seconds / self.unit_seconds - 1e-6)
        unit = min(max(unit, 1), self.launches.shape[-1] - 1)
        if now.hold is not Hold.NOTHING:
            mode = self.grid.mode_of(now.hold, now.pending_seconds)
            if self.stays[tick, state, place, mode, unit // 8] >> (7 - unit % 8) & 1:
                return Held(now.hold, place)
        code = int(self.launches[tick, state, place, unit])
        if code == _NOTHING:
            return Held(Hold.NOTHING, now.zone or 0)
        hold = Hold.SPOT if code <= job.num_zones else Hold.ON_DEMAND
        return Held(hold, (code - 1) % job.num_zones)

    def expected(self, has_spot: tuple[bool, ...]) -> float:
        """Expected dollars of a job that starts as spot machines come or go."""
        return self.expected_dollars[self.chain.state_of(has_spot, (1,) * len(has_spot))]


def ticks_a_decision(job: DeadlineJob) -> int:
    """The fewest ticks to a decision with which the table has room."""
    zones, ticks = job.num_zones, 1
    while ticks < job.num_ticks:
        longer = job.in_longer_ticks(ticks)
        units = ceil(longer.work_seconds / longer.tick_seconds * _units_a_tick(longer))
        modes = 2 * len(longer.pending_levels()) + 1
        each = zones * modes * (units // 8 + 1) + (zones + 1) * (units + 1)
        if longer.num_ticks * num_states(zones) * each <= MOST_BYTES:
            break
        ticks += 1
    return ticks


def solve(job: DeadlineJob, chain: Chain, *, units_a_tick: int | None = None) -> DynamicProgram:
    """Decide for every tick and state what to hold.

    Args:
        job: The job.
        chain: How spot machines come and go in its zones, in ticks as long as a decision
            (``ticks_a_decision``).
        units_a_tick: Units of the work of a tick; None: as many as make at most 1,500 units, and
            if possible so many that a restart is a whole number of them.
    """
    ticks = ticks_a_decision(job)
    job = job.in_longer_ticks(ticks)
    unit = job.tick_seconds / (units_a_tick or _units_a_tick(job))
    grid, num_units = grid_of(job), ceil(job.work_seconds / unit - 1e-6)
    states = len(chain.transitions)
    shape = (states, job.num_zones + 1, grid.num_modes, num_units + 1)
    values: Values = np.full(shape, LATE_DOLLARS, np.float32)
    values[..., 0] = 0.0
    moves = chain.transitions.astype(np.float32)
    num_ticks = job.num_ticks
    stays = np.empty(
        (num_ticks, states, job.num_zones, grid.num_modes, num_units // 8 + 1), np.uint8
    )
    launches = np.empty((num_ticks, states, job.num_zones + 1, num_units + 1), np.int8)
    for tick in range(num_ticks - 1, -1, -1):
        expected = (moves @ values.reshape(states, -1)).reshape(shape)
        values, keeps, launches[tick] = _before(job, grid, chain.has_spot, unit, expected)
        stays[tick] = np.packbits(keeps, axis=-1)
    return DynamicProgram(
        grid=grid,
        chain=chain,
        ticks_a_decision=ticks,
        unit_seconds=unit,
        stays=stays,
        launches=launches,
        expected_dollars=tuple(map(float, values[:, -1, 0, num_units])),
    )


def _units_a_tick(job: DeadlineJob) -> int:
    ticks = job.work_seconds / job.tick_seconds
    most = min(_MOST_UNITS_A_TICK, max(1, int(_MOST_UNITS / ticks)))
    for number in range(most, 0, -1):
        units = job.restart_seconds / job.tick_seconds * number
        if abs(units - round(units)) < 1e-9:
            return number
    return most


def _before(
    job: DeadlineJob, grid: Grid, has_spot: NDArray[np.bool_], unit: float, expected: Values
) -> tuple[Values, NDArray[np.bool_], NDArray[np.int8]]:
    """Values of a tick from the expected ones of the next, whether to stay, and what to do else.

    ``expected`` and values are [states, zones + 1, modes, units + 1].
    """
    values = np.empty_like(expected)
    keeps = np.zeros((*expected.shape[:1], job.num_zones, *expected.shape[2:]), np.bool_)
    launch = np.zeros((*expected.shape[:2], expected.shape[3]), np.int8)
    offers = [
        (1 + place + (0 if hold is Hold.SPOT else job.num_zones), place,
         _launched(job, grid, has_spot, unit, expected, hold, place))
        for hold in (Hold.SPOT, Hold.ON_DEMAND)
        for place in range(job.num_zones)
    ]  # fmt: skip
    for place in range(job.num_zones + 1):
        before = place if place < job.num_zones else None
        best = expected[:, place, 0].copy()
        for code, zone, offer in offers:
            paid = offer + np.float32(job.moving_dollars(before, zone))
            better = paid < best
            best[better] = paid[better]
            launch[:, place][better] = code
        values[:, place] = best[:, None]
    for zone in range(job.num_zones):
        for mode in range(1, grid.num_modes):
            hold = Hold.SPOT if mode < grid.first_of(Hold.ON_DEMAND) else Hold.ON_DEMAND
            pending = grid.levels[grid.level_of(mode)]
            worked = max(job.tick_seconds - pending, 0.0) / unit
            goes_on = done_between(expected[:, zone, grid.after(mode)], worked)
            goes_on += np.float32(job.tick_dollars(Held(hold, zone)))
            if hold is Hold.SPOT:
                goes_on[~has_spot[zone]] = np.inf  # it is lost
            keeps[:, zone, mode] = goes_on <= values[:, zone, mode]
            np.minimum(goes_on, values[:, zone, mode], out=values[:, zone, mode])
    np.minimum(values, np.float32(LATE_DOLLARS), out=values)
    values[..., 0] = 0.0
    return values, keeps, launch


def _launched(
    job: DeadlineJob,
    grid: Grid,
    has_spot: NDArray[np.bool_],
    unit: float,
    expected: Values,
    hold: Hold,
    zone: int,
) -> Values:
    """Dollars [states, units + 1] of a launch in a zone, without those of moving there."""
    worked = max(job.tick_seconds - job.restart_seconds, 0.0) / unit
    offer = done_between(expected[:, zone, grid.first_of(hold)], worked)
    offer += np.float32(job.tick_dollars(Held(hold, zone)))
    if hold is Hold.SPOT:
        offer[~has_spot[zone]] = np.inf
    return offer
