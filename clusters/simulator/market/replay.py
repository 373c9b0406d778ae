"""Replay a policy on a window of a market (the model of ``solvers.market.job``).

Price strategies are compared on the same prices, beside the bound (``solvers.market.offers``).
"""

from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....schema.errors import InfeasibleError, ProblemError
from ....schema.market import HeldOffer, StrategyReplay
from ....solvers.market.job import Held, Moment, RentJob, RentPolicy
from ....solvers.market.offers import Offer, OfferHistory, Prices, bound, strategies

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


_SPARE = 1.3  # times the first guess of how much history matters


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What strategies paid, or why one could not be replayed, from a time on (since 1970 in UTC).

    ``is_final``: prices after those that were looked at could not lower the bound.
    """

    start_seconds: float
    outcomes: dict[str, StrategyReplay]
    refused: dict[str, str]
    bound_dollars: float
    is_final: bool


def strategy_replay(job: RentJob, policy: RentPolicy, prices: Prices) -> StrategyReplay:
    """Run one job from the start of the prices to its end; O(stretches x offers).

    Raises:
        ProblemError: A price that it would have to pay is unknown, or the prices end before it.
    """
    outcome = replay(job, policy, prices.is_known.T, prices.dollars_per_hour, prices.seconds)
    if outcome.is_late:
        raise ProblemError("the prices end before the job does", hint="give less work")
    zones = [held.zone for held in outcome.held]
    taken = [zone for zone, before in zip(zones, [None, *zones], strict=False) if zone != before]
    return StrategyReplay(
        dollars=outcome.used_dollars,
        seconds=outcome.seconds,
        held=tuple(_held(prices.offers[zone]) for zone in taken),
    )


def _held(offer: Offer) -> HeldOffer:
    return HeldOffer(
        **{**asdict(offer), "cloud": offer.cloud or None, "place": offer.place or None}
    )


def compare(job: RentJob, prices: Prices, *, cloud: str, device_type: str) -> Compared:
    """Replay all strategies from the start of the prices, for a job on their offers.

    Those that keep to one cloud are in ``cloud``; ``one_device`` takes a ``device_type``.

    Raises:
        ProblemError: The job cannot end before the prices do, whatever it takes.
    """
    outcomes: dict[str, StrategyReplay] = {}
    refused: dict[str, str] = {}
    for name, strategy in strategies(prices, cloud=cloud, device_type=device_type).items():
        try:
            outcomes[name] = strategy_replay(job, strategy, prices)
        except ProblemError as error:
            refused[name] = error.message
    least = bound(job, prices)
    return Compared(
        start_seconds=float(prices.edges[0]),
        outcomes=outcomes,
        refused=refused,
        bound_dollars=least.dollars,
        is_final=least.is_final,
    )


def compare_from(
    job: RentJob, history: OfferHistory, start_seconds: float, *, cloud: str, device_type: str
) -> Compared:
    """Compare on as much of a long history as matters, until the deadline at most.

    Raises:
        ProblemError: There are no prices at the start, or the job cannot end before they do.
        InfeasibleError: It cannot end by its deadline.
    """
    length = _SPARE * _first_guess(job, history.between(start_seconds, start_seconds + 1.0))
    while True:
        is_all = length >= job.deadline_seconds
        length = min(length, job.deadline_seconds)
        prices = history.between(start_seconds, start_seconds + length)
        if is_all and prices.goes_on:
            prices = replace(prices, goes_on=False)  # what comes later is too late
        try:
            compared = compare(job, prices, cloud=cloud, device_type=device_type)
        except ProblemError as error:
            if is_all:
                raise InfeasibleError(
                    f"the work cannot end within {job.deadline_seconds / 3600:.4g} h on any device "
                    "that has a price",
                    hint="give a later deadline, or less work",
                ) from error
            if not prices.goes_on:
                raise
        else:
            if not prices.goes_on or (compared.is_final and not compared.refused):
                return compared
        length *= 2


def _first_guess(job: RentJob, prices: Prices) -> float:
    """Seconds in which the cheapest offer of now costs what a job that does not move pays."""
    now = prices.dollars_per_second[0]
    seconds = job.restart_seconds + job.work_seconds / np.array(job.rates)
    known = np.isfinite(now)
    if not known.any() or not (now[known] > 0).all():
        return float(seconds.max())
    return max(float((now * seconds)[known].min() / now[known].min()), float(seconds.min()))
