"""The strategies of figure 6.5 of Narayanan's thesis: what each may take, and whether it moves.

At the start each takes, of the offers that it may take, the one with the most work per dollar.
``dynamic`` compares again whenever a price changes. It moves if the rest of the work, with the cost
of the move, would be cheaper at the present prices. Under a deadline only offers count on which the
rest ends in time, if there are any; else the one that ends soonest.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from ...schema.market import utc_text
from .job import Held, Moment, RentJob
from .offers import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceStrategy:
    """A policy on offers, each of which is a zone with one machine while its price is known.

    ``may_take`` [offers] says which are its own; ``moves`` whether it looks at prices again.
    """

    prices: Prices
    may_take: NDArray[np.bool_]
    moves: bool = False

    def __call__(self, job: RentJob, now: Moment) -> Held:
        """The offer with the least dollars for the rest at the prices of now.

        Raises:
            ProblemError: No price is known of what it may hold.
        """
        if now.held.num_spot and not self.moves:
            return now.held
        best = None
        if self.moves or now.zone is None:
            best = self._best(job, now)
        if best is None:
            when = utc_text(float(self.prices.edges[now.tick]))
            raise ProblemError(f"at {when} no price is known of what the job may hold")
        return Held(1, 0, best)

    def _best(self, job: RentJob, now: Moment) -> int | None:
        rates, prices = np.array(job.rates), np.asarray(now.spot_dollars_per_hour)
        launches = np.full(len(rates), job.restart_seconds)
        held = now.held.zone if now.held.num_spot else None
        if held is not None:
            launches[held] = now.pending_seconds
        seconds = now.work_left_seconds / rates + launches
        dollars = prices / 3600 * seconds
        if now.zone is not None and job.leaving_dollars(now.zone):
            away = self.prices.clouds != job.clouds[now.zone]
            dollars = dollars + away * job.leaving_dollars(now.zone)
        own = self.may_take & np.isfinite(dollars)
        left = job.deadline_seconds - float(self.prices.edges[now.tick] - self.prices.edges[0])
        in_time = own & (seconds <= left * (1 + 1e-12))
        if not in_time.any():
            in_time = own & (seconds <= seconds[own].min(initial=np.inf))
        dollars = np.where(in_time, dollars, np.inf)
        best = int(np.argmin(dollars))
        if not np.isfinite(dollars[best]):
            return None
        # A tie is no reason to move.
        return held if held is not None and dollars[held] <= dollars[best] else best


def strategies(
    prices: Prices, *, cloud: str = "aws", device_type: str = "V100"
) -> dict[str, PriceStrategy]:
    """The five by name, in the order of the figure; ``one_device`` is the thesis's 1xV100."""
    here, anything = prices.clouds == cloud, np.ones(len(prices.offers), np.bool_)
    alone = np.array([offer.num_devices == 1 for offer in prices.offers])
    is_type = np.array([offer.device_type == device_type for offer in prices.offers])
    return {
        "one_device": PriceStrategy(prices=prices, may_take=here & alone & is_type),
        "gpu_type": PriceStrategy(prices=prices, may_take=here & alone),
        "multi_gpu": PriceStrategy(prices=prices, may_take=here),
        "multi_cloud": PriceStrategy(prices=prices, may_take=anything),
        "dynamic": PriceStrategy(prices=prices, may_take=anything, moves=True),
    }
