"""Spot machines whenever there are some, on demand once there is no time to wait."""

from ..deadline import DeadlineJob, Hold, Moment, must_be_on_demand, safest


class Greedy:
    """The greedy policy of Can't Be Late (NSDI 2024)."""

    def choose(self, job: DeadlineJob, now: Moment) -> Hold:
        """Spot, else wait; on demand to the end once the safety net holds."""
        if must_be_on_demand(job, now):
            return safest(now)
        return Hold.SPOT if now.has_spot else Hold.NOTHING
