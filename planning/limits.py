"""The limits of a search: ``--time-limit`` and ``--gap``, and whether a plan is within them."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..schema.files import Plan
from ..solvers.effort import DEFAULT, Effort


@dataclass(frozen=True)
class Limits:
    """What ``hetflow solve`` was asked: wall seconds for all its searches, and a fraction."""

    time_limit_seconds: float | None = None
    gap: float | None = None

    @property
    def are_asked(self) -> bool:
        """Whether any was given."""
        return self != Limits()

    def is_missed(self, plan: Plan) -> bool:
        """Whether a plan is not proved within the gap that was asked for: exit code 4.

        A time limit alone asks for a gap of 0. Without limits nothing was asked: the gap of the
        plan says what its search left open. What is optimal is not missed: the gap to the fastest
        plan on paper may then be as wide as its proof's tolerance.
        """
        if not self.are_asked or plan.proof.termination == "optimal":
            return False
        gap = plan.proof.gap
        return gap is None or gap > max(self.gap or 0.0, 1e-9)


class Clock:
    """Shares the time limit among the searches of a command, one after another.

    Args:
        limits: What was asked.
        now: Seconds of a clock that only goes forward.
    """

    def __init__(self, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._now = limits, now
        self._end = now() + (limits.time_limit_seconds or 0.0)

    def effort(self, searches_left: int = 1) -> Effort:
        """What the next search may do, if so many are left with it."""
        asked = Effort(gap=self._limits.gap) if self._limits.gap else DEFAULT
        if self._limits.time_limit_seconds is None:
            return asked
        end = self._now() + max(self._end - self._now(), 0.0) / searches_left
        return asked.until(lambda: self._now() >= end)
