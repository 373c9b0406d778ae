"""A job under a deadline that may move between zones, each with spot machines that come and go.

The model is that of ``market.deadline``, with a spot price for each zone and one on-demand price.
A launch in another zone than the last one also costs ``move_dollars``, the egress of the
checkpoint. Every launch takes ``restart_seconds``, in whichever zone.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ....schema.errors import ProblemError
from ..deadline import DeadlineJob, Hold, Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class ZonesJob:
    """A job, and what its zones cost.

    Attributes:
        job: The job; its spot price is that of the first zone.
        spot_dollars_per_hour: [zones].
        move_dollars: Of a launch in another zone than the last one.

    Raises:
        ProblemError: A number is out of range.
    """

    job: DeadlineJob
    spot_dollars_per_hour: tuple[float, ...]
    move_dollars: float = 0.0

    def __post_init__(self) -> None:
        if not self.spot_dollars_per_hour:
            raise ProblemError("there is no zone; give a spot price for each")
        for price in (*self.spot_dollars_per_hour, self.move_dollars):
            if not 0 <= price < float("inf"):
                raise ProblemError(
                    f"spot_dollars_per_hour and move_dollars must be >= 0 and finite, got {price}"
                )

    @property
    def num_zones(self) -> int:
        """How many zones there are."""
        return len(self.spot_dollars_per_hour)

    def alone(self, zone: int) -> DeadlineJob:
        """The job, if it had to stay in a zone."""
        return replace(self.job, spot_dollars_per_hour=self.spot_dollars_per_hour[zone])

    @property
    def least_dollars(self) -> float:
        """What no way to hold machines costs less than."""
        return min(self.alone(zone).least_dollars for zone in range(self.num_zones))

    @property
    def most_dollars(self) -> float:
        """What no way to hold machines until the deadline costs more than."""
        dearest = max(self.alone(zone).most_dollars for zone in range(self.num_zones))
        return dearest + self.job.num_ticks * self.move_dollars

    def tick_dollars(self, hold: Hold, zone: int) -> float:
        """Dollars for one tick of holding, without a move."""
        if hold is Hold.SPOT:
            return self.spot_dollars_per_hour[zone] * self.job.tick_seconds / 3600
        return self.job.tick_dollars(hold)

    def moving_dollars(self, before: int | None, zone: int) -> float:
        """Dollars of a launch in a zone, by the zone of the launch before it (None: the first)."""
        return 0.0 if before is None or before == zone else self.move_dollars


class Held(NamedTuple):
    """What is held during a tick, and in which zone; the zone of nothing has no meaning."""

    hold: Hold
    zone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZonesMoment:
    """What a policy sees at the start of a tick.

    ``hold`` is what is still held, in ``zone``; with nothing held that is the zone of the last
    launch, None before the first. ``has_spot`` and ``run_lengths``: [zones], as in a ``Moment``.
    """

    tick: int
    work_left_seconds: float
    hold: Hold
    zone: int | None
    pending_seconds: float
    has_spot: tuple[bool, ...]
    run_lengths: tuple[int, ...]

    def anywhere(self) -> Moment:
        """The moment of a job for which a spot machine in any zone is as good.

        Its run length says nothing: it is that of the zone, or of the first one.
        """
        return Moment(
            tick=self.tick,
            work_left_seconds=self.work_left_seconds,
            held=self.hold,
            pending_seconds=self.pending_seconds,
            has_spot=any(self.has_spot),
            run_length=self.run_lengths[self.zone or 0],
        )


class ZonesPolicy(Protocol):
    """Decides what to hold; may keep no state but what a moment tells."""

    def choose(self, job: ZonesJob, now: ZonesMoment) -> Held:
        """What to hold in this tick; never SPOT in a zone that has none."""
        ...


def guarded(job: ZonesJob, now: ZonesMoment, wanted: Held) -> Held:
    """What is wanted if it is safe, else what is held if that is, else on demand in place.

    A choice is safe if an on-demand machine launched in the next tick would still end in time, or
    if it is on demand and ends in time by itself. At the start an on-demand machine is safe, and
    after a safe choice it or staying is safe in the next tick. So no deadline is missed.
    """
    place = now.zone or 0
    for choice in (wanted, Held(now.hold, place)):
        if _is_safe(job.job, now, choice):
            return choice
    return Held(Hold.ON_DEMAND, place)


def _is_safe(job: DeadlineJob, now: ZonesMoment, choice: Held) -> bool:
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
