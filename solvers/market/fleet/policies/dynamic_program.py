"""The least expected dollars, by dynamic programming over a chain of counts learned from history.

States are the tick, the number of spot machines there, what is held with its pause, and the work
left, on a grid of ``num_units`` steps between which values are interpolated. Work left at the
deadline costs several times what it costs on demand; ``guarded`` takes care that none is left,
however wrong the chain is. O(ticks x counts x fleets x units) once, then a look-up a tick.
Where the table would take more than ``MOST_BYTES``, several ticks share a decision.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...grid import Values, done_between
from ..chain import Transitions
from ..job import Fleet, FleetJob, FleetMoment, guarded
from ..offline import fleets_of

MOST_BYTES = 100_000_000
"""What a table may take."""
NUM_UNITS = 200
_LATE = 4.0  # times the dollars of all machines on demand, for work left at the deadline


@dataclass(frozen=True, slots=True)
class DynamicProgram:
    """Decisions for one job.

    Attributes:
        fleets: [fleets] what can be held.
        levels: Seconds of a pause still to come, as in the table.
        ticks_a_decision: Ticks that share one.
        unit_seconds: Work of a step of the grid.
        stays: [ticks, fleets, levels, counts, units + 1] whether to keep what is held, as bits of
            the last axis.
        changes: [ticks, counts, units + 1] which fleet to change to.
        expected_dollars: [counts] from the start, by the number of spot machines in the first tick.
    """

    fleets: tuple[Fleet, ...]
    levels: tuple[float, ...]
    ticks_a_decision: int
    unit_seconds: float
    stays: NDArray[np.uint8]
    changes: NDArray[np.int16]
    expected_dollars: tuple[float, ...]

    def choose(self, job: FleetJob, now: FleetMoment) -> Fleet:
        """Look the decision up, at the nearest point of the grid."""
        there = min(now.num_available, job.num_machines)
        unit = round(now.work_left_seconds / self.unit_seconds)
        unit = min(max(unit, 1), self.changes.shape[-1] - 1)
        fleet = self.fleets.index(now.held)
        gaps = [abs(level - now.pending_seconds) for level in self.levels]
        level = gaps.index(min(gaps))
        is_fresh = now.pending_seconds >= job.resize_seconds > 0 and now.held.num_machines > 0
        tick = min(now.tick // self.ticks_a_decision, len(self.stays) - 1)
        keeps = self.stays[tick, fleet, level, there, unit // 8] >> (7 - unit % 8) & 1
        if keeps and not is_fresh:
            wanted = now.held
        else:
            wanted = self.fleets[self.changes[tick, there, unit]]
        return guarded(job, now, wanted)


def ticks_a_decision(job: FleetJob, num_units: int = NUM_UNITS) -> int:
    """The fewest ticks to a decision with which the table has room."""
    num_fleets, ticks = len(fleets_of(job.num_machines)), 1
    while ticks < job.num_ticks:
        longer = job.in_longer_ticks(ticks)
        stays = num_fleets * len(longer.pending_levels()) * (num_units // 8 + 1)
        changes = 2 * (num_units + 1)
        if longer.num_ticks * (job.num_machines + 1) * (stays + changes) <= MOST_BYTES:
            break
        ticks += 1
    return ticks


def solve(job: FleetJob, chain: Transitions, *, num_units: int = NUM_UNITS) -> DynamicProgram:
    """Decide for every tick and state what to hold.

    Args:
        job: The job.
        chain: Learned in ticks as long as a decision (``ticks_a_decision``).
        num_units: Steps of the grid of the work left.
    """
    ticks = ticks_a_decision(job, num_units)
    job = job.in_longer_ticks(ticks)
    fleets = fleets_of(job.num_machines)
    levels = job.pending_levels()
    unit = job.work_seconds / num_units
    late = (late_dollars(job, unit) * np.arange(num_units + 1)).astype(np.float32)
    shape = (len(fleets), len(levels), job.num_machines + 1, num_units + 1)
    values: Values = np.broadcast_to(late, shape)
    moves = chain.astype(np.float32)
    stays = np.empty((job.num_ticks, *shape[:3], num_units // 8 + 1), np.uint8)
    changes = np.empty((job.num_ticks, *shape[2:]), np.int16)
    for tick in range(job.num_ticks - 1, -1, -1):
        expected = moves @ values
        values, keeps, changes[tick] = _before(job, fleets, levels, unit, expected)
        stays[tick] = np.packbits(keeps, axis=-1)
    return DynamicProgram(
        fleets=fleets,
        levels=levels,
        ticks_a_decision=ticks,
        unit_seconds=unit,
        stays=stays,
        changes=changes,
        expected_dollars=tuple(map(float, values[0, -1, :, num_units])),
    )


def late_dollars(job: FleetJob, work_seconds: float) -> float:
    """What so much work costs in the program if it is left at the deadline."""
    everything = Fleet(0, job.num_machines)
    return _LATE * work_seconds * job.tick_dollars(everything) / job.worked(everything, 0.0)


def _before(
    job: FleetJob,
    fleets: tuple[Fleet, ...],
    levels: tuple[float, ...],
    unit: float,
    expected: Values,
) -> tuple[Values, NDArray[np.bool_], NDArray[np.int16]]:
    """Values of a tick from the expected ones of the next, whether to stay, and what to change to.

    ``expected`` and values are [fleets, levels, counts, units + 1].
    """
    num_counts, width = expected.shape[2:]
    least = np.full((num_counts, width), np.inf, np.float32)
    change = np.zeros((num_counts, width), np.int16)
    for index, fleet in enumerate(fleets):
        worked = job.worked(fleet, job.resize_seconds)
        after = len(levels) - 1 if index == 0 else 0  # nothing held has no pause
        offer = done_between(expected[index, after], worked / unit)
        offer = offer + np.float32(job.tick_dollars(fleet))
        better = offer < least
        better[: fleet.num_spot] = False
        least[better] = offer[better]
        change[better] = index
    values = np.empty_like(expected)
    keeps = np.zeros(expected.shape, np.bool_)
    for index, fleet in enumerate(fleets):
        cost = np.float32(job.tick_dollars(fleet))
        for level, pending in enumerate(levels):
            after = min(level + 1, len(levels) - 1)
            held = cost + done_between(expected[index, after], job.worked(fleet, pending) / unit)
            held[: fleet.num_spot] = np.inf  # some are lost
            keeps[index, level] = held <= least
            np.minimum(held, least, out=values[index, level])
    values[..., 0] = 0.0
    return values, keeps, change
