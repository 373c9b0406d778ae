"""Every price strategy for one job on the same prices, beside the bound."""

from dataclasses import dataclass

from ...schema.errors import ProblemError
from ...solvers.market.offers import MovingJob, Prices
from ...solvers.market.price_bound import least_dollars
from ...solvers.market.price_strategies import strategies
from .price_replay import PriceOutcome, replay


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
    outcomes: dict[str, PriceOutcome] = {}
    refused: dict[str, str] = {}
    for name, strategy in strategies(cloud=cloud, device_type=device_type).items():
        try:
            outcomes[name] = replay(job, strategy, prices)
        except ProblemError as error:
            refused[name] = error.message
    return PriceComparison(
        start_seconds=float(prices.edges[0]),
        bound_dollars=least_dollars(job, prices),
        outcomes=outcomes,
        refused=refused,
    )
