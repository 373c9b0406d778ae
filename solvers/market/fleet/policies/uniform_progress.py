"""Keep up with a straight line from the start to the deadline, with several machines.

The rules of Uniform Progress (Can't Be Late, NSDI 2024), with R0 the deadline, C0 the work and d
the pause: expected progress is ep(t) = t C0 / R0. All spot machines are taken that there are. While
the job is behind the line, on-demand machines fill up to the number that would end in time from
the start (``pace_of``); those are kept until it is ahead of ep(t + 2d). The paper has one machine,
for which this is its policy.
"""

from ..job import Fleet, FleetJob, FleetMoment, guarded
from .on_demand import pace_of


class UniformProgress:
    """Uniform Progress."""

    def choose(self, job: FleetJob, now: FleetMoment) -> Fleet:
        """Spot machines, and on demand what is missing, by the work done so far."""
        margin = 2 * job.resize_seconds if now.held.num_on_demand else 0.0
        done = job.work_seconds - now.work_left_seconds
        seconds = now.tick * job.tick_seconds + margin
        num_spot = min(now.num_available, job.num_machines)
        num_on_demand = 0
        if done < seconds * job.work_seconds / job.deadline_seconds:
            num_on_demand = max(now.held.num_on_demand, pace_of(job) - num_spot)
            num_spot = min(num_spot, job.num_machines - num_on_demand)
        return guarded(job, now, Fleet(num_spot, num_on_demand))
