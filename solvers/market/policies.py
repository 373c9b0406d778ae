"""The policies for a job under a deadline by name: the published rules, and the one that learns.

The rules are those of Can't Be Late (NSDI 2024). One says what to hold as if all zones were one: a
spot machine in any zone is as good. New spot machines are of the zone that the job is in, if that
has some. Else they are of the one with most for the job, and of these the cheapest for the work.
The paper has one machine; these are its policies then, and several machines follow the same rules.

With R0 the deadline, C0 the work and d the restart:

- ``greedy`` takes spot machines whenever there are some, and waits else; it is on demand to the end
  once there is no time to wait.
- ``uniform_progress`` keeps up with the line ep(t) = t C0 / R0. While the job is behind ep(t),
  on-demand machines fill up to the number that would end in time from the start. It keeps them
  until it is ahead of ep(t + 2d), so that it does not pay for restarts one after another.
- ``time_sliced`` is greedy within slices of time, each with its share of the work: by the end of a
  slice at t, t C0 / R0 must be done. Work that is done ahead counts for the slices to come. The
  length of a slice is open; here it is that of the published code, an hour, but at least twenty
  restarts: with shorter ones, on-demand machines that come and go in each slice cost more than one
  from the start.

    R0 = 10 h, C0 = 5 h, d = 0; after 4 h 1.5 h of work are done, and there are no spot machines
    greedy waits: 3.5 h are left to do in 6 h; uniform_progress goes on demand: 1.5 < ep(4) = 2
"""

from collections.abc import Mapping
from itertools import product
from math import ceil, floor

from ...schema.errors import ProblemError
from ...schema.options import told
from ...schema.spelling import did_you_mean
from .chain import Chain
from .dynamic_program import Programs
from .job import Held, Moment, RentJob, RentPolicy, guarded

_SLICE_SECONDS, _SLICE_RESTARTS = 3600.0, 20


def on_demand(job: RentJob, now: Moment) -> Held:
    """Hold the cheapest number of on-demand machines to the end: never late, and the dearest."""
    return pace_of(job, now.place)


def greedy(job: RentJob, now: Moment) -> Held:
    """Spot machines, else wait; on demand to the end once the safety net holds."""
    return _in_time(job, now, _spot(job, now))


def time_sliced(job: RentJob, now: Moment) -> Held:
    """Spot machines or nothing, on demand once the slice's work needs it."""
    wanted, end = _spot(job, now), _slice_end(job, now.tick)
    due = job.work_seconds * min(1.0, end * job.tick_seconds / job.deadline_seconds)
    needed = due - (job.work_seconds - now.work_left_seconds)
    left = end - now.tick
    if needed > 1e-3:
        another = needed + job.restart_seconds * job.speeds[-1]
        if job.ticks_for(needed) >= left:
            wanted = _safest(job, now)
        elif not now.held.num_spot and job.ticks_for(another) >= left:
            wanted = job.last_resort(now.place)
    return _in_time(job, now, wanted)


def uniform_progress(job: RentJob, now: Moment) -> Held:
    """Spot machines, and on demand what is missing, by the work done so far."""
    wanted = _spot(job, now)
    margin = 2 * job.restart_seconds if now.held.num_on_demand else 0.0
    seconds = now.tick * job.tick_seconds + margin
    done = job.work_seconds - now.work_left_seconds
    if done < seconds * job.work_seconds / job.deadline_seconds:
        pace = pace_of(job, now.place)
        more = max(now.held.num_on_demand, pace.num_on_demand - wanted.num_spot)
        num_spot = min(wanted.num_spot, job.num_machines - more)
        wanted = Held(num_spot, more, wanted.zone if num_spot else pace.zone)
    return _in_time(job, now, wanted)


def pace_of(job: RentJob, place: int) -> Held:
    """The on-demand machines that end in time for the fewest dollars; of these the fewest.

    They are of the zone that the job is in, unless those of another one cost less.
    """
    in_time = []
    for zone, number in product(range(job.num_zones), range(1, job.num_machines + 1)):
        held = Held(0, number, zone)
        ticks = job.ticks_for(job.work_seconds, held)
        if ticks <= job.num_ticks:
            dollars = round(ticks * number * job.on_demand(zone), 9)
            in_time.append((dollars, number, zone != place, held))
    return min(in_time)[-1]


def _spot(job: RentJob, now: Moment) -> Held:
    """Hold as many spot machines as one zone has for the job, without a needless move."""
    most = [min(int(there), job.num_machines) for there in now.available]
    place = now.place
    if now.zone is None or not most[place]:
        prices = [dollars / job.rate(z) for z, dollars in enumerate(now.spot_dollars_per_hour)]
        place = min(range(job.num_zones), key=lambda zone: (-most[zone], prices[zone], zone))
    return Held(most[place], 0, place)


def _in_time(job: RentJob, now: Moment, wanted: Held) -> Held:
    """What is wanted, while there is time for it."""
    # For one machine this is the paper's safety net, to the tick: on demand to the end, once one
    # launched in the next tick might end too late.
    if job.num_machines > 1:
        return guarded(job, now, wanted)
    must = job.ticks_for(now.work_left_seconds) >= job.num_ticks - now.tick
    return _safest(job, now) if must else wanted


def _safest(job: RentJob, now: Moment) -> Held:
    """What still ends in time once the safety net holds."""
    # Spot machines that work lose nothing by going on, if none are faster: were they taken away,
    # on-demand machines launched then would still end in time.
    last = job.last_resort(now.place)
    is_fastest = job.rate(now.held.zone) == job.rate(last.zone)
    if now.held.num_spot == job.num_machines and now.pending_seconds < 1e-3 and is_fastest:
        return now.held
    return last


def _slice_end(job: RentJob, tick: int) -> int:
    """The tick at which a tick's slice ends; slices have whole ticks, the last perhaps fewer."""
    seconds = max(_SLICE_SECONDS, _SLICE_RESTARTS * job.restart_seconds)
    ticks = max(1, floor(seconds / job.tick_seconds + 1e-9))
    return min(job.num_ticks, ticks * ceil((tick + 1) / ticks))


PLAIN: Mapping[str, RentPolicy] = {
    "on_demand": on_demand,
    "greedy": greedy,
    "time_sliced": time_sliced,
    "uniform_progress": uniform_progress,
}
LEARNED = "dynamic_program"
NAMES = (*PLAIN, LEARNED)


def policy_of(name: str, job: RentJob, history: Chain | None) -> RentPolicy:
    """A policy, ready for a job.

    Raises:
        ProblemError: There is none of that name, or it needs a history and there is none.
    """
    if name in PLAIN:
        return PLAIN[name]
    if name != LEARNED:
        raise ProblemError(
            f"no rent policy {name!r}; known are {', '.join(NAMES)}",
            hint=did_you_mean(name, NAMES) or None,
        )
    if history is None:
        hint = told("add {history=FILE}, or with zones by time {learn_until=TIME}")
        raise ProblemError(f"{name} learns from a history", hint=hint)
    return Programs(job, history)
