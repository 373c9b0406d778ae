"""All spot machines that there are; all machines on demand once there is no time left for less.

The greedy policy of Can't Be Late (NSDI 2024), for several machines.
"""

from ..job import Fleet, FleetJob, FleetMoment, guarded


class Greedy:
    """Spot machines, else wait."""

    def choose(self, job: FleetJob, now: FleetMoment) -> Fleet:
        """As many spot machines as the job can use."""
        return guarded(job, now, Fleet(min(now.num_available, job.num_machines), 0))
