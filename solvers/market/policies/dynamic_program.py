"""The least expected dollars, by dynamic programming over a chain learned from history.

States are the tick, what is held, the work left, and the chain's state. Work left at the deadline
costs infinitely much, and a machine may always be lost by the chain, so what could be late is never
chosen while anything else is left; where the grid's rounding leaves nothing else, the job is on
demand. So no deadline is missed, however wrong the chain is. Optimal for the chain and the grid;
O(ticks x states x modes x units) once, then one look-up a tick.

Where the table would hold more than ``MOST_DECISIONS``, several ticks share a decision: the program
is that of longer ticks, and the policies' safety net keeps what it rounds from being late.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..chain import RUN_CLASSES, Chain, state_of
from ..deadline import DeadlineJob, Hold, Moment, must_be_on_demand, safest
from ..grid import Grid, Values, done, grid_of

MOST_DECISIONS = 300_000_000
"""Decisions, of a byte each, that a table may hold."""


@dataclass(frozen=True, slots=True)
class DynamicProgram:
    """Decisions [ticks, states, modes, units + 1] for one job.

    ``expected_dollars``: [states] from the start, by the chain's state in the first tick; infinite
    where the grid's rounding has no way to end in time. ``ticks_a_decision`` ticks share one.
    """

    grid: Grid
    decisions: NDArray[np.int8]
    expected_dollars: tuple[float, ...]
    ticks_a_decision: int = 1

    def choose(self, job: DeadlineJob, now: Moment) -> Hold:
        """Look the decision up."""
        ticks = self.ticks_a_decision
        if ticks > 1 and must_be_on_demand(job, now):
            return safest(now)
        state = state_of(now.has_spot, (now.run_length - 1) // ticks + 1)
        mode = self.grid.mode_of(now.held, now.pending_seconds)
        units = self.grid.units_of(now.work_left_seconds)
        tick = min(now.tick // ticks, len(self.decisions) - 1)
        return Hold(int(self.decisions[tick, state, mode, units]))

    def expected(self, has_spot: bool) -> float:
        """Expected dollars of a job that starts as spot machines come or go."""
        return self.expected_dollars[state_of(has_spot, 1)]


def ticks_a_decision(job: DeadlineJob) -> int:
    """The fewest ticks to a decision with which the table has room."""
    ticks = 1
    while ticks < job.num_ticks:
        longer = job.in_longer_ticks(ticks)
        grid = grid_of(longer)
        states = 2 * len(RUN_CLASSES) * grid.num_modes * (grid.num_units + 1)
        if longer.num_ticks * states <= MOST_DECISIONS:
            break
        ticks += 1
    return ticks


def solve(job: DeadlineJob, chain: Chain) -> DynamicProgram:
    """Decide for every tick and state what to hold.

    Args:
        job: The job.
        chain: Learned in ticks as long as a decision (``ticks_a_decision``).
    """
    ticks = ticks_a_decision(job)
    job = job.in_longer_ticks(ticks)
    grid = grid_of(job)
    shape = (chain.num_states, grid.num_modes, grid.num_units + 1)
    values: Values = np.full(shape, np.inf, np.float32)
    values[..., 0] = 0.0
    decisions = np.zeros((job.num_ticks, *shape), np.int8)
    moves = chain.transitions.astype(np.float32)
    for tick in range(job.num_ticks - 1, -1, -1):
        expected = _expected(moves, values)
        values = _before(job, grid, chain, expected, decisions[tick])
    expected_dollars = tuple(map(float, values[:, 0, grid.num_units]))
    return DynamicProgram(grid, decisions, expected_dollars, ticks)


def _expected(moves: Values, values: Values) -> Values:
    """The mean of the next tick's values; a state has few successors, so not as a product."""
    expected = np.zeros_like(values)
    for state, later in zip(*np.nonzero(moves), strict=True):
        expected[state] += moves[state, later] * values[later]
    return expected


def _before(
    job: DeadlineJob, grid: Grid, chain: Chain, expected: Values, decisions: NDArray[np.int8]
) -> Values:
    """Least expected dollars from a tick on [states, modes, units + 1]; fills the decisions."""
    least = np.empty_like(expected)
    launches = {
        hold: np.float32(job.tick_dollars(hold))
        + done(expected[:, grid.first_of(hold)], grid.launched_units)
        for hold in (Hold.SPOT, Hold.ON_DEMAND)
    }
    for mode in range(grid.num_modes):
        held = Hold.NOTHING if mode == 0 else Hold(1 + (mode - 1) // len(grid.levels))
        offers = dict(launches)
        if held is not Hold.NOTHING:
            offers[held] = np.float32(job.tick_dollars(held)) + done(
                expected[:, grid.after(mode)], grid.progress_units[grid.level_of(mode)]
            )
        best = expected[:, 0].copy()
        choice = np.zeros(best.shape, np.int8)
        for hold, offer in offers.items():
            better = offer < best
            if hold is Hold.SPOT:
                better[chain.num_there :] = False
            best[better] = offer[better]
            choice[better] = hold
        choice[np.isinf(best)] = Hold.ON_DEMAND
        least[:, mode], decisions[:, mode] = best, choice
    least[..., 0] = 0.0
    return least
