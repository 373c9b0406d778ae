"""What an elastic job costs at least with the whole trace known in advance, and a plan near that.

For any value v >= 0 of a second of work, every way to hold machines that does the work costs

    dollars >= v * work + min over all ways to hold machines of (dollars - v * work done),

because a way that does the work has work done >= work (Lagrangian duality). The minimum on the
right is a dynamic program over ticks and what is held, without the work left as a state. It is
concave in v; the greatest is found by bisection on whether the minimising way does enough work.
At the end of the bisection, a way that does enough is a plan that an actual job can follow, so
the optimum is between the two. O(bisections x ticks x fleets).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....schema.errors import ProblemError
from .job import Fleet, FleetJob

_BISECTIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """No way costs less than ``bound_dollars``; ``holds`` [ticks] does the work in time."""

    bound_dollars: float
    holds: tuple[Fleet, ...]


def fleets_of(num_machines: int) -> tuple[Fleet, ...]:
    """Everything that can be held, nothing first."""
    return tuple(
        Fleet(spot, on_demand)
        for spot in range(num_machines + 1)
        for on_demand in range(num_machines + 1 - spot)
    )


def solve(job: FleetJob, available: Sequence[int]) -> Offline:
    """Bound the dollars of every policy on a trace.

    Args:
        job: The job.
        available: [ticks] spot machines that can be had; at least to the deadline.

    Raises:
        ProblemError: The trace is shorter than the deadline.
    """
    if len(available) < job.num_ticks:
        raise ProblemError(
            f"the trace has {len(available)} ticks, the deadline is after {job.num_ticks}"
        )
    relaxed = Relaxed(job, available[: job.num_ticks])
    low, high = 0.0, _sure_value(job)
    found, holds = relaxed.least(high)
    bound = max(0.0, found + high * job.work_seconds)
    while relaxed.work_of(holds) < job.work_seconds * (1 - 1e-12):
        high *= 2
        found, holds = relaxed.least(high)
        bound = max(bound, found + high * job.work_seconds)
    for _ in range(_BISECTIONS):
        value = (low + high) / 2
        found, way = relaxed.least(value)
        bound = max(bound, found + value * job.work_seconds)
        if relaxed.work_of(way) >= job.work_seconds * (1 - 1e-12):
            high, holds = value, way
        else:
            low = value
    return Offline(bound_dollars=bound, holds=tuple(holds))


def _sure_value(job: FleetJob) -> float:
    """Dollars for a second of work, more than any machine costs at full speed."""
    each = [
        job.tick_dollars(Fleet(0, number)) / (speed * job.tick_seconds)
        for number, speed in enumerate(job.speeds)
        if speed > 0
    ]
    return 2 * max(each) + 1e-12


class Relaxed:
    """All ways to hold machines on a trace, with or without doing the work."""

    def __init__(self, job: FleetJob, available: Sequence[int]) -> None:
        self._job = job
        self._available = np.minimum(np.asarray(available), job.num_machines)
        self._fleets = fleets_of(job.num_machines)
        self._spot = np.array([fleet.num_spot for fleet in self._fleets])
        self._dollars = np.array([job.tick_dollars(fleet) for fleet in self._fleets])
        self._levels = job.pending_levels()
        self._staying = np.array(
            [[job.worked(fleet, level) for level in self._levels] for fleet in self._fleets]
        )
        self._changing = np.array([job.worked(fleet, job.resize_seconds) for fleet in self._fleets])

    def least(self, value: float) -> tuple[float, list[Fleet]]:
        """The least of (dollars - value * work done), and a way that has it.

        The state at the start of a tick is the fleet held in the last one and the level of its
        pause. A fleet whose spot machines were lost in part is one that has just changed.
        """
        last = len(self._levels) - 1
        after = np.minimum(np.arange(last + 1) + 1, last)
        stays = self._dollars[:, None] - value * self._staying
        changes = self._dollars - value * self._changing
        changes[0] = 0.0
        future = np.zeros_like(stays)  # [fleets, levels]
        choices: list[tuple[NDArray[np.bool_], int]] = []
        for there in self._available[::-1]:
            can = self._spot <= there
            launched = np.where(can, changes + future[:, 0], np.inf)
            best = int(np.argmin(launched))
            held = np.where(can[:, None], stays + future[:, after], np.inf)
            keeps = held <= launched[best]
            future = np.where(keeps, held, launched[best])
            choices.append((keeps, best))
        way, fleet, level = [], 0, last
        for keeps, best in reversed(choices):
            if keeps[fleet, level]:
                level = int(after[level])
            else:
                fleet, level = best, 0
            way.append(self._fleets[fleet])
        return float(future[0, last]), way

    def work_of(self, holds: Sequence[Fleet]) -> float:
        """The work that a way does; it may be more than there is."""
        total, held, pending = 0.0, Fleet(0, 0), 0.0
        for there, fleet in zip(self._available, holds, strict=True):
            if held.num_spot > there or fleet != held:
                pending = self._job.resize_seconds
            total += self._job.worked(fleet, pending)
            pending = max(pending - self._job.tick_seconds, 0.0)
            held = fleet
        return total
