"""The limits of a search, in seconds and by the gap, and whether a plan is within them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..schema.plan import Plan
from ..solvers.effort import DEFAULT, Effort


@dataclass(frozen=True)
class SolveLimits:
    """The limits of ``hetflow solve``: wall seconds for all searches together, and a relative gap.

    None sets no limit.
    """

    time_limit_seconds: float | None = None
    gap: float | None = None

    def is_missed(self, plan: Plan) -> bool:
        """Whether a plan is not proved within the requested gap, which ends in exit code 4."""
        # A time limit alone requests a gap of 0. Without limits no gap is requested. An optimal
        # plan always meets the request, even if its gap to the plan with the least predicted time
        # is as wide as its proof's tolerance.
        if self == SolveLimits() or plan.proof.termination == "optimal":
            return False
        gap = plan.proof.gap
        return gap is None or gap > max(self.gap or 0.0, 1e-9)


class TimeShares:
    """Shares the time limit among the searches of a command, which run one after another.

    Time counts from when the clock is made, which is before profiles are read.
    """

    def __init__(self, limits: SolveLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._now = limits, now
        self._end = now() + (limits.time_limit_seconds or 0.0)

    @property
    def seconds_left(self) -> float | None:
        """The seconds that are left; None without a time limit."""
        if self._limits.time_limit_seconds is None:
            return None
        return max(self._end - self._now(), 0.0)

    def part(self, searches_left: int) -> "TimeShares":
        """Return a clock that ends when a fair part of the time left is over."""
        left = self.seconds_left
        if left is None:
            return self
        return TimeShares(replace(self._limits, time_limit_seconds=left / searches_left), self._now)

    def effort(self, searches_left: int = 1) -> Effort:
        """Return the limits of the next search, if ``searches_left`` are left including it."""
        asked = Effort(gap=self._limits.gap) if self._limits.gap else DEFAULT
        left = self.seconds_left
        if left is None:
            return asked
        end = self._now() + left / searches_left
        return asked.until(lambda: self._now() >= end)
