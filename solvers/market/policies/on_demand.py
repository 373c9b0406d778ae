"""An on-demand machine from the start: never late, and the dearest."""

from ..deadline import DeadlineJob, Hold, Moment


class OnDemand:
    """Always on demand."""

    def choose(self, job: DeadlineJob, now: Moment) -> Hold:
        """On demand, whatever there is."""
        return Hold.ON_DEMAND
