"""Replay a policy on windows of availability (the model of ``solvers.market.deadline``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...schema.errors import ProblemError
from ...solvers.market.deadline import DeadlineJob, Held, Hold, Moment, Policy

_DONE_SECONDS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job: ``held`` [ticks] until it ended or its deadline passed."""

    dollars: float
    is_late: bool
    num_launches: int
    num_moves: int
    held: tuple[Held, ...]


def replay(job: DeadlineJob, policy: Policy, available: Sequence[Sequence[int]]) -> Outcome:
    """Run one job to its end; O(ticks x zones).

    Args:
        job: The job.
        policy: Who decides.
        available: [zones][ticks] 1 there, 0 gone; as long as the job runs.

    Raises:
        ProblemError: A window is too short, or the policy asks for a spot machine where there is
            none.
    """
    held, pending = Hold.NOTHING, 0.0
    place: int | None = None
    left, dollars = job.work_seconds, 0.0
    history: list[Held] = []
    launches = moves = 0
    lengths = [0] * job.num_zones
    while left > _DONE_SECONDS and len(history) < job.num_ticks:
        tick = len(history)
        if tick >= min(map(len, available)):
            raise ProblemError(f"a window ends after {tick} ticks, while the job runs")
        there = tuple(bool(window[tick]) for window in available)
        lengths = [
            length + 1 if tick and window[tick] == window[tick - 1] else 1
            for length, window in zip(lengths, available, strict=True)
        ]
        if held is Hold.SPOT and place is not None and not there[place]:
            held = Hold.NOTHING
        now = Moment(
            tick=tick,
            work_left_seconds=left,
            hold=held,
            zone=place,
            pending_seconds=pending,
            has_spot=there,
            run_lengths=tuple(lengths),
        )
        asked, zone = policy.choose(job, now)
        if asked is Hold.SPOT and not there[zone]:
            raise ProblemError(
                f"tick {tick}: the policy asks for spot in zone {zone}, and there is none"
            )
        if asked is not Hold.NOTHING and (asked, zone) != (held, place):
            pending = job.restart_seconds
            dollars += job.moving_dollars(place, zone)
            moves += place is not None and place != zone
            launches += 1
            place = zone
        held = asked
        history.append(Held(asked, zone))
        if held is not Hold.NOTHING:
            dollars += job.tick_dollars(history[-1])
            left -= min(max(job.tick_seconds - pending, 0.0), left)
            pending = max(pending - job.tick_seconds, 0.0)
    return Outcome(
        dollars=dollars,
        is_late=left > _DONE_SECONDS,
        num_launches=launches,
        num_moves=moves,
        held=tuple(history),
    )
