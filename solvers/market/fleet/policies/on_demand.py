"""As many on-demand machines from start to end as are cheapest: never late, and no spot."""

from ..job import Fleet, FleetJob, FleetMoment


def pace_of(job: FleetJob) -> int:
    """How many machines end in time for the fewest dollars; of these the fewest machines."""
    in_time = [
        (ticks * job.tick_dollars(Fleet(0, number)), number)
        for number in range(1, job.num_machines + 1)
        if (ticks := job.ticks_for(job.work_seconds, number)) <= job.num_ticks
    ]
    return min(in_time)[1]


class OnDemand:
    """Always on demand."""

    def choose(self, job: FleetJob, now: FleetMoment) -> Fleet:
        """The same number in every tick."""
        return Fleet(0, pace_of(job))
