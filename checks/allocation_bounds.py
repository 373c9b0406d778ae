"""What an allocation's prices prove, by weak duality; for the checker of allocations.

For any prices of throughput, devices and time, no allocation is worth more than the pool and all
jobs' time together. Every bound below applies that sentence to a policy's objective.
"""

from collections.abc import Callable
from math import fsum, inf

from ..schema.jobs import Allocation, Certificate, LevelPrices
from .allocation_policies import (
    Pool,
    finish_time_ratio,
    inverse,
    levels,
    worths,
)

MAXIMISED = (
    "las", "las_weighted", "las_water_filling", "hierarchical", "fifo", "static_priority",
    "max_throughput", "max_normalised_throughput", "min_cost", "min_cost_slo", "min_cost_ratio",
    "min_cost_ratio_slo", "min_cost_per_job",
)  # fmt: skip
MINIMISED = ("makespan", "makespan_budget", "finish_time_fairness", "sjf", "min_dollars_slo")
KNOWN = frozenset(MAXIMISED + MINIMISED)
PRICED = frozenset(name for name in KNOWN if name.startswith("min_")) | {"makespan_budget"}
_HALVINGS = 200


def sense_of(policy: str) -> str:
    """Whether a policy's objective is a ``max`` or a ``min``."""
    return "min" if policy in MINIMISED else "max"


def bound_of(allocation: Allocation, pool: Pool) -> float | None:
    """The bound that the certificate's prices prove, by weak duality.

    None for a policy that the checker does not know.
    """
    policy = allocation.policy
    if policy in _OWN:
        return _OWN[policy](allocation.certificate, pool)
    level, worth = levels(policy, pool), worths(policy, pool)
    if level is not None:
        return _of_levels(allocation.certificate, pool, policy, level)
    if worth is not None:
        owed = _owed(allocation.certificate, pool) if policy.endswith("_slo") else 0.0
        return priced_capacity(allocation.certificate, pool, worth) - owed
    return None


def _of_levels(certificate: Certificate, pool: Pool, policy: str, level: dict[str, float]) -> float:
    """Max-min: z * level <= throughput, and with a budget dollars <= z * budget (6.4.3)."""
    price = budget = 0.0
    if policy == "makespan_budget":
        price = certificate.resource_prices.get("budget", 0.0)
        budget = pool.problem.budget_dollars or 0.0
    value = priced_capacity(certificate, pool, charge=price / 3600.0)
    asked = fsum(y * level[name] for name, y in certificate.job_prices.items() if name in level)
    asked -= price * budget
    value = value / asked if asked > 0 else inf
    return inverse(value) if sense_of(policy) == "min" else value


def _owed(certificate: Certificate, pool: Pool) -> float:
    """What the throughputs that SLOs ask for are worth at the prices."""
    return fsum(y * _floor(pool, name) for name, y in certificate.job_prices.items())


def _floor(pool: Pool, name: str) -> float:
    job = pool.jobs.get(name)
    return 0.0 if job is None or job.slo_seconds is None else job.steps / job.slo_seconds


def _least_rho(certificate: Certificate, pool: Pool) -> float:
    """Finish-time fairness: the rho whose throughputs are worth just what can be had (5.4.2)."""
    alone = 0.0
    if not pool.problem.space_sharing:
        alone = max(finish_time_ratio(pool, name, pool.best(name)) for name in pool.jobs)
    prices = {name: y for name, y in certificate.job_prices.items() if name in pool.jobs}
    if not prices:
        return alone
    most = priced_capacity(certificate, pool)
    # rho = (elapsed + steps / throughput) / whole, so throughput = steps / (rho whole - elapsed).
    whole = {
        name: pool.jobs[name].isolated_seconds + pool.jobs[name].steps / pool.isolated(name)
        for name in prices
    }

    def wanted(rho: float) -> float:
        left = {name: rho * whole[name] - pool.jobs[name].elapsed_seconds for name in prices}
        if min(left.values()) <= 0:
            return inf
        return fsum(y * pool.jobs[name].steps / left[name] for name, y in prices.items())

    low, high = 0.0, 1.0
    while wanted(high) > most:
        low, high = high, 2.0 * high
        if high == inf:
            return inf
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if wanted(middle) > most else (low, middle)
    return max(low, alone)


def _shortest(_: Certificate, pool: Pool) -> float:
    """SJF: no job is faster than always at its best (5.4.2)."""
    return min(job.steps / pool.best(name) for name, job in pool.jobs.items())


def _least_dollars(certificate: Certificate, pool: Pool) -> float:
    """Least spending under SLOs: dollars pay for the floors at the prices (6.4.3)."""
    return _owed(certificate, pool) - priced_capacity(certificate, pool, charge=1.0)


def _per_dollar(pool: Pool) -> dict[str, float]:
    """Steps per second per dollar an hour of each job on its cheapest column."""
    return {
        name: max(
            pool.rate(name, column) / pool.dollars(name, column)
            for column in pool.columns
            if pool.rate(name, column) > 0
        )
        for name in pool.jobs
    }


def _best_ratio(_: Certificate, pool: Pool) -> float:
    """Without SLOs or pairs no ratio of totals passes that of the best single column (5.4.2)."""
    return max(each / pool.best(name) for name, each in _per_dollar(pool).items())


def _sum_of_ratios(_: Certificate, pool: Pool) -> float:
    """A job's ratio is at most that of its cheapest column (6.4.2)."""
    return fsum(_per_dollar(pool).values())


def _ratio_under_slos(certificate: Certificate, pool: Pool) -> float:
    """With N - q D <= excess for all allocations and D >= least, N / D <= q + excess / least."""
    q = certificate.objective
    worth = {(m, c): 1.0 / pool.best(m) for m in pool.jobs for c in pool.columns}
    excess = priced_capacity(certificate, pool, worth, charge=q) - _owed(certificate, pool)
    cheapest = _cheapest_steps(pool)
    least = fsum(_floor(pool, name) * cheapest[name] for name in pool.jobs)
    bound = q + max(excess, 0.0) / least if least > 0 else inf
    return bound if pool.problem.space_sharing else min(bound, _best_ratio(certificate, pool))


def _cheapest_steps(pool: Pool) -> dict[str, float]:
    """The least that a step per second costs each job an hour; in a pair it pays half."""
    alone = {name: 1.0 / each for name, each in _per_dollar(pool).items()}
    if not pool.problem.space_sharing:
        return alone
    others = {(job.model, job.scale_factor): job.id for job in pool.jobs.values()}
    shared = {
        name: [
            pool.dollars(name, column) / 2 / rate
            for other in others.values()
            for column in pool.columns
            if (rate := pool.pair_rates((name, other), column)[0]) > 0
        ]
        for name in pool.jobs
    }
    return {name: min([alone[name], *shared[name]]) for name in pool.jobs}


_OWN: dict[str, Callable[[Certificate, Pool], float]] = {
    "finish_time_fairness": _least_rho,
    "sjf": _shortest,
    "min_dollars_slo": _least_dollars,
    "min_cost_ratio": _best_ratio,
    "min_cost_ratio_slo": _ratio_under_slos,
    "min_cost_per_job": _sum_of_ratios,
}


def priced_capacity(
    prices: Certificate | LevelPrices,
    pool: Pool,
    worth: dict[tuple[str, str], float] | None = None,
    charge: float = 0.0,
) -> float:
    """What the pool and all jobs' time are worth at prices: no throughputs are worth more.

    Throughputs count less ``charge`` for each dollar per hour that is held.
    """
    worth = worth or {}
    y = {name: prices.job_prices.get(name, 0.0) for name in pool.jobs}
    rent = {
        (m, c): fsum(n * prices.resource_prices.get(r, 0.0) for r, n in pool.holds(m, c).items())
        + (charge * pool.dollars(m, c) if charge else 0.0)
        for m in pool.jobs
        for c in pool.columns
    }
    time: dict[str, float] = {}
    for m in pool.jobs:
        profits = [
            (worth.get((m, c), 0.0) + y[m]) * pool.rate(m, c) - rent[m, c]
            for c in pool.columns
            if pool.rate(m, c) > 0
        ]
        time[m] = max(0.0, prices.time_prices.get(m, 0.0), *profits)
    loss = 0.0
    if pool.problem.space_sharing:
        loss = max(0.0, _largest_pair_profit(pool, y, worth, rent, time)) / 2 * len(time)
    paid = fsum(n * prices.resource_prices.get(r, 0.0) for r, n in pool.capacity.items())
    return paid + fsum(time.values()) + loss


def _largest_pair_profit(
    pool: Pool,
    y: dict[str, float],
    worth: dict[tuple[str, str], float],
    rent: dict[tuple[str, str], float],
    time: dict[str, float],
) -> float:
    """The most that two jobs leave over on a column beside their time and its rent.

    Jobs of one model and scale factor have the same rates, so of each only the two that leave
    most beside a given partner can be in the best pair.
    """
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, job in pool.jobs.items():
        kinds.setdefault((job.model, job.scale_factor), []).append(name)
    largest, groups = 0.0, list(kinds.values())
    for i, first in enumerate(groups):
        for second in groups[i:]:
            a, b = first[0], second[-1]
            if a == b or pool.jobs[a].scale_factor != pool.jobs[b].scale_factor:
                continue
            for c in pool.columns:
                rates = pool.pair_rates((a, b), c)
                if max(rates) > 0 and pool.rate(a, c) > 0 and pool.rate(b, c) > 0:
                    left = [
                        sorted((worth.get((m, c), 0.0) + y[m]) * rate - time[m] for m in group)
                        for group, rate in zip((first, second), rates, strict=True)
                    ]
                    own = (
                        left[0][-1] + left[0][-2] if first is second else left[0][-1] + left[1][-1]
                    )
                    largest = max(largest, own - rent[a, c])
    return largest
