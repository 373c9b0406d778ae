"""Greedy within slices of time, each with its share of the work (Can't Be Late, NSDI 2024).

By the end of a slice at time t, the work t C0 / R0 must be done, where R0 is the deadline and C0
the work. Within a slice it is the greedy policy with that deadline: spot machines while there is
time to wait, an on-demand machine once a launch would hardly end the slice's work in time. Work
that is done ahead counts for the slices to come. The length of a slice is open; here it is that of
the published code, an hour, but at least twenty restarts: with shorter ones, on-demand machines
that come and go in each slice cost more than one from the start.
"""

from math import ceil, floor

from ..deadline import DeadlineJob, Hold, Moment, must_be_on_demand, safest

_SLICE_SECONDS, _SLICE_RESTARTS = 3600.0, 20


class TimeSliced:
    """Time Sliced."""

    def choose(self, job: DeadlineJob, now: Moment) -> Hold:
        """Spot or nothing, on demand once the slice's work needs it."""
        if must_be_on_demand(job, now):
            return safest(now)
        end = _slice_end(job, now.tick)
        due = job.work_seconds * min(1.0, end * job.tick_seconds / job.deadline_seconds)
        needed = due - (job.work_seconds - now.work_left_seconds)
        waiting = Hold.SPOT if now.has_spot else Hold.NOTHING
        if needed <= 1e-3:
            return waiting
        left = end - now.tick
        if job.ticks_for(needed) >= left:
            return safest(now)
        if now.held is not Hold.SPOT and job.ticks_for(needed + job.restart_seconds) >= left:
            return Hold.ON_DEMAND
        return waiting


def _slice_end(job: DeadlineJob, tick: int) -> int:
    """The tick at which a tick's slice ends; slices have whole ticks, the last perhaps fewer."""
    seconds = max(_SLICE_SECONDS, _SLICE_RESTARTS * job.restart_seconds)
    ticks = max(1, floor(seconds / job.tick_seconds + 1e-9))
    return min(job.num_ticks, ticks * ceil((tick + 1) / ticks))
