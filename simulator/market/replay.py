"""Replay a policy on a window of availability (the model of ``solvers.market.deadline``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...schema.errors import ProblemError
from ...solvers.market.deadline import DeadlineJob, Hold, Moment, Policy

_DONE_SECONDS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job: ``held`` [ticks] until it ended or its deadline passed."""

    dollars: float
    is_late: bool
    num_launches: int
    held: tuple[Hold, ...]


def replay(job: DeadlineJob, policy: Policy, available: Sequence[int | None]) -> Outcome:
    """Run one job to its end; O(ticks).

    Args:
        job: The job.
        policy: Who decides.
        available: [ticks] 1 there, 0 gone; as long as the job runs.

    Raises:
        ProblemError: The window is too short, is unknown in a tick that the job runs in, or the
            policy asks for a spot machine where there is none.
    """
    held, pending, left = Hold.NOTHING, 0.0, job.work_seconds
    history: list[Hold] = []
    launches = length = 0
    last: int | None = None
    while left > _DONE_SECONDS and len(history) < job.num_ticks:
        there = _known(available, len(history))
        length = length + 1 if there == last else 1
        last = there
        if held is Hold.SPOT and not there:
            held = Hold.NOTHING
        now = Moment(
            tick=len(history),
            work_left_seconds=left,
            held=held,
            pending_seconds=pending,
            has_spot=bool(there),
            run_length=length,
        )
        asked = policy.choose(job, now)
        if asked is Hold.SPOT and not there:
            raise ProblemError(f"tick {now.tick}: the policy asks for spot, and there is none")
        if asked is not held and asked is not Hold.NOTHING:
            pending = job.restart_seconds
            launches += 1
        held = asked
        history.append(held)
        if held is not Hold.NOTHING:
            worked = max(job.tick_seconds - pending, 0.0)
            pending = max(pending - job.tick_seconds, 0.0)
            left -= min(worked, left)
    return Outcome(
        dollars=sum(map(job.tick_dollars, history)),
        is_late=left > _DONE_SECONDS,
        num_launches=launches,
        held=tuple(history),
    )


def _known(available: Sequence[int | None], tick: int) -> int:
    if tick >= len(available):
        raise ProblemError(f"the window ends after {len(available)} ticks, while the job runs")
    there = available[tick]
    if there is None:
        raise ProblemError(f"tick {tick} of the window is unknown; take another window")
    return there
