"""From an instance and a program to time fractions of every job, feasible to the last bit."""

from dataclasses import dataclass, replace

import numpy as np

from ...schema.errors import BackendError
from . import interior, shared
from .instance import Instance
from .program import (
    Floats,
    Ints,
    Program,
    Solution,
    gap_between,
    level_of,
    merge,
    resource_use,
    shortfall,
)
from .shared import Pairing, PairTimes

DUST = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Time fractions ``x`` [jobs, columns] and pair times, with what they reach and prove.

    ``throughput`` [jobs] is effective, in steps per second of the instance that was solved.
    """

    x: Floats
    pairs: PairTimes | None
    throughput: Floats
    objective: float
    bound: float
    gap: float
    job_prices: Floats
    resource_prices: Floats
    time_prices: Floats | None = None
    method: str


def optimise(
    instance: Instance,
    program: Program,
    worth: Floats | None = None,
    charge: Floats | None = None,
) -> Outcome:
    """Maximise a program: equal jobs merged, solved, spread over the jobs again, rounded.

    Of several optima: the analytic centre of the optimal face without space sharing, where
    equal jobs also get equal shares; with it the vertex that HiGHS's simplex ends in.
    """
    if instance.pair_rate is None:
        small, row_of = merge(program)
        found = solve_alone(small)
        x = tighten(program, found.x[row_of])
        found = rescored(program, found, x)
        pairs, throughput = None, (instance.rate * x).sum(axis=1)
    else:
        worth = np.zeros_like(instance.rate) if worth is None else worth
        small, row_of = merge(program, instance.kind)
        first = np.unique(row_of, return_index=True)[1]
        pairing = Pairing(
            kind=instance.kind[first],
            rate=instance.pair_rate,
            worth=worth[first],
            charge=np.zeros(len(instance.columns)) if charge is None else charge,
        )
        found, totals = shared.solve(small, pairing)
        throughput = shared.reach(small, pairing, found.x, totals)[0][row_of]
        x, pairs = found.x[row_of], spread(totals, row_of, small.count)
    return Outcome(
        x=x,
        pairs=pairs,
        throughput=throughput,
        objective=found.objective,
        bound=found.bound,
        gap=found.gap,
        job_prices=found.job_prices[row_of],
        resource_prices=found.resource_prices,
        time_prices=None if found.time_prices is None else found.time_prices[row_of],
        method=found.method,
    )


def solve_alone(program: Program, accepted_gap: float = interior.ACCEPTED_GAP) -> Solution:
    """Solve without pairs: interior point, or simplex where that breaks down.

    An interior point method may stop short on programs without an interior, such as those of
    jobs that must keep exactly what is the most they can have.
    """
    try:
        return interior.solve(program, accepted_gap)
    except BackendError:
        return shared.solve_alone(program)


def rescored(program: Program, found: Solution, x: Floats) -> Solution:
    """A solution with the objective and gap that it has after rounding to ``x`` [jobs]."""
    z = level_of(program, x) if program.level_weight else 0.0
    objective = program.objective(x, z)
    gap = max(gap_between(program, objective, found.bound), shortfall(program, x, z))
    return replace(found, z=z, objective=objective, gap=gap)


def tighten(program: Program, x: Floats) -> Floats:
    """Round so that 5.1 to 5.3 hold to the last bit, summed in any order.

    Entries that are dust beside their row's largest become 0; then everything gives way by a
    few units of the last place, by the most that a sum of that many terms can err.
    """
    x = np.where(x < DUST * x.max(axis=1)[:, None], 0.0, x)
    spare = 1.0 - 4 * np.finfo(float).eps * (x.shape[1] + 1)
    total = x.sum(axis=1)
    x = x * np.where(total > spare, spare / np.where(total > 0, total, 1.0), 1.0)[:, None]
    used = resource_use(program, x)
    room = 1.0 - 4 * np.finfo(float).eps * (len(x) + 1)
    tight = (program.level_capacity == 0) & (used > program.capacity * room)
    share = np.where(tight, program.capacity * room / np.where(tight, used, 1.0), 1.0)
    rounded: Floats = x * np.where(program.resources > 0, share[:, None], 1.0).min(axis=0)
    return rounded


def spread(totals: PairTimes, row_of: Ints, count: Floats) -> PairTimes:
    """Pair times of merged rows as pair times of jobs, each member of a row the same share.

    Members of two rows are laid end to end and cut at each other's borders, so few pairs have
    a share; members of one row pair up around a circle.
    """
    order = np.argsort(row_of, kind="stable")
    start = np.concatenate(([0], np.cumsum(count)[:-1])).astype(np.int64)
    parts: list[tuple[Ints, Ints, Ints, Floats]] = []
    for a, b, c, time in zip(totals.a, totals.b, totals.column, totals.time, strict=True):
        left = order[start[a] : start[a] + int(count[a])]
        right = order[start[b] : start[b] + int(count[b])]
        if a == b:
            first, second, part = _circle(left)
        else:
            first, second, part = _strips(left, right)
        parts.append((first, second, np.full(len(first), c), part * time))
    if not parts:
        return totals
    a, b, c, times = (np.concatenate(side) for side in zip(*parts, strict=True))
    return PairTimes(a=a, b=b, column=c, time=times)


def _circle(members: Ints) -> tuple[Ints, Ints, Floats]:
    if len(members) == 2:
        return members[:1], members[1:], np.ones(1)
    return members, np.roll(members, -1), np.full(len(members), 1.0 / len(members))


def _strips(left: Ints, right: Ints) -> tuple[Ints, Ints, Floats]:
    n, m = len(left), len(right)
    cuts = np.unique(np.concatenate((np.arange(n) * m, np.arange(m) * n)))
    ends = np.append(cuts[1:], n * m)
    return left[cuts // m], right[cuts // n], (ends - cuts) / (n * m)
