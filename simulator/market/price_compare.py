"""Every price strategy for one job on the same prices, beside the bound."""

from dataclasses import asdict, dataclass

import numpy as np

from ...schema.errors import ProblemError
from ...schema.market import HeldOffer, PriceReport, StrategyReplay, utc_text
from ...solvers.market.offers import History, MovingJob, Offer, Prices
from ...solvers.market.price_bound import bound
from ...solvers.market.price_strategies import strategies
from .price_replay import PriceOutcome, replay

_SPARE = 1.3  # times the first guess of how much history matters


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceComparison:
    """What each strategy would have paid; ``refused`` says why one could not be replayed."""

    start_seconds: float
    bound_dollars: float
    outcomes: dict[str, PriceOutcome]
    refused: dict[str, str]


def compare(job: MovingJob, prices: Prices, *, cloud: str, device_type: str) -> PriceComparison:
    """Replay all strategies from the start of the prices.

    Args:
        job: The job.
        prices: From its start on.
        cloud: Where those that keep to one cloud are.
        device_type: What ``one_device`` takes.

    Raises:
        ProblemError: The job cannot end before the prices do, whatever it takes.
    """
    return _within(job, prices, cloud, device_type)[0]


def compare_from(
    job: MovingJob, history: History, start_seconds: float, *, cloud: str, device_type: str
) -> PriceComparison:
    """The same on as much of a long history as matters.

    Args:
        job: The job.
        history: Of all offers.
        start_seconds: When it starts, since 1970 in UTC.
        cloud: Where those that keep to one cloud are.
        device_type: What ``one_device`` takes.

    Raises:
        ProblemError: There are no prices at the start, or the job cannot end before they do.
    """
    length = _SPARE * _first_guess(job, history.between(start_seconds, start_seconds + 1.0))
    while True:
        prices = history.between(start_seconds, start_seconds + length)
        try:
            compared, is_final = _within(job, prices, cloud, device_type)
        except ProblemError:
            if not prices.goes_on:
                raise
        else:
            if not prices.goes_on or (is_final and not compared.refused):
                return compared
        length *= 2


def report_of(compared: PriceComparison, job: MovingJob, *, work_hours: float) -> PriceReport:
    """The comparison as a record."""
    return PriceReport(
        start=utc_text(compared.start_seconds),
        work_hours=work_hours,
        rates=dict(job.work_per_second),
        restart_seconds=job.restart_seconds,
        cloud_move_dollars=job.cloud_move_dollars,
        egress_dollars=dict(job.egress_dollars),
        bound_dollars=compared.bound_dollars,
        outcomes={
            name: StrategyReplay(
                dollars=outcome.dollars,
                seconds=outcome.seconds,
                held=tuple(map(_held, outcome.held)),
            )
            for name, outcome in compared.outcomes.items()
        },
        refused=compared.refused,
    )


def _held(offer: Offer) -> HeldOffer:
    return HeldOffer(
        **{**asdict(offer), "cloud": offer.cloud or None, "place": offer.place or None}
    )


def _first_guess(job: MovingJob, prices: Prices) -> float:
    """Seconds in which the cheapest offer of now costs what a job that does not move pays."""
    now = prices.dollars_per_second[0]
    rates = [job.work_per_second[offer.device_type] for offer in prices.offers]
    seconds = job.restart_seconds + job.work / np.array(rates)
    known = np.isfinite(now)
    if not known.any() or not (now[known] > 0).all():
        return float(seconds.max())
    return max(float((now * seconds)[known].min() / now[known].min()), float(seconds.min()))


def _within(
    job: MovingJob, prices: Prices, cloud: str, device_type: str
) -> tuple[PriceComparison, bool]:
    """All strategies on some prices, and whether prices after them could not lower the bound."""
    outcomes: dict[str, PriceOutcome] = {}
    refused: dict[str, str] = {}
    for name, strategy in strategies(cloud=cloud, device_type=device_type).items():
        try:
            outcomes[name] = replay(job, strategy, prices)
        except ProblemError as error:
            refused[name] = error.message
    least = bound(job, prices)
    compared = PriceComparison(
        start_seconds=float(prices.edges[0]),
        bound_dollars=least.dollars,
        outcomes=outcomes,
        refused=refused,
    )
    return compared, least.is_final
