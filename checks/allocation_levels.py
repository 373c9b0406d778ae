"""Check by weak duality that water filling raised every level as far as possible (thesis 5.4.3).

A job was stopped correctly if it has reached its maximum, or if some prices of the certificate
prove it. Prices prove it if the whole pool costs no more at these prices than the throughputs of
this job and of the jobs that stopped before it. More for this job would then have to be taken
from one of them.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, inf

from ..schema.jobs import Allocation, LevelPrices
from .allocation_bounds import priced_capacity
from .allocation_policies import Pool
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
    loose = [m for m in pool.jobs if reached[m] < pool.best_in_company(m) * (1 - TOLERANCE)]
    slack = max(SLACK, 2 * (allocation.certificate.gap or 0.0))
    for prices in allocation.certificate.levels:
        proof = _Proof.of(prices, pool, reached, has, slack)
        loose = [name for name in loose if not proof.stops(name, reached[name], stops[name])]
    return [f"job {name!r}: nothing shows that {reached[name]} steps/s is all it can have"
            for name in loose]  # fmt: skip


@dataclass(frozen=True)
class _Proof:
    """The pool's ``worth`` at one level's prices, and what jobs pay for their throughputs.

    ``times`` are the volumes at which jobs reach their levels, ascending; ``paid_by[i]`` is what
    the first i of these jobs pay together.
    """

    prices: LevelPrices
    pool: Pool
    worth: float
    pays: dict[str, float]
    times: list[float]
    paid_by: list[float]
    slack: float

    @classmethod
    def of(
        cls,
        prices: LevelPrices,
        pool: Pool,
        reached: dict[str, float],
        has: dict[str, float],
        slack: float,
    ) -> "_Proof":
        if pool.problem.space_sharing:
            worth = priced_capacity(prices, pool)
            pays = {m: prices.job_prices.get(m, 0.0) * reached[m] for m in pool.jobs}
        else:
            worth = fsum(n * prices.resource_prices.get(r, 0.0) for r, n in pool.capacity.items())
            pays = {m: least_cost(pool, m, prices, reached[m]) for m in pool.jobs}
        order = sorted(pool.jobs, key=lambda name: has[name])
        paid_by = [0.0, *accumulate(pays[name] for name in order)]
        return cls(prices, pool, worth, pays, [has[name] for name in order], paid_by, slack)

    def stops(self, name: str, throughput: float, time: float) -> bool:
        """Whether slightly more throughput costs more than the other jobs leave over."""
        before = self.paid_by[bisect_right(self.times, time * (1 + TOGETHER))]
        # For a job with almost no throughput, the increase is relative to its best one.
        more = max(throughput * (1 + TOLERANCE), 2 * TOLERANCE * self.pool.best(name))
        if self.pool.problem.space_sharing:
            wanted = self.prices.job_prices.get(name, 0.0) * more
        else:
            wanted = least_cost(self.pool, name, self.prices, more)
        return wanted > self.pays[name] and before - self.pays[name] + wanted >= self.worth * (
            1 - self.slack
        )


def least_cost(pool: Pool, name: str, prices: LevelPrices, throughput: float) -> float:
    """Return the lowest cost of a throughput at the prices.

    A cheapest way splits the job's time over at most two columns, or a column and idling.
    """
    points = [(0.0, 0.0)]
    for column in pool.columns:
        held = pool.holds(name, column).items()
        cost = fsum(number * prices.resource_prices.get(r, 0.0) for r, number in held)
        points.append((pool.rate(name, column), cost))
    least = inf
    for slow, low in points:
        for fast, high in points:
            if slow <= throughput <= fast:
                part = (throughput - slow) / (fast - slow) if fast > slow else 0.0
                least = min(least, low + part * (high - low))
    return least
