"""Check an allocation against the definitions (thesis 5.3.1), without any code of the solvers.

Constraints 5.1 to 5.3 must hold without a tolerance; sums use ``fsum``, which rounds only once.
The effective throughputs and the objective are recomputed, and the bound is derived again from
the certificate's prices. The code is slow and simple on purpose.
"""

from collections import defaultdict
from math import fsum, inf, isclose

from ...schema.jobs import Allocation, AllocationProblem, Certificate, Job
from .allocation_bounds import bound_of
from .allocation_idle import idle_faults
from .allocation_levels import unproved_levels
from .allocation_policies import Pool, spent_dollars
from .judges import Judge, judge_of, objective_of

TOLERANCE = 1e-6


def check(allocation: Allocation, problem: AllocationProblem) -> list[str]:
    """List every fault of an allocation; an empty list means that it is valid for the problem.

    If no judge is registered for the policy, only the constraints that every allocation must keep
    are checked, and the objective is not.

    Args:
        allocation: The allocation to check.
        problem: The jobs, throughputs and devices that it claims to be for.

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
    """Check constraints 5.1 (which the schema checks too) and 5.2.

    Also, a job may spend no time on a column on which its throughput is 0.
    """
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
    used: dict[str, list[float]] = defaultdict(list)
    for name, shares in allocation.x.items():
        for column, time in shares.items():
            for resource, number in pool.holds(name, column).items():
                used[resource].append(number * time)
    for pair in allocation.pairs:
        for column, time in pair.shares.items():
            for resource, number in pool.holds(pair.jobs[0], column).items():
                used[resource].append(number * time)
    return [
        f"{resource}: {fsum(terms)} devices used, above {pool.capacity[resource]} (5.3)"
        for resource, terms in used.items()
        if fsum(terms) > pool.capacity[resource]
    ]


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
    """Check the dollars spent until all jobs are done against the budget (thesis 6.4.3).

    Skipped for agnostic policies, which see flat throughputs.
    """
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
