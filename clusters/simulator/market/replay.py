"""Replay a policy on a window of a market (the model of ``solvers.market.job``)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....schema.errors import ProblemError
from ....solvers.market.job import Held, Moment, RentJob, RentPolicy

_DONE_SECONDS = 1e-3
_JUST = 1e-6  # seconds that rounding may add


@dataclass(frozen=True, slots=True, kw_only=True)
class RentOutcome:
    """What became of a job: ``held`` [ticks] until it ended or its deadline passed.

    A launch is any change to other machines, also by loss, and costs a restart; a move is one in
    another zone. ``dollars`` pay the last tick to its end, ``used_dollars`` to the job's, at
    ``seconds``.
    """

    dollars: float
    used_dollars: float
    seconds: float
    is_late: bool
    num_launches: int
    num_moves: int
    held: tuple[Held, ...]


def replay(
    job: RentJob,
    policy: RentPolicy,
    available: ArrayLike,
    spot_dollars_per_hour: ArrayLike | None = None,
    tick_seconds: ArrayLike | None = None,
) -> RentOutcome:
    """Run one job to its end, or to its deadline; O(ticks x zones).

    Args:
        job: The job.
        policy: Who decides.
        available: [zones, ticks] spot machines that can be held; as long as the job runs.
        spot_dollars_per_hour: [zones, ticks] of one machine, where prices move.
        tick_seconds: [ticks] where they differ; the last one ends by the deadline.

    Raises:
        ProblemError: A window is too short, or the policy asks for what there is not.
    """
    there = np.asarray(available)
    prices = None if spot_dollars_per_hour is None else np.asarray(spot_dollars_per_hour)
    lengths = run_lengths(there) if tick_seconds is None else np.ones_like(there)
    seconds_of = None if tick_seconds is None else np.asarray(tick_seconds).tolist()
    most_ticks = job.num_ticks if seconds_of is None else len(seconds_of)
    held, place, pending = Held(0, 0), None, 0.0
    left, dollars, used, seconds = job.work_seconds, 0.0, 0.0, 0.0
    history: list[Held] = []
    launches = moves = 0
    enough = _DONE_SECONDS if tick_seconds is None else 0.0
    while left > enough and len(history) < most_ticks:
        tick = len(history)
        if tick >= there.shape[1]:
            raise ProblemError(f"a window ends after {tick} ticks, while the job runs")
        now_there = there[:, tick]
        length = job.tick_seconds if seconds_of is None else seconds_of[tick]
        lost = held.num_spot > now_there[held.zone]
        if lost:
            held = held._replace(num_spot=int(now_there[held.zone]))
            pending = job.restart_seconds if held.num_machines else 0.0
        now = Moment(
            tick=tick,
            work_left_seconds=left,
            held=held,
            zone=place,
            pending_seconds=pending,
            available=now_there,
            run_lengths=lengths[:, tick],
            spot_dollars_per_hour=job.spot_dollars_per_hour if prices is None else prices[:, tick],
        )
        asked = policy(job, now)
        num_spot, num_on_demand, zone = asked
        most = now_there[zone]
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
        worked = length
        if held.num_machines:
            rate = float(job.dollars_per_hour(held, now.spot_dollars_per_hour))
            needed = pending + left / job.speed(held.num_machines, held.zone)
            worked = min(needed, length)
            used = dollars + rate * worked / 3600
            dollars += rate * length / 3600
            left = 0.0 if needed <= length + _JUST else left - job.worked(held, pending, length)
            pending = max(pending - length, 0.0)
        seconds += worked
    return RentOutcome(
        dollars=dollars,
        used_dollars=used,
        seconds=seconds,
        is_late=left > enough,
        num_launches=launches,
        num_moves=moves,
        held=tuple(history),
    )


def run_lengths(available: NDArray[np.int64]) -> NDArray[np.int64]:
    """For how many ticks it has been so [zones, ticks], from the first tick on."""
    ticks = np.arange(available.shape[1])
    turns = np.ones(available.shape, np.bool_)
    turns[:, 1:] = available[:, 1:] != available[:, :-1]
    return ticks - np.maximum.accumulate(np.where(turns, ticks, 0), axis=1) + 1
