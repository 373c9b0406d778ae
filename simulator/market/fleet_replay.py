"""Replay a policy for an elastic job on a trace (the model of ``solvers.market.fleet.job``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...schema.errors import ProblemError
from ...solvers.market.fleet.job import Fleet, FleetJob, FleetMoment, FleetPolicy

_DONE_SECONDS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """What became of a job: ``held`` [ticks] until it ended or its deadline passed."""

    dollars: float
    is_late: bool
    num_changes: int
    held: tuple[Fleet, ...]


def replay(job: FleetJob, policy: FleetPolicy, available: Sequence[int]) -> FleetOutcome:
    """Run one job to its end; O(ticks).

    Args:
        job: The job.
        policy: Who decides.
        available: [ticks] spot machines that can be held; as long as the job runs.

    Raises:
        ProblemError: The trace is too short, or the policy asks for what there is not.
    """
    held, pending, left = Fleet(0, 0), 0.0, job.work_seconds
    history: list[Fleet] = []
    changes = 0
    while left > _DONE_SECONDS and len(history) < job.num_ticks:
        tick = len(history)
        if tick >= len(available):
            raise ProblemError(f"the trace ends after {tick} ticks, while the job runs")
        there = available[tick]
        lost = held.num_spot > there
        if lost:
            held = Fleet(there, held.num_on_demand)
            pending = job.resize_seconds if held.num_machines else 0.0
        now = FleetMoment(
            tick=tick,
            work_left_seconds=left,
            held=held,
            pending_seconds=pending,
            num_available=there,
        )
        asked = policy.choose(job, now)
        if asked.num_spot > there or asked.num_machines > job.num_machines or min(asked) < 0:
            raise ProblemError(
                f"tick {tick}: the policy asks for {asked.num_spot} spot and "
                f"{asked.num_on_demand} on-demand machines; {there} spot machines are there, and "
                f"the job can use {job.num_machines}"
            )
        if asked != held:
            pending = job.resize_seconds if asked.num_machines else 0.0
        changes += lost or asked != held
        held = asked
        history.append(held)
        left -= min(job.worked(held, pending), left)
        pending = max(pending - job.tick_seconds, 0.0)
    return FleetOutcome(
        dollars=sum(map(job.tick_dollars, history)),
        is_late=left > _DONE_SECONDS,
        num_changes=changes,
        held=tuple(history),
    )
