"""Bounds that an allocation's dual prices prove by weak duality.

For any prices of throughput, devices and time, no allocation is worth more than the pool and all
jobs' time together. Every bound below applies this inequality to a policy's objective.
"""

from math import fsum, inf

import numpy as np

from ...schema.jobs import Allocation, Certificate, LevelPrices
from .allocation_policies import Floats, Pool, inverse
from .judges import Judge, judge_of


def bound_of(allocation: Allocation, pool: Pool) -> float | None:
    """Compute the bound on the objective that the certificate's prices prove, by weak duality.

    Returns:
        The bound in the objective's unit; None for a policy without a registered judge.
    """
    known = judge_of(allocation.policy)
    if known is None:
        return None
    if known.bound is not None:
        return known.bound(allocation.certificate, pool)
    if known.level is not None:
        return _of_levels(allocation.certificate, pool, known, known.level(pool))
    worth = known.worths(pool)
    if worth is None:
        return None
    due = owed(allocation.certificate, pool) if known.keeps_slos else 0.0
    return priced_capacity(allocation.certificate, pool, worth) - due


def _of_levels(
    certificate: Certificate, pool: Pool, known: Judge, level: dict[str, float]
) -> float:
    """Bound a max-min policy, which maximises z where z * level <= throughput for every job.

    With a budget, also dollars <= z * budget (thesis 6.4.3).
    """
    price = budget = 0.0
    if known.keeps_budget:
        price = certificate.resource_prices.get("budget", 0.0)
        budget = pool.problem.budget_dollars or 0.0
    value = priced_capacity(certificate, pool, charge=price / 3600.0)
    asked = fsum(y * level[name] for name, y in certificate.job_prices.items() if name in level)
    asked -= price * budget
    value = value / asked if asked > 0 else inf
    return inverse(value) if known.sense == "min" else value


def owed(certificate: Certificate, pool: Pool) -> float:
    """Value the throughputs that the SLOs require at the certificate's job prices."""
    return fsum(y * floor(pool, name) for name, y in certificate.job_prices.items())


def floor(pool: Pool, name: str) -> float:
    """Return the least throughput that meets a job's SLO, in steps per second; 0 without an SLO."""
    job = pool.jobs.get(name)
    return 0.0 if job is None or job.slo_seconds is None else job.steps / job.slo_seconds


def priced_capacity(
    prices: Certificate | LevelPrices,
    pool: Pool,
    worth: dict[tuple[str, str], float] | None = None,
    charge: float = 0.0,
) -> float:
    """Value the pool and all jobs' time at dual prices: an upper bound on any allocation's worth.

    Args:
        prices: Dual prices of throughputs, resources and time.
        pool: The problem's jobs and devices.
        worth: (job, column) -> what one step is worth in the objective; 0 where absent.
        charge: What the objective loses for each dollar per hour of devices held.
    """
    worth = worth or {}
    y = {name: prices.job_prices.get(name, 0.0) for name in pool.jobs}
    rents = pool.rents(prices.resource_prices)
    if charge:
        rents = rents + charge * np.array(
            [[pool.dollars(m, c) for c in pool.columns] for m in pool.jobs]
        )
    value = np.array([list(y.values())]).T
    if worth:
        value = value + np.array(
            [[worth.get((m, c), 0.0) for c in pool.columns] for m in pool.jobs]
        )
    runs = pool.rates > 0
    profits = np.where(runs, value * pool.rates - rents, -inf).max(axis=1)
    time = {
        m: max(0.0, prices.time_prices.get(m, 0.0), profit)
        for m, profit in zip(pool.jobs, profits.tolist(), strict=True)
    }
    loss = 0.0
    if pool.problem.space_sharing:
        loss = max(0.0, _largest_pair_profit(pool, y, worth, rents, time)) / 2 * len(time)
    paid = fsum(n * prices.resource_prices.get(r, 0.0) for r, n in pool.capacity.items())
    return paid + fsum(time.values()) + loss


def _largest_pair_profit(
    pool: Pool,
    y: dict[str, float],
    worth: dict[tuple[str, str], float],
    rents: Floats,
    time: dict[str, float],
) -> float:
    """Find the largest profit of a pair: worth of its throughputs minus rent and time prices.

    Jobs of one model and scale factor have the same rates. So for a given partner model, only the
    two jobs of a group with the largest profit can be in the best pair.
    """
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, job in pool.jobs.items():
        kinds.setdefault((job.model, job.scale_factor), []).append(name)
    largest, groups = 0.0, list(kinds.values())
    row = {name: place for place, name in enumerate(pool.jobs)}
    for i, first in enumerate(groups):
        for second in groups[i:]:
            a, b = first[0], second[-1]
            if a == b or pool.jobs[a].scale_factor != pool.jobs[b].scale_factor:
                continue
            for k, c in enumerate(pool.columns):
                rates = pool.pair_rates((a, b), c)
                if max(rates) > 0 and pool.rate(a, c) > 0 and pool.rate(b, c) > 0:
                    left = [
                        sorted((worth.get((m, c), 0.0) + y[m]) * rate - time[m] for m in group)
                        for group, rate in zip((first, second), rates, strict=True)
                    ]
                    own = (
                        left[0][-1] + left[0][-2] if first is second else left[0][-1] + left[1][-1]
                    )
                    largest = max(largest, own - rents[row[a], k])
    return largest
