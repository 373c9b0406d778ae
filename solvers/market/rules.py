"""The published rules for a job under a deadline (Can't Be Late, NSDI 2024), over some zones.

A rule says what to hold as if all zones were one: a spot machine in any zone is as good.
``Anywhere`` then takes a new spot machine in the zone that the job is in, if that has one, else in
the cheapest zone that has one. So a job that loses its machine goes on elsewhere.

With R0 the deadline, C0 the work and d the restart:

- ``greedy`` takes spot machines whenever there are some, and waits else; it is on demand to the end
  once there is no time to wait.
- ``uniform_progress`` keeps up with the line ep(t) = t C0 / R0. Without a spot machine the job
  waits while it is ahead of ep(t), and takes an on-demand machine when it is behind. It stays on
  demand until it is ahead of ep(t + 2d), so that it does not pay for restarts one after another.
- ``time_sliced`` is greedy within slices of time, each with its share of the work: by the end of a
  slice at t, t C0 / R0 must be done. Work that is done ahead counts for the slices to come. The
  length of a slice is open; here it is that of the published code, an hour, but at least twenty
  restarts: with shorter ones, on-demand machines that come and go in each slice cost more than one
  from the start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor

from .deadline import DeadlineJob, Held, Hold, Moment, must_be_on_demand, safest

_SLICE_SECONDS, _SLICE_RESTARTS = 3600.0, 20


@dataclass(frozen=True, slots=True)
class Anywhere:
    """``rule`` over all zones at once."""

    rule: Callable[[DeadlineJob, Moment], Hold]

    def choose(self, job: DeadlineJob, now: Moment) -> Held:
        """What the rule holds, where it is cheapest without a needless move."""
        hold = self.rule(job, now)
        if hold is not Hold.SPOT or now.hold is Hold.SPOT:
            return Held(hold, now.zone or 0)
        if now.zone is not None and now.has_spot[now.zone]:
            return Held(hold, now.zone)
        prices = job.spot_dollars_per_hour
        there = [place for place in range(job.num_zones) if now.has_spot[place]]
        return Held(hold, min(there, key=lambda place: (prices[place], place)))


def on_demand(job: DeadlineJob, now: Moment) -> Hold:
    """On demand from the start: never late, and the dearest."""
    return Hold.ON_DEMAND


def greedy(job: DeadlineJob, now: Moment) -> Hold:
    """Spot, else wait; on demand to the end once the safety net holds."""
    return safest(now) if must_be_on_demand(job, now) else _waiting(now)


def time_sliced(job: DeadlineJob, now: Moment) -> Hold:
    """Spot or nothing, on demand once the slice's work needs it."""
    if must_be_on_demand(job, now):
        return safest(now)
    end = _slice_end(job, now.tick)
    due = job.work_seconds * min(1.0, end * job.tick_seconds / job.deadline_seconds)
    needed = due - (job.work_seconds - now.work_left_seconds)
    if needed <= 1e-3:
        return _waiting(now)
    left = end - now.tick
    if job.ticks_for(needed) >= left:
        return safest(now)
    if now.hold is not Hold.SPOT and job.ticks_for(needed + job.restart_seconds) >= left:
        return Hold.ON_DEMAND
    return _waiting(now)


def uniform_progress(job: DeadlineJob, now: Moment) -> Hold:
    """Spot, on demand or nothing, by the work done so far."""
    if must_be_on_demand(job, now):
        return safest(now)
    if now.hold is Hold.ON_DEMAND:
        ahead = _is_ahead(job, now, 2 * job.restart_seconds)
        return _waiting(now) if ahead else Hold.ON_DEMAND
    if any(now.has_spot) or _is_ahead(job, now, 0.0):
        return _waiting(now)
    return Hold.ON_DEMAND


def _waiting(now: Moment) -> Hold:
    return Hold.SPOT if any(now.has_spot) else Hold.NOTHING


def _slice_end(job: DeadlineJob, tick: int) -> int:
    """The tick at which a tick's slice ends; slices have whole ticks, the last perhaps fewer."""
    seconds = max(_SLICE_SECONDS, _SLICE_RESTARTS * job.restart_seconds)
    ticks = max(1, floor(seconds / job.tick_seconds + 1e-9))
    return min(job.num_ticks, ticks * ceil((tick + 1) / ticks))


def _is_ahead(job: DeadlineJob, now: Moment, margin_seconds: float) -> bool:
    done = job.work_seconds - now.work_left_seconds
    seconds = now.tick * job.tick_seconds + margin_seconds
    return done >= seconds * job.work_seconds / job.deadline_seconds
