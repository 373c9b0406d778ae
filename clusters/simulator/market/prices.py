"""Price strategies for one job on the same prices, beside the bound (``solvers.market.offers``)."""

from dataclasses import asdict

import numpy as np

from ....schema.errors import ProblemError
from ....schema.market import HeldOffer, PriceReport, StrategyReplay, utc_text
from ....solvers.market.offers import History, MovingJob, Offer, Prices
from ....solvers.market.price_bound import bound
from ....solvers.market.price_strategies import PriceStrategy, best_offer, strategies

_SPARE = 1.3  # times the first guess of how much history matters


def replay(job: MovingJob, strategy: PriceStrategy, prices: Prices) -> StrategyReplay:
    """Run one job from the start of the prices to its end; O(stretches x offers).

    Raises:
        ProblemError: A price that it would have to pay is unknown, or the prices end before it.
    """
    left, restart, dollars = job.work, 0.0, 0.0
    held: int | None = None
    taken: list[Offer] = []
    for stretch, length in enumerate(prices.seconds):
        chosen = best_offer(
            strategy,
            job,
            prices,
            stretch=stretch,
            held=held,
            pending_seconds=restart,
            work_left=left,
        )
        price = np.nan if chosen is None else prices.dollars_per_second[stretch, chosen]
        if chosen is None or np.isnan(price):
            when = utc_text(float(prices.edges[stretch]))
            raise ProblemError(f"at {when} no price is known of what the job may hold")
        if chosen != held:
            if held is not None and prices.offers[held].cloud != prices.offers[chosen].cloud:
                dollars += job.leaving_dollars(prices.offers[held].cloud)
            held, restart = chosen, job.restart_seconds
            taken.append(prices.offers[chosen])
        rate = job.work_per_second[prices.offers[chosen].device_type]
        needed = restart + left / rate
        if needed <= length:
            return StrategyReplay(
                dollars=float(dollars + price * needed),
                seconds=float(prices.edges[stretch] + needed - prices.edges[0]),
                held=tuple(map(_held, taken)),
            )
        dollars += price * length
        left -= max(length - restart, 0.0) * rate
        restart = max(restart - length, 0.0)
    raise ProblemError("the prices end before the job does", hint="give less work")


def compare(job: MovingJob, prices: Prices, *, cloud: str, device_type: str) -> PriceReport:
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
) -> PriceReport:
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
) -> tuple[PriceReport, bool]:
    """All strategies on some prices, and whether prices after them could not lower the bound."""
    outcomes: dict[str, StrategyReplay] = {}
    refused: dict[str, str] = {}
    for name, strategy in strategies(cloud=cloud, device_type=device_type).items():
        try:
            outcomes[name] = replay(job, strategy, prices)
        except ProblemError as error:
            refused[name] = error.message
    least = bound(job, prices)
    report = PriceReport(
        start=utc_text(float(prices.edges[0])),
        work_hours=job.work / next(iter(job.work_per_second.values())) / 3600,
        rates=dict(job.work_per_second),
        restart_seconds=job.restart_seconds,
        cloud_move_dollars=job.cloud_move_dollars,
        egress_dollars=dict(job.egress_dollars),
        bound_dollars=least.dollars,
        outcomes=outcomes,
        refused=refused,
    )
    return report, least.is_final
