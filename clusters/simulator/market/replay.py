"""Replay a policy on windows of availability (the model of ``solvers.market.deadline``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ....schema.errors import ProblemError
from ....solvers.market.deadline import DeadlineJob, Held, Moment, Policy
from ....solvers.market.offline import prices_in

_DONE_SECONDS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job: ``held`` [ticks] until it ended or its deadline passed.

    A launch is any change to other machines, also by loss, and costs a restart; a move is one in
    another zone. The last tick is paid to its end; ``unused_dollars`` of that are for what is after
    the job's end, at ``seconds``.
    """

    dollars: float
    seconds: float
    unused_dollars: float
    is_late: bool
    num_launches: int
    num_moves: int
    held: tuple[Held, ...]


def replay(
    job: DeadlineJob,
    policy: Policy,
    available: Sequence[Sequence[int]],
    spot_dollars_per_hour: Sequence[Sequence[float]] | None = None,
) -> Outcome:
    """Run one job to its end; O(ticks x zones).

    Args:
        job: The job.
        policy: Who decides.
        available: [zones][ticks] spot machines that can be held; as long as the job runs.
        spot_dollars_per_hour: [zones][ticks] of one machine, where prices move.

    Raises:
        ProblemError: A window is too short, or the policy asks for what there is not.
    """
    held, pending = Held(0, 0), 0.0
    place: int | None = None
    left, dollars = job.work_seconds, 0.0
    history: list[Held] = []
    launches = moves = 0
    unused = 0.0  # part of the last tick
    lengths = [0] * job.num_zones
    while left > _DONE_SECONDS and len(history) < job.num_ticks:
        tick = len(history)
        if tick >= min(map(len, available)):
            raise ProblemError(f"a window ends after {tick} ticks, while the job runs")
        there = tuple(window[tick] for window in available)
        job = job.at(prices_in(spot_dollars_per_hour, tick))
        lengths = [
            length + 1 if tick and window[tick] == window[tick - 1] else 1
            for length, window in zip(lengths, available, strict=True)
        ]
        lost = held.num_spot > there[held.zone]
        if lost:
            held = held._replace(num_spot=there[held.zone])
            pending = job.restart_seconds if held.num_machines else 0.0
        now = Moment(
            tick=tick,
            work_left_seconds=left,
            held=held,
            zone=place,
            pending_seconds=pending,
            available=there,
            run_lengths=tuple(lengths),
        )
        asked = policy(job, now)
        num_spot, num_on_demand, zone = asked
        most = there[zone]
        if num_spot > most or asked.num_machines > job.num_machines or min(asked) < 0:
            raise ProblemError(
                f"tick {tick}: the policy asks for {num_spot} spot and {num_on_demand} on-demand "
                f"machines in zone {zone}; {most} spot machines are there, and the job can use "
                f"{job.num_machines}"
            )
        if asked.num_machines and (lost or asked != held):
            if asked != held:
                pending = job.restart_seconds
            dollars += job.moving_dollars(place, zone)
            moves += place is not None and place != zone
            launches += 1
            place = zone
        held = asked
        history.append(held)
        if held.num_machines:
            dollars += job.tick_dollars(held)
            needed = pending + left / job.speed(held.num_machines, held.zone)
            unused = max(1 - needed / job.tick_seconds, 0.0)
            left -= min(job.worked(held, pending), left)
            pending = max(pending - job.tick_seconds, 0.0)
    return Outcome(
        dollars=dollars,
        seconds=(len(history) - unused) * job.tick_seconds,
        unused_dollars=unused * job.tick_dollars(held),
        is_late=left > _DONE_SECONDS,
        num_launches=launches,
        num_moves=moves,
        held=tuple(history),
    )
