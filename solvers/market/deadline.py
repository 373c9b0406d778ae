"""A job under a deadline, on spot machines that come and go or on one on demand, in some zones.

The model of Can't Be Late (NSDI 2024), for one zone or several: time runs in ticks. At the start of
a tick the policy sees in which zones spot machines can be had; one that is held where there are
none any more is lost. The policy then chooses what to hold in this tick, and pays for the whole
tick. After each launch no work is done for ``restart_seconds``, which may take several ticks. A
launch in another zone than the last one also costs ``move_dollars``, the egress of the checkpoint.
A job that ends after its deadline has failed.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil, floor
from typing import NamedTuple, Protocol

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


class Held(NamedTuple):
    """What is held during a tick, and in which zone; the zone of nothing has no meaning."""

    hold: Hold
    zone: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineJob:
    """Work to do before a deadline, and what machines cost.

    Attributes:
        spot_dollars_per_hour: [zones].
        move_dollars: Of a launch in another zone than the last one.

    Raises:
        ProblemError: A number is out of range.
        InfeasibleError: Not even an on-demand machine from the start ends in time.
    """

    work_seconds: float
    deadline_seconds: float
    restart_seconds: float
    tick_seconds: float
    on_demand_dollars_per_hour: float
    spot_dollars_per_hour: tuple[float, ...]
    move_dollars: float = 0.0

    def __post_init__(self) -> None:
        for name in ("work_seconds", "deadline_seconds", "tick_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ProblemError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        if not self.spot_dollars_per_hour:
            raise ProblemError("there is no zone; give a spot price for each")
        prices = [("spot_dollars_per_hour", price) for price in self.spot_dollars_per_hour]
        for name in ("restart_seconds", "on_demand_dollars_per_hour", "move_dollars"):
            prices.append((name, getattr(self, name)))
        for name, price in prices:
            if not 0 <= price < float("inf"):
                raise ProblemError(f"{name} must be >= 0 and finite, got {price}")
        check_ticks(self.deadline_seconds, self.tick_seconds)
        if self.ticks_for(self.work_seconds) > self.num_ticks:
            soonest = self.work_seconds + self.restart_seconds
            dollars = self.tick_dollars(Held(Hold.ON_DEMAND)) * self.ticks_for(self.work_seconds)
            raise InfeasibleError(
                f"{self.work_seconds / 3600:.4g} h of work cannot end within "
                f"{self.deadline_seconds / 3600:.4g} h, even on demand from the start",
                hint=f"the soonest is {soonest / 3600:.4g} h, for {dollars:.2f} dollars",
            )

    @property
    def num_zones(self) -> int:
        """How many zones there are."""
        return len(self.spot_dollars_per_hour)

    @property
    def num_ticks(self) -> int:
        """Whole ticks until the deadline."""
        return floor(self.deadline_seconds / self.tick_seconds + 1e-9)

    def ticks_for(self, work_seconds: float) -> int:
        """Ticks that a machine launched now needs for so much work."""
        return ceil((work_seconds + self.restart_seconds) / self.tick_seconds - 1e-9)

    def tick_dollars(self, held: Held) -> float:
        """Dollars for one tick of holding, without a move."""
        rate = {
            Hold.NOTHING: 0.0,
            Hold.SPOT: self.spot_dollars_per_hour[held.zone],
            Hold.ON_DEMAND: self.on_demand_dollars_per_hour,
        }[held.hold]
        return rate * self.tick_seconds / 3600

    def moving_dollars(self, before: int | None, zone: int) -> float:
        """Dollars of a launch in a zone, by the zone of the launch before it (None: the first)."""
        return 0.0 if before is None or before == zone else self.move_dollars

    def alone(self, zone: int) -> "DeadlineJob":
        """The job, if it had to stay in a zone."""
        return replace(self, spot_dollars_per_hour=(self.spot_dollars_per_hour[zone],))

    @property
    def least_dollars(self) -> float:
        """What no way to hold machines costs less than: one without a break, at the least price."""
        cheapest = min(*self.spot_dollars_per_hour, self.on_demand_dollars_per_hour)
        return self.ticks_for(self.work_seconds) * cheapest * self.tick_seconds / 3600

    @property
    def most_dollars(self) -> float:
        """What no way to hold machines until the deadline costs more than."""
        dearest = max(*self.spot_dollars_per_hour, self.on_demand_dollars_per_hour)
        moves = self.move_dollars if self.num_zones > 1 else 0.0
        return self.num_ticks * (dearest * self.tick_seconds / 3600 + moves)

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

    ``hold`` is what is still held, in ``zone``: a spot machine that was taken away is not. With
    nothing held the zone is that of the last launch, None before the first. ``pending_seconds`` is
    what is left of a restart. ``has_spot`` [zones] says where spot machines can be had;
    ``run_lengths`` [zones] counts the ticks that this has been as it is now, this one included.
    """

    tick: int
    work_left_seconds: float
    hold: Hold
    zone: int | None
    pending_seconds: float
    has_spot: tuple[bool, ...]
    run_lengths: tuple[int, ...]


class Policy(Protocol):
    """Decides what to hold; may keep no state but what a moment tells."""

    def choose(self, job: DeadlineJob, now: Moment) -> Held:
        """What to hold in this tick; never SPOT in a zone that has none."""
        ...


def must_be_on_demand(job: DeadlineJob, now: Moment) -> bool:
    """Whether a machine launched in the next tick might end too late (the safety net)."""
    return job.ticks_for(now.work_left_seconds) >= job.num_ticks - now.tick


def safest(now: Moment) -> Hold:
    """What still ends in time once the safety net holds.

    A spot machine that works loses nothing by going on: were it taken away, an on-demand machine
    launched then would still end in time.
    """
    if now.hold is Hold.SPOT and now.pending_seconds < 1e-3:
        return Hold.SPOT
    return Hold.ON_DEMAND


def guarded(job: DeadlineJob, now: Moment, wanted: Held) -> Held:
    """What is wanted if it is safe, else what is held if that is, else on demand in place.

    A choice is safe if an on-demand machine launched in the next tick would still end in time, or
    if it is on demand and ends in time by itself. At the start an on-demand machine is safe, and
    after a safe choice it or staying is safe in the next tick. So no deadline is missed.
    """
    place = now.zone or 0
    for choice in (wanted, Held(now.hold, place)):
        if _is_safe(job, now, choice):
            return choice
    return Held(Hold.ON_DEMAND, place)


def _is_safe(job: DeadlineJob, now: Moment, choice: Held) -> bool:
    goes_on = choice.hold is now.hold and choice.zone == now.zone
    pending = now.pending_seconds if goes_on else job.restart_seconds
    worked = 0.0 if choice.hold is Hold.NOTHING else max(job.tick_seconds - pending, 0.0)
    left = now.work_left_seconds - worked
    if left <= 1e-6 or job.ticks_for(left) <= job.num_ticks - now.tick - 1:
        return True
    if choice.hold is not Hold.ON_DEMAND:
        return False
    seconds = now.work_left_seconds + pending
    return seconds <= (job.num_ticks - now.tick) * job.tick_seconds + 1e-6
