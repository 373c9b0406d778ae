"""A policy for one zone that takes a spot machine of any zone for one of its own.

What to hold is the other policy's choice, as if all zones were one. A new spot machine is of the
zone that the job is in, if that has one, else of the cheapest zone that has one. This is how the
published policies are extended to several zones: a job that loses its machine goes on elsewhere.
"""

from dataclasses import dataclass

from ...deadline import Hold, Policy
from ..job import Held, ZonesJob, ZonesMoment


@dataclass(frozen=True, slots=True)
class Anywhere:
    """``policy`` over all zones at once."""

    policy: Policy

    def choose(self, job: ZonesJob, now: ZonesMoment) -> Held:
        """What the policy holds, where it is cheapest without a needless move."""
        hold = self.policy.choose(job.job, now.anywhere())
        if hold is not Hold.SPOT or now.hold is Hold.SPOT:
            return Held(hold, now.zone or 0)
        if now.zone is not None and now.has_spot[now.zone]:
            return Held(hold, now.zone)
        prices = job.spot_dollars_per_hour
        there = [place for place in range(job.num_zones) if now.has_spot[place]]
        return Held(hold, min(there, key=lambda place: (prices[place], place)))
