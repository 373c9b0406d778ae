"""The judges of the package's own policies: objectives and bounds by the thesis's formulas."""

from collections.abc import Callable
from dataclasses import replace
from math import fsum, inf

from ...schema.jobs import Allocation, Certificate, Job
from .allocation_bounds import bound_by_regions, floor, owed, priced_capacity, sum_of_ratios
from .allocation_policies import Pool, finish_time_ratio, needed_throughput, spent_dollars
from .judges import JUDGES, Judge, Reached, Tree, tree_of_equals

_HALVINGS = 200


def _level(of: Callable[[Pool, Job], float]) -> Callable[[Pool], dict[str, float]]:
    """Make a judge's ``level`` from the throughput one job needs per unit of the objective."""
    return lambda pool: {name: of(pool, job) for name, job in pool.jobs.items()}


def _fair(pool: Pool, job: Job) -> float:
    """Return one unit of a job's normalised throughput (5.4.1), in steps per second."""
    return pool.equal(job.id) / job.scale_factor


def _by_weight(pool: Pool, job: Job) -> float:
    return job.priority_weight * pool.equal(job.id) / job.scale_factor


def _first_shares(pool: Pool) -> dict[str, float]:
    shares = Tree(pool.jobs.values(), pool.problem.jobs.entities).first_shares()
    return {m: shares[m] * pool.equal(m) / job.scale_factor for m, job in pool.jobs.items()}


def _rise_by_entity(_: Allocation, pool: Pool) -> tuple[dict[str, float], Tree]:
    return _level(_fair)(pool), Tree(pool.jobs.values(), pool.problem.jobs.entities)


def _rise_by_weight(_: Allocation, pool: Pool) -> tuple[dict[str, float], Tree]:
    jobs = pool.jobs.values()
    return _level(_fair)(pool), Tree((replace(job, entity=None) for job in jobs), ())


def _rise_at_rho(allocation: Allocation, pool: Pool) -> tuple[dict[str, float], Tree]:
    rho = allocation.certificate.objective
    return {name: needed_throughput(pool, name, rho) for name in pool.jobs}, tree_of_equals(pool)


def _rise_alike(_: Allocation, pool: Pool) -> tuple[dict[str, float], Tree]:
    return _level(_fair)(pool), tree_of_equals(pool)


def _in_order(names: list[str], pool: Pool) -> Callable[[str, str], float]:
    """Worth of a step: (M - place) / throughput on the job's fastest column (5.4.2)."""
    place = {name: len(names) - i for i, name in enumerate(names)}
    best = {name: pool.best(name) for name in names}
    return lambda m, c: place[m] / best[m]


def _heaviest_first(pool: Pool) -> Callable[[str, str], float]:
    names = sorted(pool.jobs, key=lambda name: -pool.jobs[name].priority_weight)
    return _in_order(names, pool)


def _worth_normalised(pool: Pool) -> Callable[[str, str], float]:
    best = {name: pool.best(name) for name in pool.jobs}
    return lambda m, c: 1.0 / best[m]


def _worth_per_dollar(pool: Pool) -> Callable[[str, str], float]:
    return lambda m, c: 1.0 / pool.unit_dollars(m, c)


def _largest_ratio(_: Allocation, pool: Pool, reached: Reached) -> float:
    return max(finish_time_ratio(pool, name, reached[name]) for name in pool.jobs)


def _shortest_seconds(_: Allocation, pool: Pool, reached: Reached) -> float:
    return min(job.steps / max(reached[name], 1e-300) for name, job in pool.jobs.items())


def _earned_per_dollar(allocation: Allocation, pool: Pool, reached: Reached) -> float:
    spent = spent_dollars(allocation, pool)
    earned = fsum(reached[name] / pool.best(name) for name in pool.jobs)
    return earned / spent if spent > 0 else 0.0


def _sum_per_dollar(allocation: Allocation, pool: Pool, reached: Reached) -> float:
    return fsum(_own_per_dollar(allocation, pool, name, reached[name]) for name in pool.jobs)


def _own_per_dollar(allocation: Allocation, pool: Pool, name: str, reached: float) -> float:
    spent = fsum(pool.dollars(name, c) * time for c, time in allocation.x[name].items())
    return reached / spent if spent > 0 else 0.0


def _least_rho(certificate: Certificate, pool: Pool) -> float:
    """Bound finish-time fairness (5.4.2): the rho at which the jobs' throughputs cost the pool."""
    # At the prices, the throughputs that a smaller rho needs are worth more than the pool.
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
    """Bound SJF (5.4.2): no job is faster than on its fastest column all the time."""
    return min(job.steps / pool.best(name) for name, job in pool.jobs.items())


def _least_dollars(certificate: Certificate, pool: Pool) -> float:
    """Bound from below the dollars per hour that the SLOs need, at the prices (6.4.3)."""
    return owed(certificate, pool) - priced_capacity(certificate, pool, charge=1.0)


def _per_dollar(pool: Pool) -> dict[str, float]:
    """Return each job's steps per second per dollar an hour, on its cheapest column."""
    return {
        name: max(
            pool.rate(name, column) / pool.dollars(name, column)
            for column in pool.columns
            if pool.rate(name, column) > 0
        )
        for name in pool.jobs
    }


def _best_ratio(_: Certificate, pool: Pool) -> float:
    """Bound the ratio of totals (5.4.2) without SLOs and pairs: the best job on its best column."""
    return max(each / pool.best(name) for name, each in _per_dollar(pool).items())


def _sum_of_ratios(_: Certificate, pool: Pool) -> float:
    """Bound the sum of ratios (6.4.2): each job's ratio is at most that of its cheapest column."""
    return fsum(_per_dollar(pool).values())


def _ratio_under_slos(certificate: Certificate, pool: Pool) -> float:
    """Bound the ratio N / D of throughput and dollars under SLOs by q + excess / least."""
    # This holds if N - q D <= excess and D >= least for all allocations; q is the stated
    # objective.
    q = certificate.objective
    worth = {(m, c): 1.0 / pool.best(m) for m in pool.jobs for c in pool.columns}
    excess = priced_capacity(certificate, pool, worth, charge=q) - owed(certificate, pool)
    cheapest = _cheapest_steps(pool)
    least = fsum(floor(pool, name) * cheapest[name] for name in pool.jobs)
    bound = q + max(excess, 0.0) / least if least > 0 else inf
    return bound if pool.problem.space_sharing else min(bound, _best_ratio(certificate, pool))


def _cheapest_steps(pool: Pool) -> dict[str, float]:
    """Return each job's lowest cost of a step per second, in dollars an hour; in a pair, half."""
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


_JUDGES = {
    "las": Judge(level=_level(_fair)),
    "las_weighted": Judge(level=_level(_by_weight)),
    "las_water_filling": Judge(level=_level(_by_weight), rises=_rise_by_weight, fills_itself=True),
    "hierarchical": Judge(level=_first_shares, rises=_rise_by_entity, fills_itself=True),
    "makespan": Judge(sense="min", level=_level(lambda _, job: job.steps)),
    "makespan_budget": Judge(
        sense="min",
        level=_level(lambda _, job: job.steps),
        counts_dollars=True,
        keeps_budget=True,
    ),
    "finish_time_fairness": Judge(
        sense="min", objective=_largest_ratio, bound=_least_rho, rises=_rise_at_rho
    ),
    "fifo": Judge(worth=lambda pool: _in_order(list(pool.jobs), pool)),
    "static_priority": Judge(worth=_heaviest_first),
    "sjf": Judge(sense="min", objective=_shortest_seconds, bound=_shortest),
    "max_throughput": Judge(worth=lambda _: lambda m, c: 1.0),
    "max_normalised_throughput": Judge(worth=_worth_normalised),
    "min_cost": Judge(worth=_worth_per_dollar, counts_dollars=True),
    "min_cost_slo": Judge(worth=_worth_per_dollar, counts_dollars=True, keeps_slos=True),
    "min_cost_ratio": Judge(objective=_earned_per_dollar, bound=_best_ratio, counts_dollars=True),
    "min_cost_ratio_slo": Judge(
        objective=_earned_per_dollar, bound=_ratio_under_slos, counts_dollars=True, keeps_slos=True
    ),
    "min_cost_per_job": Judge(
        objective=_sum_per_dollar,
        bound=_sum_of_ratios,
        rises=_rise_alike,
        sees=Pool.cheapest,
        counts_dollars=True,
    ),
    "min_cost_per_job_slo": Judge(
        objective=sum_of_ratios,
        bound=bound_by_regions,
        counts_dollars=True,
        keeps_slos=True,
    ),
    "min_dollars_slo": Judge(
        sense="min",
        objective=lambda allocation, pool, _: spent_dollars(allocation, pool),
        bound=_least_dollars,
        counts_dollars=True,
        keeps_slos=True,
    ),
}

for _policy, _definition in _JUDGES.items():
    JUDGES.add(_policy, _definition, __name__)
