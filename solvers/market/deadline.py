"""A job under a deadline, on spot machines that come and go or on one on demand.

The model of Can't Be Late (NSDI 2024): time runs in ticks. At the start of a tick the policy sees
whether spot machines can be had; if not, a spot machine that it holds is lost. The policy then
chooses what to hold in this tick, and pays for the whole tick. After each launch no work is done
for ``restart_seconds``, which may take several ticks. A job that ends after its deadline has
failed.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil, floor
from typing import Protocol

from ...schema.errors import InfeasibleError, ProblemError

_MOST_TICKS = 1_000_000


def check_ticks(deadline_seconds: float, tick_seconds: float) -> None:
    """Refuse a deadline of more ticks than any program could count.

    Raises:
        ProblemError: There are more than a million.
    """
    if not deadline_seconds / tick_seconds <= _MOST_TICKS:
        raise ProblemError(
            f"the deadline of {deadline_seconds:g} s is more than {_MOST_TICKS} ticks of "
            f"{tick_seconds:g} s",
            hint="give longer ticks, or an earlier deadline",
        )


class Hold(IntEnum):
    """What is held during a tick."""

    NOTHING = 0
    SPOT = 1
    ON_DEMAND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineJob:
    """Work to do before a deadline, and what machines cost.

    Raises:
        ProblemError: A number is out of range.
        InfeasibleError: Not even an on-demand machine from the start ends in time.
    """

    work_seconds: float
    deadline_seconds: float
    restart_seconds: float
    tick_seconds: float
    on_demand_dollars_per_hour: float
    spot_dollars_per_hour: float

    def __post_init__(self) -> None:
        for name in ("work_seconds", "deadline_seconds", "tick_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ProblemError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        for name in ("restart_seconds", "spot_dollars_per_hour", "on_demand_dollars_per_hour"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ProblemError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        check_ticks(self.deadline_seconds, self.tick_seconds)
        if self.ticks_for(self.work_seconds) > self.num_ticks:
            soonest = self.work_seconds + self.restart_seconds
            dollars = self.tick_dollars(Hold.ON_DEMAND) * self.ticks_for(self.work_seconds)
            raise InfeasibleError(
                f"{self.work_seconds / 3600:.4g} h of work cannot end within "
                f"{self.deadline_seconds / 3600:.4g} h, even on demand from the start",
                hint=f"the soonest is {soonest / 3600:.4g} h, for {dollars:.2f} dollars",
            )

    @property
    def num_ticks(self) -> int:
        """Whole ticks until the deadline."""
        return floor(self.deadline_seconds / self.tick_seconds + 1e-9)

    def ticks_for(self, work_seconds: float) -> int:
        """Ticks that a machine launched now needs for so much work."""
        return ceil((work_seconds + self.restart_seconds) / self.tick_seconds - 1e-9)

    def tick_dollars(self, hold: Hold) -> float:
        """Dollars for one tick of holding."""
        rate = {
            Hold.NOTHING: 0.0,
            Hold.SPOT: self.spot_dollars_per_hour,
            Hold.ON_DEMAND: self.on_demand_dollars_per_hour,
        }[hold]
        return rate * self.tick_seconds / 3600

    @property
    def least_dollars(self) -> float:
        """What no way to hold machines costs less than: one without a break, at the lower price."""
        cheapest = min(self.tick_dollars(Hold.SPOT), self.tick_dollars(Hold.ON_DEMAND))
        return self.ticks_for(self.work_seconds) * cheapest

    @property
    def most_dollars(self) -> float:
        """What no way to hold machines until the deadline costs more than."""
        return self.num_ticks * max(map(self.tick_dollars, Hold))

    def in_longer_ticks(self, ticks: int) -> "DeadlineJob":
        """The same in ticks so many times as long; the deadline is one that it can keep."""
        length = ticks * self.tick_seconds
        least = -(-self.ticks_for(self.work_seconds) // ticks) * length
        deadline = max(self.deadline_seconds, least)
        return self if ticks == 1 else replace(self, tick_seconds=length, deadline_seconds=deadline)

    def pending_levels(self) -> tuple[float, ...]:
        """Seconds of a restart still to come after each tick held; ends with 0."""
        levels, left = [], self.restart_seconds - self.tick_seconds
        while left > 1e-9:
            levels.append(left)
            left -= self.tick_seconds
        return (*levels, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a policy sees at the start of a tick.

    ``held`` is what is still held: a spot machine that was taken away is not. ``pending_seconds``
    is what is left of its restart; ``run_length`` counts the ticks that spot has been as it is
    now, this one included.
    """

    tick: int
    work_left_seconds: float
    held: Hold
    pending_seconds: float
    has_spot: bool
    run_length: int


class Policy(Protocol):
    """Decides what to hold; may keep no state but what a moment tells."""

    def choose(self, job: DeadlineJob, now: Moment) -> Hold:
        """What to hold in this tick; never SPOT where there is none."""
        ...


def must_be_on_demand(job: DeadlineJob, now: Moment) -> bool:
    """Whether a machine launched in the next tick might end too late (the safety net)."""
    return job.ticks_for(now.work_left_seconds) >= job.num_ticks - now.tick


def safest(now: Moment) -> Hold:
    """What still ends in time once the safety net holds.

    A spot machine that works loses nothing by going on: were it taken away, an on-demand machine
    launched then would still end in time.
    """
    if now.held is Hold.SPOT and now.pending_seconds < 1e-3:
        return Hold.SPOT
    return Hold.ON_DEMAND
