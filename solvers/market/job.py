"""A job on rented machines: spot machines that come and go at changing prices, some on demand.

Time runs in ticks. A zone has machines of one type; where a place has several types, each is a zone
of its own, with its speed. At the start of a tick the policy sees how many spot machines each zone
has, and their prices; a job that holds more than there are loses the rest, and keeps what is left.
The policy then chooses what to hold in this tick, in one zone. Whenever the machines change, by
choice or by loss, no work is done for ``restart_seconds``, which may take several ticks. A launch
in another zone than the last one also costs the egress of the checkpoint.

With a deadline this is the model of Can't Be Late (NSDI 2024), for one machine or several: ticks
are of one length and paid whole, and a job that ends after its deadline has failed. At changing
prices it is that of Narayanan's thesis (section 6.3): a zone is one device of an offer, which can
be had while its price is known; a tick is the time in which no price changes, and is paid by the
second. A move within a cloud is then free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, inf
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import InfeasibleError, ProblemError

Counts = Sequence[int] | NDArray[np.integer]
Prices = Sequence[float] | NDArray[np.float64]
_MOST_TICKS = 1_000_000
_NUMBERS = (
    "spot_dollars_per_hour", "restart_seconds", "move_dollars", "on_demand_dollars_per_hour",
    "rates",
)  # fmt: skip


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
class RentJob:
    """Work to do, perhaps before a deadline, how it speeds up with machines, and what they cost.

    Attributes:
        work_seconds: The work, in seconds of one machine.
        deadline_seconds: From the start; infinite: none.
        restart_seconds: No work is done for so long whenever the machines change.
        tick_seconds: Length of a tick; where ticks differ, replays are told (``replay``).
        on_demand_dollars_per_hour: Of one machine, in every zone; or [zones]. Infinite: none.
        spot_dollars_per_hour: [zones] of one machine; where prices move, their means.
        move_dollars: Of a launch in another zone than the last one; or [zones] of leaving each.
        speeds: [machines + 1] speed on 0, 1, ... machines, in work seconds per second. It never
            falls, and the last one is of all that the job can use.
        rates: [zones] how many times as fast its machines are; none: all alike.
        clouds: [zones] where each is; moves within one are free. None: each zone is its own.

    Raises:
        ProblemError: A number is out of range.
        InfeasibleError: Not even all machines on demand from the start end in time.
    """

    work_seconds: float
    deadline_seconds: float = inf
    restart_seconds: float
    tick_seconds: float = 1.0
    on_demand_dollars_per_hour: float | tuple[float, ...] = inf
    spot_dollars_per_hour: tuple[float, ...]
    move_dollars: float | tuple[float, ...] = 0.0
    speeds: tuple[float, ...] = (0.0, 1.0)
    rates: tuple[float, ...] = ()
    clouds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # ``not a < b`` refuses NaN too.
        for name in ("work_seconds", "deadline_seconds", "tick_seconds"):
            value = getattr(self, name)
            if not 0 < value < inf and (name != "deadline_seconds" or value != inf):
                raise ProblemError(f"{name} must be > 0 and finite, got {value}")
        if not self.spot_dollars_per_hour:
            raise ProblemError("there is no zone; give a spot price for each")
        for name in _NUMBERS:
            given = getattr(self, name)
            each = given if isinstance(given, tuple) else (given,)
            if isinstance(given, tuple) and len(given) != (self.num_zones if given else 0):
                raise ProblemError(f"{name}: {len(given)} for {self.num_zones} zones")
            for value in each:
                if name == "rates" and not 0 < value < inf:
                    raise ProblemError(f"rates must be > 0 and finite, got {value}")
                if not 0 <= value < inf and not (name.startswith("on_demand") and value == inf):
                    raise ProblemError(f"{name} must be >= 0 and finite, got {value}")
        self._check_speeds()
        if self.has_no_on_demand or self.deadline_seconds == inf:
            return
        if not self.deadline_seconds / self.tick_seconds <= _MOST_TICKS:
            raise ProblemError(
                f"the deadline of {self.deadline_seconds:g} s is more than {_MOST_TICKS} ticks of "
                f"{self.tick_seconds:g} s",
                hint="give longer ticks, or an earlier deadline",
            )
        # All machines on demand from the start are the last resort: if that is late, nothing can
        # be promised.
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
    def has_no_on_demand(self) -> bool:
        """Whether there are no machines that stay, so that nobody can vouch for a deadline."""
        return self.on_demand_dollars_per_hour == inf

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
        # A deadline of whole ticks must not lose one to rounding.
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
        # Moving costs, so a place that is as fast is kept.
        zone = place if place in fastest else min(fastest, key=self.on_demand)
        return Held(0, self.num_machines, zone)

    def ticks_for(self, work_seconds: float, held: Held | None = None) -> int:
        """Ticks that machines launched now need for so much work; None: the last resort."""
        if held is None:
            speed = self.speeds[-1] * max(self.rates, default=1.0)
        else:
            speed = self.speed(held.num_machines, held.zone)
        # A restart, then work, in whole ticks.
        return ceil((work_seconds / speed + self.restart_seconds) / self.tick_seconds - 1e-9)

    def worked(
        self, held: Held, pending_seconds: float, tick_seconds: float | None = None
    ) -> float:
        """Work done in a tick that begins with so much of a restart still to come."""
        seconds = self.tick_seconds if tick_seconds is None else tick_seconds
        return self.speed(held.num_machines, held.zone) * max(seconds - pending_seconds, 0.0)

    def dollars_per_hour(self, held: Held, spot: Prices | None = None) -> float:
        """Of holding, at the spot prices [zones] of now; None: the job's."""
        prices = self.spot_dollars_per_hour if spot is None else spot
        dollars = held.num_spot * prices[held.zone] if held.num_spot else 0.0
        return dollars + (held.num_on_demand and held.num_on_demand * self.on_demand(held.zone))

    def tick_dollars(self, held: Held) -> float:
        """Dollars for one tick of holding at the job's prices, without a move."""
        return self.dollars_per_hour(held) * self.tick_seconds / 3600

    def leaving_dollars(self, zone: int) -> float:
        """Dollars of a launch in another cloud than that of a zone, if the last one was in it."""
        told = self.move_dollars
        return told[zone] if isinstance(told, tuple) else told

    def moving_dollars(self, before: int | None, zone: int) -> float:
        """Dollars of a launch in a zone, by the zone of the launch before it (None: the first)."""
        if before is None or before == zone:
            return 0.0
        is_near = bool(self.clouds) and self.clouds[before] == self.clouds[zone]
        return 0.0 if is_near else self.leaving_dollars(before)

    def at(self, spot_dollars_per_hour: Sequence[float]) -> "RentJob":
        """The job at the spot prices [zones] of another time."""
        return replace(self, spot_dollars_per_hour=tuple(spot_dollars_per_hour))

    def alone(self, zone: int) -> "RentJob":
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
        """What no way to hold machines costs less than: the work at the best speed a dollar."""
        # One machine works without a break at best, in whole ticks.
        zones = range(self.num_zones)
        cheapest = [min(self.spot_dollars_per_hour[z], self.on_demand(z)) / 3600 for z in zones]
        # A tick is paid whole, so one machine pays whole ticks; several may end in unlike ones.
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
            # A machine of the dearest kind in each tick, and a move in each.
        )
        moves = max(map(self.leaving_dollars, range(self.num_zones))) * (self.num_zones > 1)
        return self.num_ticks * (self.num_machines * dearest * self.tick_seconds / 3600 + moves)

    def in_longer_ticks(self, ticks: int) -> "RentJob":
        """The job in ticks so many times as long; the deadline is one that it can keep."""
        length = ticks * self.tick_seconds
        # Longer ticks may not fit the deadline: it moves to the first tick end that can be kept.
        least = -(-self.ticks_for(self.work_seconds) // ticks) * length
        deadline = max(self.deadline_seconds, least)
        return self if ticks == 1 else replace(self, tick_seconds=length, deadline_seconds=deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a policy sees at the start of a tick, and at the prices of now.

    ``held`` is what is still held: spot machines that were taken away are not. ``zone`` is that of
    the last launch, None before the first. ``pending_seconds`` is what is left of a restart, the
    whole of it if some machines were just lost. ``available`` [zones] spot machines can be held;
    ``run_lengths`` [zones] counts the ticks that this has been as it is now, this one included.
    ``spot_dollars_per_hour``: [zones] of one machine.
    """

    tick: int
    work_left_seconds: float
    held: Held
    zone: int | None
    pending_seconds: float
    available: Counts
    run_lengths: Counts
    spot_dollars_per_hour: Prices

    @property
    def place(self) -> int:
        """The zone of the last launch, or the first."""
        return self.zone or 0


class RentPolicy(Protocol):
    """Decides what to hold; may keep no state but what a moment tells."""

    def __call__(self, job: RentJob, now: Moment) -> Held:
        """What to hold in this tick; no more spot machines than the zone has."""
        ...


def guarded(job: RentJob, now: Moment, wanted: Held) -> Held:
    """What is wanted if it is safe, else what is held if that is, else the last resort."""
    # In this order: staying is tried before the last resort, as it loses no restart.
    # A choice is safe if the last resort, launched in the next tick, would still end in time. So
    # is one that has no spot machines and ends in time by itself. At the start the last resort is
    # safe, and after a safe choice it or staying is safe in the next tick. So no deadline is
    # missed.
    for choice in (wanted, now.held):
        if _is_safe(job, now, choice):
            return choice
    return job.last_resort(now.place)


def _is_safe(job: RentJob, now: Moment, choice: Held) -> bool:
    # Whatever changes the machines begins a restart.
    pending = now.pending_seconds if choice == now.held else job.restart_seconds
    later = job.num_ticks - now.tick - 1
    left = now.work_left_seconds - job.worked(choice, pending)
    # The last resort, launched in the next tick, still ends in time whatever happens in this one.
    if left <= 1e-6 or job.ticks_for(left) <= later:
        return True
    # Spot machines may go, and nothing works on none.
    if choice.num_spot or not choice.num_on_demand:
        return False
    # On demand without a break it ends in time by itself, though no later launch would.
    seconds = now.work_left_seconds / job.speed(choice.num_on_demand, choice.zone) + pending
    return seconds <= (later + 1) * job.tick_seconds + 1e-6
