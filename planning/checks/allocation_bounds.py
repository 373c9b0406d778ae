"""Bounds that an allocation's dual prices prove by weak duality.

For any prices of throughput, devices and time, no allocation is worth more than the pool and all
jobs' time together. Every bound below applies this inequality to a policy's objective.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import fsum, inf

import numpy as np

from ...schema.jobs import Allocation, Certificate, DollarCut, LevelPrices
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
    """Bound a max-min policy, which maximises z where z * level <= throughput for every job."""
    price = budget = 0.0
    if known.keeps_budget:
        price = certificate.resource_prices.get("budget", 0.0)
        budget = pool.problem.budget_dollars or 0.0
    # z x level <= throughput for all jobs: the prices' worth over what a unit of z asks for bounds
    # z.
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
    # Missing prices are 0: any prices prove something.
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
    # A job's time is worth its best column at least; a larger price stated for it only loosens the
    # bound.
    time = {
        m: max(0.0, prices.time_prices.get(m, 0.0), profit)
        for m, profit in zip(pool.jobs, profits.tolist(), strict=True)
    }
    loss = 0.0
    # A pair may still earn more than both jobs' time: half of the largest excess on everybody's
    # time pays for it.
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
    """Find the largest profit of a pair: worth of its throughputs minus rent and time prices."""
    # Jobs of one model and scale factor have the same rates. So for a given partner model, only
    # the two jobs of a group with the largest profit can be in the best pair.
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, job in pool.jobs.items():
        kinds.setdefault((job.model, job.scale_factor), []).append(name)
    largest, groups = 0.0, list(kinds.values())
    row = {name: place for place, name in enumerate(pool.jobs)}
    for i, first in enumerate(groups):
        for second in groups[i:]:
            # The last of the second group, so that a group of one does not meet itself.
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


# Bound a sum of throughput-per-dollar ratios under SLOs (thesis 6.4.2, 6.4.3).
#
# Running a job faster than its SLO requires, with the same mix of columns, does not change its
# ratio but takes more devices. So each job runs at exactly its SLO's throughput, called its floor.
# The vector y holds the fractions of the job's work done on each column; its ratio is floor /
# dollars(y), a convex function of y.
#
# For any device prices, the sum of ratios is at most the pool's value plus a term for each job. It
# is the maximum over y of the job's ratio minus the price of the devices it holds. That difference
# is convex in y, so its maximum lies at a corner of the feasible set. A certificate may state
# prices once for all allocations, or one set of prices for each of several regions; the regions
# must then cover all allocations.


_NEAR = 1e-9

Range = tuple[float, float]


@dataclass(frozen=True)
class _Way:
    """A corner of a job's feasible set: its ratio, and the devices it holds on average.

    ``ratio`` is in steps per second per dollar an hour; ``holds`` maps resources to devices.
    """

    ratio: float
    holds: dict[str, float]


def sum_of_ratios(allocation: Allocation, pool: Pool, reached: Mapping[str, float]) -> float:
    """Compute the objective, the sum over jobs of throughput per dollar an hour.

    A job that does not run counts with the ratio of its cheapest column if it has no SLO, else
    the sum is minus infinity.
    """
    terms = []
    for name in pool.jobs:
        spent = fsum(
            pool.dollars(name, column) * time for column, time in allocation.x[name].items()
        )
        if spent > 0:
            terms.append(reached[name] / spent)
        else:
            terms.append(_best(pool, name) if floor(pool, name) == 0 else -inf)
    return fsum(terms)


def bound_by_regions(certificate: Certificate, pool: Pool) -> float:
    """Compute the bound that the certificate's regions prove; infinite if they do not cover all."""
    regions = certificate.regions
    if not covers([region.cuts for region in regions]):
        return inf
    waiting = fsum(_best(pool, name) for name in pool.jobs if floor(pool, name) == 0)
    ways: dict[tuple[str, Range], list[_Way]] = {}
    bounds = []
    # Each region bounds the allocations in it; the largest bounds all.
    for region in regions:
        price = region.resource_prices
        terms = [waiting, *(n * price.get(r, 0.0) for r, n in pool.capacity.items())]
        ranges = _ranges(region.cuts)
        for name in pool.jobs:
            if floor(pool, name) > 0:
                key = name, ranges[name]
                if key not in ways:
                    ways[key] = list(_ways(pool, name, *ranges[name]))
                terms.append(
                    max(
                        (
                            way.ratio - fsum(n * price.get(r, 0.0) for r, n in way.holds.items())
                            for way in ways[key]
                        ),
                        default=-inf,
                    )
                )
        bounds.append(-inf if -inf in terms else fsum(terms))
    return max(bounds)


def covers(regions: Sequence[Sequence[DollarCut]]) -> bool:
    """Whether the regions cover all allocations: they must be the leaves of a binary tree of cuts.

    Args:
        regions: The cuts of each region, from the root of the tree down.
    """
    if not regions:
        return False
    # A region without cuts is everything.
    if any(not cuts for cuts in regions):
        return True
    first = regions[0][0]
    # Every region here must go on from the same cut, on either side of it.
    sides: dict[str, list[Sequence[DollarCut]]] = {"at_most": [], "at_least": []}
    for cuts in regions:
        if (cuts[0].job, cuts[0].dollars_per_hour) == (first.job, first.dollars_per_hour):
            sides[cuts[0].side].append(cuts[1:])
    return all(covers(side) for side in sides.values())


def _ranges(cuts: Sequence[DollarCut]) -> dict[str, Range]:
    ranges: dict[str, Range] = defaultdict(lambda: (0.0, inf))
    for cut in cuts:
        low, high = ranges[cut.job]
        if cut.side == "at_most":
            ranges[cut.job] = low, min(high, cut.dollars_per_hour)
        else:
            ranges[cut.job] = max(low, cut.dollars_per_hour), high
    return ranges


def _best(pool: Pool, name: str) -> float:
    return max(
        pool.rate(name, c) / pool.dollars(name, c) for c in pool.columns if pool.rate(name, c) > 0
    )


def _ways(pool: Pool, name: str, low: float, high: float) -> Iterator[_Way]:
    """Yield the corners of a job's feasible set with a cost from ``low`` to ``high``."""
    # Costs are in dollars per hour.
    needed = floor(pool, name)
    columns = [c for c in pool.columns if pool.rate(name, c) > 0]
    time = {c: needed / pool.rate(name, c) for c in columns}
    dollars = {c: pool.dollars(name, c) * time[c] for c in columns}
    for work in _corners(columns, time, dollars, low, high):
        holds: dict[str, float] = defaultdict(float)
        for column, part in work.items():
            for resource, number in pool.holds(name, column).items():
                holds[resource] += number * time[column] * part
        yield _Way(needed / fsum(dollars[c] * part for c, part in work.items()), dict(holds))


def _corners(
    columns: Sequence[str],
    time: Mapping[str, float],
    dollars: Mapping[str, float],
    low: float,
    high: float,
) -> Iterator[dict[str, float]]:
    """Yield the corners of {y >= 0, sum y = 1, time . y <= 1, low <= dollars . y <= high}."""
    # A corner is a vertex of the simplex, or a point of one of its edges at which one limit is
    # tight. Or it is a point of one of its triangles at which the time and one end of the range
    # are tight.
    ends = [end for end in (low, high) if 0 < end < inf]
    limits = [(time, 1.0), *((dollars, end) for end in ends)]
    found: list[dict[str, float]] = [{a: 1.0} for a in columns]
    for a, b in combinations(columns, 2):
        for row, value in limits:
            if row[a] != row[b]:
                part = (value - row[b]) / (row[a] - row[b])
                found.append({a: part, b: 1 - part})
    for a, b, c in combinations(columns, 3):
        for end in ends:
            # Cramer's rule, after eliminating the third column by sum y = 1.
            p, q = time[a] - time[c], time[b] - time[c]
            r, s = dollars[a] - dollars[c], dollars[b] - dollars[c]
            det = p * s - q * r
            if det:
                u, v = 1 - time[c], end - dollars[c]
                first, second = (u * s - q * v) / det, (p * v - u * r) / det
                found.append({a: first, b: second, c: 1 - first - second})
    for y in found:
        # Points outside the other limits are no corners; rounding may put a corner just outside.
        spent = fsum(dollars[c] * part for c, part in y.items())
        busy = fsum(time[c] * part for c, part in y.items())
        near = low * (1 - _NEAR) <= spent <= high * (1 + _NEAR) and busy <= 1 + _NEAR
        if near and min(y.values()) >= -_NEAR:
            yield y
