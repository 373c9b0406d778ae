"""The strategies of figure 6.5 of Narayanan's thesis: what each may take, and whether it moves.

At the start each takes, of the offers that it may take, the one with the most work per dollar.
``dynamic`` compares again whenever a price changes. It moves if the rest of the work, with the cost
of the move, would be cheaper at the present prices.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .offers import MovingJob, Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceStrategy:
    """What a strategy may take. ``cloud`` and ``device_type`` None: any."""

    cloud: str | None
    device_type: str | None
    is_one_device: bool
    moves: bool = False

    def may_take(self, prices: Prices) -> NDArray[np.bool_]:
        """[offers] which are its own."""
        allowed = prices.is_one_device | (not self.is_one_device)
        if self.cloud is not None:
            allowed &= prices.clouds == self.cloud
        if self.device_type is not None:
            allowed &= prices.device_types == self.device_type
        return allowed


def strategies(*, cloud: str = "aws", device_type: str = "V100") -> dict[str, PriceStrategy]:
    """The five by name, in the order of the figure; ``one_device`` is the thesis's 1xV100."""
    return {
        "one_device": PriceStrategy(cloud=cloud, device_type=device_type, is_one_device=True),
        "gpu_type": PriceStrategy(cloud=cloud, device_type=None, is_one_device=True),
        "multi_gpu": PriceStrategy(cloud=cloud, device_type=None, is_one_device=False),
        "multi_cloud": PriceStrategy(cloud=None, device_type=None, is_one_device=False),
        "dynamic": PriceStrategy(cloud=None, device_type=None, is_one_device=False, moves=True),
    }


def best_offer(
    strategy: PriceStrategy,
    job: MovingJob,
    prices: Prices,
    *,
    stretch: int,
    held: int | None,
    pending_seconds: float,
    work_left: float,
) -> int | None:
    """The offer to hold from a stretch on: the least dollars for the rest at its prices.

    Args:
        strategy: Whose choice it is; one that does not move keeps what it holds.
        job: The job.
        prices: [stretches, offers] of them all.
        stretch: Which one begins.
        held: The offer held so far; None at the start.
        pending_seconds: What is still to come of its restart.
        work_left: Of the job.

    Returns:
        Its index; None where no offer that it may take has a known price.
    """
    if held is not None and not strategy.moves:
        return held
    dollars = _rest_dollars(job, prices, stretch, held, pending_seconds, work_left)
    dollars = np.where(strategy.may_take(prices) & np.isfinite(dollars), dollars, np.inf)
    best = int(np.argmin(dollars))
    if not np.isfinite(dollars[best]):
        return None
    # A tie is no reason to move.
    return held if held is not None and dollars[held] <= dollars[best] else best


def _rest_dollars(
    job: MovingJob,
    prices: Prices,
    stretch: int,
    held: int | None,
    pending_seconds: float,
    work_left: float,
) -> NDArray[np.float64]:
    """[offers] dollars for the rest of the work on each, at the prices of a stretch."""
    rates = np.array([job.work_per_second[offer.device_type] for offer in prices.offers])
    launches = np.full(len(rates), job.restart_seconds)
    if held is not None:
        launches[held] = pending_seconds
    dollars = prices.dollars_per_second[stretch] * (work_left / rates + launches)
    if held is not None:
        home = prices.offers[held].cloud
        away = prices.clouds != home
        dollars = dollars + away * job.leaving_dollars(home)
    return np.asarray(dollars)
