"""Bound a sum of throughput-per-dollar ratios under SLOs (thesis 6.4.2, 6.4.3).

Running a job faster than its SLO requires, with the same mix of columns, does not change its ratio
but takes more devices. So each job runs at exactly its SLO's throughput, called its floor. The
vector y holds the fractions of the job's work done on each column; its ratio is
floor / dollars(y), a convex function of y.

For any device prices, the sum of ratios is at most the pool's value plus a term for each job. It is
the maximum over y of the job's ratio minus the price of the devices it holds. That difference is
convex in y, so its maximum lies at a corner of the feasible set. A certificate may state prices
once for all allocations, or one set of prices for each of several regions; the regions must then
cover all allocations.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import fsum, inf

from ...schema.jobs import Allocation, Certificate, DollarCut
from .allocation_bounds import floor
from .allocation_policies import Pool

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
    if any(not cuts for cuts in regions):
        return True
    first = regions[0][0]
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
    """Yield the corners of a job's feasible set with a cost from ``low`` to ``high``.

    Costs are in dollars per hour.
    """
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
    """Yield the corners of {y >= 0, sum y = 1, time . y <= 1, low <= dollars . y <= high}.

    A corner is a vertex of the simplex, or a point of one of its edges at which one limit is tight.
    Or it is a point of one of its triangles at which the time and one end of the range are tight.
    """
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
        spent = fsum(dollars[c] * part for c, part in y.items())
        busy = fsum(time[c] * part for c, part in y.items())
        near = low * (1 - _NEAR) <= spent <= high * (1 + _NEAR) and busy <= 1 + _NEAR
        if near and min(y.values()) >= -_NEAR:
            yield y
