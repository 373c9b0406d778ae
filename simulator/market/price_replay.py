"""Replay a price strategy on price histories (the model of ``solvers.market.offers``)."""

from dataclasses import dataclass

import numpy as np

from ...schema.errors import ProblemError
from ...schema.market import utc_text
from ...solvers.market.offers import MovingJob, Offer, Prices
from ...solvers.market.price_strategies import PriceStrategy, best_offer


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOutcome:
    """What a job cost, how long it took, and what it held in turn."""

    dollars: float
    seconds: float
    held: tuple[Offer, ...]

    @property
    def num_moves(self) -> int:
        """Launches after the first."""
        return len(self.held) - 1


def replay(job: MovingJob, strategy: PriceStrategy, prices: Prices) -> PriceOutcome:
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
            return PriceOutcome(
                dollars=float(dollars + price * needed),
                seconds=float(prices.edges[stretch] + needed - prices.edges[0]),
                held=tuple(taken),
            )
        dollars += price * length
        left -= max(length - restart, 0.0) * rate
        restart = max(restart - length, 0.0)
    raise ProblemError("the prices end before the job does", hint="give less work")
