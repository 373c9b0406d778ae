"""Keep up with a straight line from the start to the deadline (Can't Be Late, NSDI 2024).

With R0 the deadline, C0 the work and d the restart, expected progress is ep(t) = t C0 / R0. A spot
machine is taken when there is one, and kept until it is lost. Without one the job waits while it is
ahead of ep(t), and takes an on-demand machine when it is behind. It stays on demand until it is
ahead of ep(t + 2d), so that it does not pay for restarts one after another. Once the time left is
hardly enough, it is on demand to the end.
"""

from ..deadline import DeadlineJob, Hold, Moment, must_be_on_demand, safest


class UniformProgress:
    """Uniform Progress."""

    def choose(self, job: DeadlineJob, now: Moment) -> Hold:
        """Spot, on demand or nothing, by the work done so far."""
        if must_be_on_demand(job, now):
            return safest(now)
        waiting = Hold.SPOT if now.has_spot else Hold.NOTHING
        if now.held is Hold.ON_DEMAND:
            ahead = self._is_ahead(job, now, 2 * job.restart_seconds)
            return waiting if ahead else Hold.ON_DEMAND
        if now.has_spot or self._is_ahead(job, now, 0.0):
            return waiting
        return Hold.ON_DEMAND

    def _is_ahead(self, job: DeadlineJob, now: Moment, margin_seconds: float) -> bool:
        done = job.work_seconds - now.work_left_seconds
        seconds = now.tick * job.tick_seconds + margin_seconds
        return done >= seconds * job.work_seconds / job.deadline_seconds
