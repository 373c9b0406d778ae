"""Check by weak duality that water filling raised every level as far as possible (thesis 5.4.3).

A job was stopped correctly if it has reached its maximum, or if some prices of the certificate
prove it. Prices prove it if the whole pool costs no more at these prices than the throughputs of
this job and of the jobs that stopped before it. More for this job would then have to be taken
from one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, inf

import numpy as np
from numpy.typing import NDArray

from ...schema.jobs import Allocation, LevelPrices
from .allocation_bounds import priced_capacity
from .allocation_policies import Floats, Pool
from .judges import has_levels, judge_of, rising

# No job could have risen by more than this fraction of its throughput, or than twice this fraction
# of its best throughput.
TOLERANCE = 1e-5
# The pool's worth at the prices must be paid up to this fraction, or twice the certificate's gap.
SLACK = 2e-9
# Jobs whose stopping times differ by less than this fraction stopped together.
TOGETHER = 1e-6


def unproved_levels(allocation: Allocation, pool: Pool, reached: dict[str, float]) -> list[str]:
    """List the jobs for which no prices of the certificate prove that they could rise no further.

    Args:
        allocation: The allocation with its certificate.
        pool: The problem as the policy sees it.
        reached: Effective throughput of each job, steps per second.
    """
    if not has_levels(allocation) or allocation.certificate.bound is None:
        return []
    policy = judge_of(allocation.policy)
    if policy is not None and policy.sees is not None:
        pool = policy.sees(pool)
    known = rising(allocation, pool)
    if known is None:
        return []
    unit, tree = known
    has, stops = tree.times({name: reached[name] / unit[name] for name in pool.jobs})
    final = _Final(
        pool=pool,
        reached=_by_job(reached, pool),
        has=_by_job(has, pool),
        stops=_by_job(stops, pool),
        slack=max(SLACK, 2 * (allocation.certificate.gap or 0.0)),
    )
    best = np.array([pool.best_in_company(name) for name in pool.jobs])
    loose = final.reached < best * (1 - TOLERANCE)
    for prices in allocation.certificate.levels:
        loose &= ~final.proved(prices)
    return [
        f"job {name!r}: nothing shows that {reached[name]} steps/s is all it can have"
        for name, is_loose in zip(pool.jobs, loose, strict=True)
        if is_loose
    ]


@dataclass(frozen=True, kw_only=True)
class _Final:
    """What jobs have in the end [jobs]: throughputs, and the volumes of ``Tree.times``."""

    pool: Pool
    reached: Floats
    has: Floats
    stops: Floats
    slack: float

    def proved(self, prices: LevelPrices) -> NDArray[np.bool_]:
        """Whether slightly more throughput costs more than the other jobs leave over [jobs]."""
        pool = self.pool
        # For a job with almost no throughput, the increase is relative to its best one.
        best = pool.rates.max(axis=1)
        more = np.maximum(self.reached * (1 + TOLERANCE), 2 * TOLERANCE * best)
        if pool.problem.space_sharing:
            worth = priced_capacity(prices, pool)
            price = _by_job(prices.job_prices, pool)
            pays, wanted = price * self.reached, price * more
        else:
            worth = fsum(n * prices.resource_prices.get(r, 0.0) for r, n in pool.capacity.items())
            rents = pool.rents(prices.resource_prices)
            pays = least_cost(pool.rates, rents, self.reached)
            wanted = least_cost(pool.rates, rents, more)
        order = np.argsort(self.has, kind="stable")
        paid_by = np.array([0.0, *accumulate(pays[order].tolist())])
        stopped = np.searchsorted(self.has[order], self.stops * (1 + TOGETHER), side="right")
        # What cannot be reached at all costs infinitely much; then nothing is proved.
        with np.errstate(invalid="ignore"):
            enough = paid_by[stopped] - pays + wanted >= worth * (1 - self.slack)
        stops: NDArray[np.bool_] = (wanted > pays) & enough
        return stops


def _by_job(values: Mapping[str, float], pool: Pool) -> Floats:
    return np.array([values.get(name, 0.0) for name in pool.jobs])


def least_cost(rates: Floats, rents: Floats, throughput: Floats) -> Floats:
    """Return the lowest cost of each job's throughput; infinite where it cannot be reached.

    A cheapest way splits the job's time over at most two columns, or a column and idling.

    Args:
        rates: Steps per second [jobs, columns].
        rents: What all of a job's time on a column costs [jobs, columns].
        throughput: Steps per second [jobs].
    """
    idle = np.zeros((len(rates), 1))
    speeds, costs = np.hstack((idle, rates)).T, np.hstack((idle, rents)).T
    least = np.full(len(rates), inf)
    for slow, low in zip(speeds, costs, strict=True):
        for fast, high in zip(speeds, costs, strict=True):
            part = np.zeros(len(rates))
            np.divide(throughput - slow, fast - slow, out=part, where=fast > slow)
            cost = low + part * (high - low)
            fits = (slow <= throughput) & (throughput <= fast)
            least = np.minimum(least, np.where(fits, cost, inf))
    return least
