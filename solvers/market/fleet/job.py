"""An elastic job under a deadline, on up to so many machines: spot, on demand, or both.

The model extends that of ``market.deadline`` to several machines. Time runs in ticks. At the start
of a tick the policy sees how many spot machines the market has for it; if it holds more, it loses
the rest and keeps what is left. It then chooses how many of each kind to hold in this tick, and
pays for whole ticks. Whenever the machines change, by choice or by loss, nobody works for
``resize_seconds``, which may take several ticks. A job that ends after its deadline has failed.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor
from typing import NamedTuple, Protocol

from ....schema.errors import InfeasibleError, ProblemError
from ..deadline import check_ticks


class Fleet(NamedTuple):
    """How many machines are held during a tick."""

    num_spot: int
    num_on_demand: int

    @property
    def num_machines(self) -> int:
        """Of both kinds."""
        return self.num_spot + self.num_on_demand


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJob:
    """Work to do before a deadline, how it speeds up with machines, and what they cost.

    Attributes:
        work_seconds: The work, in seconds of one machine.
        speeds: [machines + 1] speed on 0, 1, ... machines, in work seconds per second. It never
            falls, and the last one is of all that the job can use.
        deadline_seconds: From the start.
        resize_seconds: No work is done for so long whenever the machines change.
        tick_seconds: Length of a tick.
        on_demand_dollars_per_hour: Of one machine.
        spot_dollars_per_hour: Of one machine.

    Raises:
        ProblemError: A number is out of range.
        InfeasibleError: Not even all machines on demand from the start end in time.
    """

    work_seconds: float
    speeds: tuple[float, ...]
    deadline_seconds: float
    resize_seconds: float
    tick_seconds: float
    on_demand_dollars_per_hour: float
    spot_dollars_per_hour: float

    def __post_init__(self) -> None:
        for name in ("work_seconds", "deadline_seconds", "tick_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ProblemError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        for name in ("resize_seconds", "spot_dollars_per_hour", "on_demand_dollars_per_hour"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ProblemError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        check_ticks(self.deadline_seconds, self.tick_seconds)
        speeds = self.speeds
        if len(speeds) < 2 or speeds[0] != 0 or not 0 < speeds[1] < float("inf"):
            raise ProblemError(
                "speeds must be those on 0, 1, ... machines: 0 first, then one > 0 and finite, "
                f"got {list(speeds)[:3]}"
            )
        for number, (less, more) in enumerate(pairwise(speeds), start=1):
            if not less <= more < float("inf"):
                raise ProblemError(
                    f"speeds must not fall, but {number} machines have {more} and "
                    f"{number - 1} have {less}"
                )
        needed = self.ticks_for(self.work_seconds, self.num_machines)
        if needed > self.num_ticks:
            dollars = needed * self.tick_dollars(Fleet(0, self.num_machines))
            raise InfeasibleError(
                f"{self.work_seconds / 3600:.4g} machine hours of work cannot end within "
                f"{self.deadline_seconds / 3600:.4g} h, even with {self.num_machines} machines on "
                "demand from the start",
                hint=f"the soonest is {self.soonest_seconds / 3600:.4g} h, "
                f"for {dollars:.2f} dollars",
            )

    @property
    def soonest_seconds(self) -> float:
        """When the work can be done on all machines, launched at the start."""
        return self.work_seconds / self.speeds[-1] + self.resize_seconds

    @property
    def num_machines(self) -> int:
        """How many it can use at most."""
        return len(self.speeds) - 1

    @property
    def num_ticks(self) -> int:
        """Whole ticks until the deadline."""
        return floor(self.deadline_seconds / self.tick_seconds + 1e-9)

    def ticks_for(self, work_seconds: float, num_machines: int) -> int:
        """Ticks that so many machines need for so much work, from a change on; they work alone."""
        seconds = work_seconds / self.speeds[num_machines] + self.resize_seconds
        return ceil(seconds / self.tick_seconds - 1e-9)

    def tick_dollars(self, fleet: Fleet) -> float:
        """Dollars for one tick of holding."""
        return (
            fleet.num_spot * self.spot_dollars_per_hour
            + fleet.num_on_demand * self.on_demand_dollars_per_hour
        ) * (self.tick_seconds / 3600)

    @property
    def least_dollars(self) -> float:
        """What no way to hold machines costs less than: the work at the best speed a dollar."""
        cheapest = min(self.spot_dollars_per_hour, self.on_demand_dollars_per_hour) / 3600
        best = max(speed / number for number, speed in enumerate(self.speeds) if number)
        return self.work_seconds / best * cheapest

    @property
    def most_dollars(self) -> float:
        """What no way to hold machines until the deadline costs more than."""
        number = self.num_machines
        each = max(map(self.tick_dollars, (Fleet(number, 0), Fleet(0, number))))
        return self.num_ticks * each

    def worked(self, fleet: Fleet, pending_seconds: float) -> float:
        """Work done in a tick that begins with so much of a pause still to come."""
        return self.speeds[fleet.num_machines] * max(self.tick_seconds - pending_seconds, 0.0)

    def in_longer_ticks(self, ticks: int) -> "FleetJob":
        """The same in ticks so many times as long; the deadline is one that it can keep."""
        length = ticks * self.tick_seconds
        least = -(-self.ticks_for(self.work_seconds, self.num_machines) // ticks) * length
        deadline = max(self.deadline_seconds, least)
        return self if ticks == 1 else replace(self, tick_seconds=length, deadline_seconds=deadline)

    def pending_levels(self) -> tuple[float, ...]:
        """Seconds of a pause still to come after each tick held; ends with 0."""
        levels, left = [], self.resize_seconds - self.tick_seconds
        while left > 1e-9:
            levels.append(left)
            left -= self.tick_seconds
        return (*levels, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMoment:
    """What a policy sees at the start of a tick.

    ``held`` is what is left of what was held; ``pending_seconds`` is what is still to come of its
    pause, the whole of it if machines were just lost. ``num_available`` spot machines can be held
    in this tick.
    """

    tick: int
    work_left_seconds: float
    held: Fleet
    pending_seconds: float
    num_available: int


class FleetPolicy(Protocol):
    """Decides what to hold; may keep no state but what a moment tells."""

    def choose(self, job: FleetJob, now: FleetMoment) -> Fleet:
        """What to hold in this tick; no more spot machines than there are."""
        ...


def guarded(job: FleetJob, now: FleetMoment, wanted: Fleet) -> Fleet:
    """What is wanted if it is safe, else what is held if that is, else all machines on demand.

    A choice is safe if all machines on demand, launched in the next tick, would still end in time,
    or if it has no spot machines and ends in time by itself. At the start the last resort is safe,
    and after a safe choice either the last resort or staying is safe in the next tick. So a
    guarded policy never misses a deadline.
    """
    for choice in (wanted, now.held):
        if _is_safe(job, now, choice):
            return choice
    return Fleet(0, job.num_machines)


def _is_safe(job: FleetJob, now: FleetMoment, choice: Fleet) -> bool:
    pending = now.pending_seconds if choice == now.held else job.resize_seconds
    later = job.num_ticks - now.tick - 1
    left = now.work_left_seconds - job.worked(choice, pending)
    if left <= 1e-6 or job.ticks_for(left, job.num_machines) <= later:
        return True
    if choice.num_spot or not choice.num_on_demand:
        return False
    seconds = now.work_left_seconds / job.speeds[choice.num_on_demand] + pending
    return seconds <= (later + 1) * job.tick_seconds + 1e-6
