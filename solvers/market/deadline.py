"""A job under a deadline, on spot machines that come and go or on some on demand, in some zones.

The model of Can't Be Late (NSDI 2024), for one machine or several, in one zone or several: time
runs in ticks. A zone has machines of one type; where a place has several types, each is a zone of
its own, with its speed. At the start of a tick the policy sees how many spot machines each zone
has; a job that holds more than there are loses the rest, and keeps what is left. The policy then
chooses what to hold in this tick, in one zone, and pays for the whole tick, at the spot prices of
its start. Whenever the machines change, by choice or by loss, no work is done for
``restart_seconds``, which may take several ticks. A launch in another zone than the last one also
costs ``move_dollars``, the egress of the checkpoint. A job that ends after its deadline has failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, inf
from typing import NamedTuple, Protocol

from ...schema.errors import InfeasibleError, ProblemError

_MOST_TICKS = 1_000_000


class Held(NamedTuple):
    """Machines held during a tick, and their zone; the zone of none has no meaning."""

    num_spot: int
    num_on_demand: int
    zone: int = 0

    @property
    def num_machines(self) -> int:
        """Of both kinds."""
        return self.num_spot + self.num_on_demand


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineJob:
    """Work to do before a deadline, how it speeds up with machines, and what they cost.

    Attributes:
        work_seconds: The work, in seconds of one machine.
        deadline_seconds: From the start.
        restart_seconds: No work is done for so long whenever the machines change.
        tick_seconds: Length of a tick.
        on_demand_dollars_per_hour: Of one machine, in every zone; or [zones].
        spot_dollars_per_hour: [zones] of one machine; where prices move, now (``at``).
        move_dollars: Of a launch in another zone than the last one.
        speeds: [machines + 1] speed on 0, 1, ... machines, in work seconds per second. It never
            falls, and the last one is of all that the job can use.
        rates: [zones] how many times as fast its machines are; none: all alike.

    Raises:
        ProblemError: A number is out of range.
        InfeasibleError: Not even all machines on demand from the start end in time.
    """

    work_seconds: float
    deadline_seconds: float
    restart_seconds: float
    tick_seconds: float
    on_demand_dollars_per_hour: float | tuple[float, ...]
    spot_dollars_per_hour: tuple[float, ...]
    move_dollars: float = 0.0
    speeds: tuple[float, ...] = (0.0, 1.0)
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("work_seconds", "deadline_seconds", "tick_seconds"):
            if not 0 < getattr(self, name) < inf:
                raise ProblemError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        if not self.spot_dollars_per_hour:
            raise ProblemError("there is no zone; give a spot price for each")
        prices = [("spot_dollars_per_hour", price) for price in self.spot_dollars_per_hour]
        prices += [("restart_seconds", self.restart_seconds), ("move_dollars", self.move_dollars)]
        told = self.on_demand_dollars_per_hour
        for name, given in (("on_demand_dollars_per_hour", told), ("rates", self.rates or 1.0)):
            if isinstance(given, tuple) and len(given) != self.num_zones:
                raise ProblemError(f"{name}: {len(given)} for {self.num_zones} zones")
        prices += [("on_demand_dollars_per_hour", self.on_demand(z)) for z in range(self.num_zones)]
        for rate in self.rates:
            if not 0 < rate < inf:
                raise ProblemError(f"rates must be > 0 and finite, got {rate}")
        for name, price in prices:
            if not 0 <= price < inf:
                raise ProblemError(f"{name} must be >= 0 and finite, got {price}")
        if not self.deadline_seconds / self.tick_seconds <= _MOST_TICKS:
            raise ProblemError(
                f"the deadline of {self.deadline_seconds:g} s is more than {_MOST_TICKS} ticks of "
                f"{self.tick_seconds:g} s",
                hint="give longer ticks, or an earlier deadline",
            )
        self._check_speeds()
        needed = self.ticks_for(self.work_seconds)
        if needed > self.num_ticks:
            many = self.num_machines > 1
            fastest = self.last_resort(0)
            soonest = (
                self.work_seconds / self.speed(fastest.num_on_demand, fastest.zone)
                + self.restart_seconds
            )
            dollars = needed * self.tick_dollars(fastest)
            raise InfeasibleError(
                f"{self.work_seconds / 3600:.4g} {'machine hours' if many else 'h'} of work cannot "
                f"end within {self.deadline_seconds / 3600:.4g} h, even "
                + (f"with {self.num_machines} machines " if many else "")
                + "on demand from the start",
                hint=f"the soonest is {soonest / 3600:.4g} h, for {dollars:.2f} dollars",
            )

    def _check_speeds(self) -> None:
        speeds = self.speeds
        if len(speeds) < 2 or speeds[0] != 0 or not 0 < speeds[1] < inf:
            raise ProblemError(
                "speeds must be those on 0, 1, ... machines: 0 first, then one > 0 and finite, "
                f"got {list(speeds)[:3]}"
            )
        for number, (less, more) in enumerate(pairwise(speeds), start=1):
            if not less <= more < inf:
                raise ProblemError(
                    f"speeds must not fall, but {number} machines have {more} and "
                    f"{number - 1} have {less}"
                )

    @property
    def num_zones(self) -> int:
        """How many zones there are."""
        return len(self.spot_dollars_per_hour)

    @property
    def num_machines(self) -> int:
        """How many it can use at most."""
        return len(self.speeds) - 1

    @property
    def num_ticks(self) -> int:
        """Whole ticks until the deadline."""
        return floor(self.deadline_seconds / self.tick_seconds + 1e-9)

    def on_demand(self, zone: int) -> float:
        """Dollars per hour of a machine on demand in a zone."""
        told = self.on_demand_dollars_per_hour
        return told[zone] if isinstance(told, tuple) else told

    def rate(self, zone: int) -> float:
        """How many times as fast the machines of a zone are."""
        return self.rates[zone] if self.rates else 1.0

    def speed(self, num_machines: int, zone: int) -> float:
        """Work seconds per second on so many machines of a zone."""
        return self.speeds[num_machines] * self.rate(zone)

    def last_resort(self, place: int) -> Held:
        """All machines on demand: in place if none are faster, else the cheapest of the fastest."""
        top = max(self.rates, default=1.0)
        fastest = [zone for zone in range(self.num_zones) if self.rate(zone) == top]
        zone = place if place in fastest else min(fastest, key=self.on_demand)
        return Held(0, self.num_machines, zone)

    def ticks_for(self, work_seconds: float, held: Held | None = None) -> int:
        """Ticks that machines launched now need for so much work; None: the last resort."""
        if held is None:
            speed = self.speeds[-1] * max(self.rates, default=1.0)
        else:
            speed = self.speed(held.num_machines, held.zone)
        return ceil((work_seconds / speed + self.restart_seconds) / self.tick_seconds - 1e-9)

    def worked(self, held: Held, pending_seconds: float) -> float:
        """Work done in a tick that begins with so much of a restart still to come."""
        working_seconds = max(self.tick_seconds - pending_seconds, 0.0)
        return self.speed(held.num_machines, held.zone) * working_seconds

    def tick_dollars(self, held: Held) -> float:
        """Dollars for one tick of holding, without a move."""
        rate = held.num_spot * self.spot_dollars_per_hour[held.zone]
        rate += held.num_on_demand * self.on_demand(held.zone)
        return rate * self.tick_seconds / 3600

    def moving_dollars(self, before: int | None, zone: int) -> float:
        """Dollars of a launch in a zone, by the zone of the launch before it (None: the first)."""
        return 0.0 if before is None or before == zone else self.move_dollars

    def at(self, spot_dollars_per_hour: Sequence[float] | None) -> "DeadlineJob":
        """The job at the spot prices [zones] of another time; None: the same ones."""
        if spot_dollars_per_hour is None or spot_dollars_per_hour == self.spot_dollars_per_hour:
            return self
        return replace(self, spot_dollars_per_hour=tuple(spot_dollars_per_hour))

    def alone(self, zone: int) -> "DeadlineJob":
        """The job, if it had to stay in a zone.

        Raises:
            InfeasibleError: Its machines are too slow.
        """
        return replace(
            self,
            spot_dollars_per_hour=(self.spot_dollars_per_hour[zone],),
            on_demand_dollars_per_hour=self.on_demand(zone),
            rates=(self.rate(zone),),
        )

    @property
    def least_dollars(self) -> float:
        """What no way to hold machines costs less than: the work at the best speed a dollar.

        One machine works without a break at best, in whole ticks.
        """
        zones = range(self.num_zones)
        cheapest = [min(self.spot_dollars_per_hour[z], self.on_demand(z)) / 3600 for z in zones]
        if self.num_machines == 1:
            ticks = [self.ticks_for(self.work_seconds, Held(0, 1, zone)) for zone in zones]
            dollars = [ticks[zone] * cheapest[zone] for zone in zones]
            return min(dollars) * self.tick_seconds
        best = max(speed / number for number, speed in enumerate(self.speeds) if number)
        return self.work_seconds / best * min(cheapest[zone] / self.rate(zone) for zone in zones)

    @property
    def most_dollars(self) -> float:
        """What no way to hold machines until the deadline costs more than."""
        dearest = max(
            self.spot_dollars_per_hour + tuple(map(self.on_demand, range(self.num_zones)))
        )
        moves = self.move_dollars if self.num_zones > 1 else 0.0
        return self.num_ticks * (self.num_machines * dearest * self.tick_seconds / 3600 + moves)

    def in_longer_ticks(self, ticks: int) -> "DeadlineJob":
        """The same in ticks so many times as long; the deadline is one that it can keep."""
        length = ticks * self.tick_seconds
        least = -(-self.ticks_for(self.work_seconds) // ticks) * length
        deadline = max(self.deadline_seconds, least)
        return self if ticks == 1 else replace(self, tick_seconds=length, deadline_seconds=deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a policy sees at the start of a tick.

    ``held`` is what is still held: spot machines that were taken away are not. ``zone`` is that of
    the last launch, None before the first. ``pending_seconds`` is what is left of a restart, the
    whole of it if some machines were just lost. ``available`` [zones] spot machines can be held;
    ``run_lengths`` [zones] counts the ticks that this has been as it is now, this one included.
    """

    tick: int
    work_left_seconds: float
    held: Held
    zone: int | None
    pending_seconds: float
    available: tuple[int, ...]
    run_lengths: tuple[int, ...]

    @property
    def place(self) -> int:
        """The zone of the last launch, or the first."""
        return self.zone or 0


class Policy(Protocol):
    """Decides what to hold; may keep no state but what a moment tells."""

    def __call__(self, job: DeadlineJob, now: Moment) -> Held:
        """What to hold in this tick; no more spot machines than the zone has."""
        ...


def guarded(job: DeadlineJob, now: Moment, wanted: Held) -> Held:
    """What is wanted if it is safe, else what is held if that is, else the last resort.

    A choice is safe if the last resort, launched in the next tick, would still end in time, or if
    it has no spot machines and ends in time by itself. At the start the last resort is safe, and
    after a safe choice it or staying is safe in the next tick. So no deadline is missed.
    """
    for choice in (wanted, now.held):
        if _is_safe(job, now, choice):
            return choice
    return job.last_resort(now.place)


def _is_safe(job: DeadlineJob, now: Moment, choice: Held) -> bool:
    pending = now.pending_seconds if choice == now.held else job.restart_seconds
    later = job.num_ticks - now.tick - 1
    left = now.work_left_seconds - job.worked(choice, pending)
    if left <= 1e-6 or job.ticks_for(left) <= later:
        return True
    if choice.num_spot or not choice.num_on_demand:
        return False
    seconds = now.work_left_seconds / job.speed(choice.num_on_demand, choice.zone) + pending
    return seconds <= (later + 1) * job.tick_seconds + 1e-6
