"""Check an allocation against the definitions (thesis 5.3.1), without any code of the solvers.

Constraints 5.1 to 5.3 must hold without a tolerance; sums use ``fsum``, which rounds only once.
The effective throughputs and the objective are recomputed, and the bound is derived again from
the certificate's prices. The code is slow and simple on purpose.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, inf, isclose

import numpy as np
from numpy.typing import NDArray

from ...schema.jobs import Allocation, AllocationProblem, Certificate, Job, LevelPrices
from .allocation_bounds import bound_of, priced_capacity
from .allocation_policies import Floats, Pool, spent_dollars
from .judges import Judge, has_levels, judge_of, objective_of, rising

TOLERANCE = 1e-6


def check(allocation: Allocation, problem: AllocationProblem) -> list[str]:
    """List every fault of an allocation; an empty list means that it is valid for the problem.

    If no judge is registered for the policy, only the constraints that every allocation must keep
    are checked, and the objective is not.

    Returns:
        One sentence per fault.
    """
    pool = Pool(problem)
    faults = _names(allocation, pool) + _lacks(allocation, pool)
    if faults or not pool.jobs:
        return faults
    known = judge_of(allocation.policy)
    faults += _times(allocation, pool)
    faults += _devices(allocation, pool)
    faults += _throughputs(allocation, pool)
    if known is not None and known.keeps_slos:
        faults += _floors(allocation, pool)
    if known is not None and known.keeps_budget:
        faults += _budget(allocation, pool)
    seen = pool.flat() if allocation.heterogeneity == "agnostic" else pool
    faults += [] if known is None else _objective(allocation, seen, known)
    faults += idle_faults(allocation, seen)
    return faults


def _names(allocation: Allocation, pool: Pool) -> list[str]:
    misfits, left_out = pool.misfits, allocation.left_out.keys()
    faults = [
        f"job {name!r} fits nowhere, but has a row" if name in misfits
        else f"job {name!r} is not in the problem"
        for name in allocation.x.keys() - pool.jobs
    ]  # fmt: skip
    faults += [f"job {name!r} has no row" for name in pool.jobs.keys() - allocation.x]
    faults += [f"job {name!r} fits nowhere, and is not named" for name in misfits - left_out]
    faults += [f"job {name!r} is left out, but fits" for name in left_out - misfits]
    columns = set(pool.columns)
    for name, shares in allocation.x.items():
        faults += [f"job {name!r}: no column {c!r}" for c in shares.keys() - columns]
    for pair in allocation.pairs:
        first, second = pair.jobs
        if first == second or not {first, second} <= pool.jobs.keys():
            faults.append(f"pair {pair.jobs}: must be two different jobs of the problem")
        faults += [f"pair {pair.jobs}: no column {c!r}" for c in pair.shares.keys() - columns]
    if allocation.pairs and not pool.problem.space_sharing:
        faults.append("jobs share devices, but space sharing is off")
    return sorted(faults)


def _lacks(allocation: Allocation, pool: Pool) -> list[str]:
    """List the prices or the budget that the policy needs and the problem does not state."""
    faults: list[str] = []
    if not pool.jobs:
        return faults
    known = judge_of(allocation.policy)
    if known is not None and known.counts_dollars:
        unpriced = pool.problem.num_devices.keys() - pool.problem.dollars_per_hour
        faults += [f"{allocation.policy} counts dollars, and {n!r} has no price"
                   for n in sorted(unpriced)]  # fmt: skip
    if known is not None and known.keeps_budget and pool.problem.budget_dollars is None:
        faults.append(f"{allocation.policy} keeps to a budget, and the problem has none")
    return faults


def _times(allocation: Allocation, pool: Pool) -> list[str]:
    """Check constraints 5.1 (which the schema checks too) and 5.2."""
    # Also, a job may spend no time on a column on which its throughput is 0.
    spent: dict[str, list[float]] = defaultdict(list)
    faults = []
    for name, shares in allocation.x.items():
        for column, time in shares.items():
            spent[name].append(time)
            if time > 0 and pool.rate(name, column) <= 0:
                faults.append(f"job {name!r} spends {time} on {column!r}, where it does not run")
    for pair in allocation.pairs:
        for column, time in pair.shares.items():
            if time > 0 and max(pool.pair_rates(pair.jobs, column)) <= 0:
                faults.append(f"pair {pair.jobs} spends {time} on {column!r}, where it cannot")
            for name in pair.jobs:
                spent[name].append(time)
    for name, times in spent.items():
        if fsum(times) > 1.0:
            faults.append(f"job {name!r}: time fractions sum to {fsum(times)}, above 1 (5.2)")
    return faults


def _devices(allocation: Allocation, pool: Pool) -> list[str]:
    """Check constraint 5.3, the number of devices, for every resource."""
    return [
        f"{resource}: {number} devices used, above {pool.capacity[resource]} (5.3)"
        for resource, number in _held(allocation, pool).items()
        if number > pool.capacity[resource]
    ]


def _held(allocation: Allocation, pool: Pool) -> dict[str, float]:
    """Count the devices of each resource that jobs hold, on average over time."""
    held: dict[str, list[float]] = {name: [] for name in pool.capacity}
    shares = [*allocation.x.items(), *((pair.jobs[0], pair.shares) for pair in allocation.pairs)]
    for name, times in shares:
        for column, time in times.items():
            for resource, number in pool.holds(name, column).items():
                held[resource].append(number * time)
    return {name: fsum(terms) for name, terms in held.items()}


def effective_throughputs(allocation: Allocation, pool: Pool) -> dict[str, float]:
    """Compute throughput(m, X) of every job m by its definition (thesis 5.3.1).

    Returns:
        Job id -> steps per second.
    """
    terms: dict[str, list[float]] = {name: [] for name in pool.jobs}
    for name, shares in allocation.x.items():
        terms[name] += [pool.rate(name, column) * time for column, time in shares.items()]
    for pair in allocation.pairs:
        for column, time in pair.shares.items():
            for name, rate in zip(pair.jobs, pool.pair_rates(pair.jobs, column), strict=True):
                terms[name].append(rate * time)
    return {name: fsum(each) for name, each in terms.items()}


def _throughputs(allocation: Allocation, pool: Pool) -> list[str]:
    reached = effective_throughputs(allocation, pool)
    return [
        f"job {name!r}: throughput {allocation.throughputs.get(name)} stated, {value} computed"
        for name, value in reached.items()
        if not isclose(allocation.throughputs.get(name, -1.0), value, rel_tol=1e-9, abs_tol=1e-12)
    ]


def _floors(allocation: Allocation, pool: Pool) -> list[str]:
    """Check the SLOs (thesis 6.4.3); skipped for agnostic policies, which see flat throughputs."""
    if allocation.heterogeneity == "agnostic":
        return []
    reached = effective_throughputs(allocation, pool)

    def broken(job: Job) -> bool:
        slo = inf if job.slo_seconds is None else job.slo_seconds
        return reached[job.id] < job.steps / slo * (1 - 1e-9)

    return [
        f"job {job.id!r}: {reached[job.id]} steps/s miss its SLO of {job.slo_seconds} s"
        for job in pool.jobs.values()
        if broken(job)
    ]


def _budget(allocation: Allocation, pool: Pool) -> list[str]:
    """Check the dollars spent until all jobs are done against the budget (thesis 6.4.3)."""
    # Skipped for agnostic policies, which see flat throughputs.
    budget = pool.problem.budget_dollars
    if allocation.heterogeneity == "agnostic":
        return []
    assert budget is not None
    makespan = objective_of(allocation, pool, effective_throughputs(allocation, pool)) or inf
    dollars = spent_dollars(allocation, pool) / 3600.0 * makespan
    return [] if dollars <= budget * (1 + 1e-9) else [f"{dollars} dollars, above {budget} (6.4.3)"]


def _objective(allocation: Allocation, pool: Pool, known: Judge) -> list[str]:
    """Recompute the objective and the bound from the definitions and compare them."""
    certificate, sense = allocation.certificate, known.sense
    if certificate.sense != sense:
        return [f"{allocation.policy} is a {sense}, not a {certificate.sense}"]
    reached, faults = effective_throughputs(allocation, pool), []
    value = objective_of(allocation, pool, reached)
    if value is not None and not isclose(value, certificate.objective, rel_tol=TOLERANCE):
        faults.append(f"objective {certificate.objective} stated, {value} computed")
    bound = bound_of(allocation, pool)
    if certificate.bound is not None and bound is not None:
        weak = bound > certificate.bound if sense == "max" else bound < certificate.bound
        if weak and not isclose(bound, certificate.bound, rel_tol=TOLERANCE):
            faults.append(f"the prices prove {bound}, not the bound {certificate.bound}")
    if certificate.termination == "optimal":
        faults += _optimality(certificate)
        faults += unproved_levels(allocation, pool, reached)
    return faults


def _optimality(certificate: Certificate) -> list[str]:
    if certificate.bound is None or certificate.gap is None:
        return ["called optimal, but without a bound and a gap"]
    if not isclose(certificate.objective, certificate.bound, rel_tol=2 * TOLERANCE):
        return [f"called optimal, but {certificate.objective} is not near its bound"]
    if certificate.gap > 2 * TOLERANCE:
        return [f"called optimal, but with a gap of {certificate.gap}"]
    return []


# Check by weak duality that water filling raised every level as far as possible (thesis 5.4.3).
#
# A job was stopped correctly if it has reached its maximum, or if some prices of the certificate
# prove it. Prices prove it if the whole pool costs no more at these prices than the throughputs of
# this job and of the jobs that stopped before it. More for this job would then have to be taken
# from one of them.


# No job could have risen by more than this fraction of its throughput, or than twice this fraction
# of its best throughput.
LEVEL_TOLERANCE = 1e-5
# The pool's worth at the prices must be paid up to this fraction, or twice the certificate's gap.
SLACK = 2e-9
# Jobs whose stopping times differ by less than this fraction stopped together.
TOGETHER = 1e-6


def unproved_levels(allocation: Allocation, pool: Pool, reached: dict[str, float]) -> list[str]:
    """List the jobs for which no prices of the certificate prove that they could rise no further.

    ``pool`` is as the policy sees it, ``reached`` in steps per second.
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
    loose = final.reached < best * (1 - LEVEL_TOLERANCE)
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
        more = np.maximum(self.reached * (1 + LEVEL_TOLERANCE), 2 * LEVEL_TOLERANCE * best)
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

    ``rates`` and ``rents`` [jobs, columns]; a rent is what all of a job's time on a column costs.
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


# Devices that an allocation leaves idle, counted from the definition.
#
# An idle device is usable if a job could run faster on it while everything else stays as it is. A
# job could move there the time that it does not use, and the time that it spends on slower columns
# or in a slower pair (if its partner does not lose by running alone). Of the columns that hold a
# device type, the one that uses most idle devices of the type counts.


# Smaller fractions of a job's time, and of the devices of a type, are rounding errors.
NEGLIGIBLE_TIME = 1e-5
NEGLIGIBLE_PART = 1e-6
# A column on which a job runs slower than this fraction of its best rate is of no use to it.
NEGLIGIBLE_RATE = 1e-6
# Numbers of devices that differ by less than this fraction of the type's devices are the same.
SAME_PART = 2e-5


def idle_faults(allocation: Allocation, pool: Pool) -> list[str]:
    """List wrong counts of idle devices, and usable devices that filling should have shared."""
    idle = idle_devices(allocation, pool)
    usable = usable_devices(allocation, pool, idle)
    types = pool.problem.num_devices
    faults = [
        f"{number} idle {what}{name} stated, {counted[name]} counted"
        for what, stated, counted in (
            ("", allocation.idle_devices, idle),
            ("usable ", allocation.usable_idle_devices, usable),
        )
        if stated is not None
        for name, number in ({name: 0.0 for name in types} | stated).items()
        if name not in types or abs(number - counted[name]) > SAME_PART * types[name]
    ]
    if allocation.fill is None:
        return faults
    known = judge_of(allocation.policy)
    if known is not None and known.sees is not None:  # other columns stay idle on purpose
        usable = usable_devices(allocation, known.sees(pool), idle)
    return faults + [
        f"called filled, but {number} idle {name} could speed jobs up"
        for name, number in usable.items()
        if number > SAME_PART * types[name]
    ]


def idle_devices(allocation: Allocation, pool: Pool) -> dict[str, float]:
    """Count the devices of each resource that no job holds, on average over time."""
    held = _held(allocation, pool)
    left = {name: number - held[name] for name, number in pool.capacity.items()}
    return {
        name: number if number > NEGLIGIBLE_PART * pool.capacity[name] else 0.0
        for name, number in left.items()
    }


def usable_devices(allocation: Allocation, pool: Pool, idle: dict[str, float]) -> dict[str, float]:
    """Count the idle devices of each type that jobs could use, each type considered alone."""
    moves = _movable(allocation, pool)
    held = {resource: pool.held(resource) for resource in pool.capacity}
    room = np.full_like(moves, inf)
    for resource, number in held.items():
        left = np.full_like(moves, inf)
        np.divide(idle[resource], number, out=left, where=number > 0)
        room = np.minimum(room, left)
    moves = np.where(moves > NEGLIGIBLE_TIME, np.minimum(moves, room), 0.0)
    return {
        device: min(idle[device], fsum((held[device] * moves).max(axis=1)))
        for device in pool.problem.num_devices
    }


def _movable(allocation: Allocation, pool: Pool) -> Floats:
    """Return the fraction of its time that each job could move to each column and run faster."""
    rates = pool.rates
    place = {name: row for row, name in enumerate(pool.jobs)}
    column = {name: number for number, name in enumerate(pool.columns)}
    times = np.zeros_like(rates)
    for name, shares in allocation.x.items():
        for c, time in shares.items():
            times[place[name], column[c]] = time
    slower, spent = np.zeros_like(rates), times.sum(axis=1)
    for own_rate, time_there in zip(rates.T, times.T, strict=True):
        slower += np.where(own_rate[:, None] < rates, time_there[:, None], 0.0)
    for pair in allocation.pairs:
        for name, other in (pair.jobs, pair.jobs[::-1]):
            row = place[name]
            for c, time in pair.shares.items():
                spent[row] += time
                own, beside = pool.pair_rates((name, other), c)
                if pool.rate(other, c) >= beside:
                    slower[row] += np.where(own < rates[row], time, 0.0)
    useful = rates > NEGLIGIBLE_RATE * rates.max(axis=1, keepdims=True)
    unused = np.maximum(1.0 - spent, 0.0)
    return np.where(useful, slower + unused[:, None], 0.0)
