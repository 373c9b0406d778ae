"""Price strategies for one job on the same prices, beside the bound (``solvers.market.offers``)."""

from dataclasses import asdict, dataclass, replace

import numpy as np

from ....schema.errors import InfeasibleError, ProblemError
from ....schema.market import HeldOffer, StrategyReplay
from ....solvers.market.job import RentJob, RentPolicy
from ....solvers.market.offers import Offer, OfferHistory, Prices
from ....solvers.market.price_strategies import bound, strategies
from .replay import replay

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
