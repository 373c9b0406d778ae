"""The policies of Gavel (thesis 5.4 and 6.4): each states its goal, and registers it.

``policy.POLICIES`` finds them here; plug-ins add others.
"""

from dataclasses import replace

import numpy as np

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.options import option
from .instance import Instance
from .policy import (
    LeastAttained,
    LeastCurve,
    MaxMin,
    Policy,
    Ratio,
    Total,
    inverse,
    normalised,
    register,
)
from .program import Floats, Ints
from .sum_of_ratios import SumOfRatios
from .water_filling.water import WaterFilling

# Minimum cost, with and without SLOs (thesis 5.4.2, 6.4.2, 6.4.3).
#
# Three readings, by name. ``min_cost`` is what Gavel's code maximises: the sum of throughput per
# dollar over columns, sum_m sum_j T_mj / c_j X_mj, one linear program. ``min_cost_ratio`` is the
# linear-fractional one: total throughput over total dollars, each job's throughput relative to
# its best. ``min_cost_per_job`` is the text's sum of ratios throughput(m, X) / cost(m, X): each
# ratio depends only on where a job runs, not how long, so each job keeps to its cheapest column,
# and of all such allocations a max-min fair one is returned. With SLOs that force jobs off their
# cheapest columns it is no linear program: ``min_cost_per_job_slo`` is solved by branch
# and bound (``sum_of_ratios``). ``min_dollars_slo`` spends least.


def priced(jobs: Instance) -> Floats:
    """Dollars per hour of each column [columns].

    Raises:
        ProblemError: A device type has no price.
    """
    if np.isnan(jobs.dollars).any():
        name = jobs.columns[int(np.isnan(jobs.dollars).argmax())]
        raise ProblemError(
            f"cost policies need a price of every device type, and {name!r} has none",
            hint="give dollars_per_hour in the cluster file",
        )
    return jobs.dollars


def slo_rates(jobs: Instance) -> Floats:
    """The throughput that each job's SLO asks for, 0 without one [jobs]."""
    rates: Floats = jobs.steps / jobs.slo_seconds
    return rates


def _per_dollar(jobs: Instance) -> Floats:
    worth: Floats = np.ones_like(jobs.rate) / priced(jobs)
    return worth


def _fractional(jobs: Instance) -> Floats:
    worth: Floats = np.ones_like(jobs.rate) / jobs.rate.max(axis=1)[:, None]
    return worth


def _per_job(jobs: Instance) -> MaxMin:
    if jobs.pair_rate is not None:
        raise ProblemError("min_cost_per_job does not weigh pairs; leave space sharing out")
    each = jobs.rate / (jobs.usage * priced(jobs))
    cheapest = each >= each.max(axis=1)[:, None] * (1 - 1e-12)
    return MaxMin(level=normalised(jobs), allowed=cheapest)


def _per_job_slo(jobs: Instance) -> SumOfRatios:
    if jobs.pair_rate is not None:
        raise ProblemError("min_cost_per_job_slo does not weigh pairs; leave space sharing out")
    return SumOfRatios(dollars=priced(jobs), floor=slo_rates(jobs), level=normalised(jobs))


def _sum_of_best(jobs: Instance, _: float) -> float:
    return float((jobs.rate / (jobs.usage * priced(jobs))).max(axis=1).sum())


_SPARING = "a device that the policy does not ask for costs nothing"

register(
    Policy(
        name="min_cost",
        title="most throughput per dollar, summed over columns (as Gavel's code)",
        sense="max",
        unit="steps/s per dollar/hour",
        leaves_idle=_SPARING,
        goal=lambda jobs: Total(worth=_per_dollar(jobs)),
    ),
    Policy(
        name="min_cost_slo",
        title="min_cost subject to every job's SLO",
        sense="max",
        unit="steps/s per dollar/hour",
        leaves_idle=_SPARING,
        goal=lambda jobs: Total(worth=_per_dollar(jobs), floor=slo_rates(jobs)),
    ),
    Policy(
        name="min_cost_ratio",
        title="most total normalised throughput per total dollar",
        sense="max",
        unit="jobs at full speed per dollar/hour",
        leaves_idle=_SPARING,
        goal=lambda jobs: Ratio(worth=_fractional(jobs), dollars=priced(jobs)),
    ),
    Policy(
        name="min_cost_ratio_slo",
        title="min_cost_ratio subject to every job's SLO",
        sense="max",
        unit="jobs at full speed per dollar/hour",
        leaves_idle=_SPARING,
        goal=lambda jobs: Ratio(
            worth=_fractional(jobs), dollars=priced(jobs), floor=slo_rates(jobs)
        ),
    ),
    Policy(
        name="min_cost_per_job",
        title="most throughput per dollar of each job, summed (as the thesis's text)",
        sense="max",
        unit="steps per dollar/3600",
        leaves_idle=_SPARING,
        goal=_per_job,
        report=_sum_of_best,
    ),
    Policy(
        name="min_cost_per_job_slo",
        title="min_cost_per_job subject to every job's SLO",
        sense="max",
        unit="steps per dollar/3600",
        leaves_idle=_SPARING,
        goal=_per_job_slo,
    ),
    Policy(
        name="min_dollars_slo",
        title="least spending that meets every job's SLO",
        sense="min",
        unit="dollars/hour",
        leaves_idle=_SPARING,
        goal=lambda jobs: Total(
            worth=np.zeros_like(jobs.rate), charge=priced(jobs), floor=slo_rates(jobs)
        ),
        report=lambda _, value: -value,
    ),
)


# First in, first out, each job on its fastest type (thesis 5.4.2); jobs stand in that order.


def in_order(jobs: Instance, order: Ints) -> Floats:
    """(M - place in ``order`` [jobs]) / throughput on the fastest type [jobs, columns]."""
    place = np.argsort(order).astype(float)
    worth: Floats = ((jobs.num_jobs - place) / jobs.rate.max(axis=1))[:, None] + 0.0 * jobs.rate
    return worth


register(
    Policy(
        name="fifo",
        title="first in, first out",
        sense="max",
        unit="weighted normalised throughput",
        goal=lambda jobs: Total(worth=in_order(jobs, np.arange(jobs.num_jobs))),
    ),
    Policy(
        name="static_priority",
        title="heaviest priority weight first, of equals the first in",
        sense="max",
        unit="weighted normalised throughput",
        goal=lambda jobs: Total(worth=in_order(jobs, np.argsort(-jobs.weight, kind="stable"))),
    ),
)


# Finish-time fairness (Themis): least largest ratio to finishing on 1/n of the cluster (5.4.2).


def _least_ratio(jobs: Instance) -> LeastCurve:
    alone = jobs.isolated_seconds + jobs.steps / jobs.isolated

    def needed(rho: float) -> Floats:
        left = rho * alone - jobs.elapsed_seconds
        return jobs.steps / np.maximum(left, 1e-300)

    def value(throughput: Floats) -> float:
        left = jobs.steps / np.maximum(throughput, 1e-300)
        return float(((jobs.elapsed_seconds + left) / alone).max())

    # No job can be faster than always on its best column.
    lowest = value(jobs.rate.max(axis=1)) if jobs.pair_rate is None else 0.0
    floor = float((jobs.elapsed_seconds / alone).max())
    return LeastCurve(needed=needed, value=value, lowest=max(lowest, floor))


register(
    Policy(
        name="finish_time_fairness",
        title="least largest finish-time ratio rho",
        sense="min",
        unit="ratio",
        goal=_least_ratio,
    )
)


# Multi-level fairness: entities share by weight, and share on by their own policy (5.4.3).


def _filled_by_entity(jobs: Instance) -> WaterFilling:
    if jobs.entity is None or not jobs.entities:
        raise ProblemError("the hierarchical policy needs entities; the jobs name none")
    return WaterFilling(
        unit=normalised(jobs), weight=jobs.weight, entity=jobs.entity, entities=jobs.entities
    )


register(
    Policy(
        name="hierarchical",
        title="weighted fairness over entities of any depth, fairness or FIFO inside",
        sense="max",
        unit="normalised throughput per share",
        goal=_filled_by_entity,
    )
)


# Least attained service: max-min fairness over normalised throughput (thesis 5.4.1).

register(
    Policy(
        name="las",
        title="max-min fairness (LAS), all jobs alike",
        sense="max",
        unit="normalised throughput",
        goal=lambda jobs: MaxMin(level=normalised(jobs)),
        incremental=LeastAttained(weighted=False),
    ),
    Policy(
        name="las_weighted",
        title="max-min fairness (LAS), by priority weight",
        sense="max",
        unit="normalised throughput per weight",
        goal=lambda jobs: MaxMin(level=normalised(jobs, jobs.weight)),
        incremental=LeastAttained(weighted=True),
    ),
)


# Finish all jobs as soon as possible (thesis 5.4.2), also within a budget (6.4.3).
#
# With z = 1 / makespan both are one linear program; no search over the makespan is needed.

BUDGET_MARGIN = 1e-9  # the budget is kept to the last bit after rounding


def _within_budget(jobs: Instance) -> MaxMin:
    if jobs.budget_dollars is None:
        raise ProblemError(
            "makespan_budget needs a budget", hint=f"give {option('budget_dollars', 'DOLLARS')}"
        )
    dollars = priced(jobs) / 3600.0
    least = _least_dollars(jobs, dollars)
    if least > jobs.budget_dollars * (1 - 2 * BUDGET_MARGIN):
        raise InfeasibleError(
            f"a budget of {jobs.budget_dollars:.6g} dollars cannot finish the jobs: on the "
            f"cheapest devices they cost {least:.6g}",
            hint=f"raise the budget above {least:.6g} dollars",
        )
    budget = jobs.budget_dollars * (1 - BUDGET_MARGIN)
    return MaxMin(level=jobs.steps, dollars=dollars, budget=budget)


def _least_dollars(jobs: Instance, dollars: Floats) -> float:
    """What the jobs cost at least, however long they take; ``dollars`` [columns] per second."""
    if jobs.pair_rate is None:
        with np.errstate(divide="ignore"):
            each = np.where(jobs.rate > 0, jobs.usage * dollars / jobs.rate, np.inf).min(axis=1)
        return float(each @ jobs.steps)
    # Pairs split a price: a program without a limit on devices, at a pace that any column keeps.
    beside = jobs.pair_rate[jobs.kind].reshape(jobs.num_jobs, -1)
    rates = np.hstack((jobs.rate, beside))
    pace = float((jobs.steps / np.where(rates > 0, rates, np.inf).min(axis=1)).max())
    plenty = np.full(len(jobs.capacity), float((jobs.usage.max() * jobs.resources).sum()))
    goal = Total(worth=np.zeros_like(jobs.rate), charge=dollars, floor=jobs.steps / pace)
    return pace * -goal.optimise(replace(jobs, capacity=plenty * jobs.num_jobs)).objective


register(
    Policy(
        name="makespan",
        title="least time to finish all jobs",
        sense="min",
        unit="seconds",
        goal=lambda jobs: MaxMin(level=jobs.steps),
        report=inverse,
    ),
    Policy(
        name="makespan_budget",
        title="least time to finish all jobs within a budget",
        sense="min",
        unit="seconds",
        goal=_within_budget,
        report=inverse,
        leaves_idle="a device that the policy does not ask for costs nothing of the budget",
        single_use="spends one budget on the jobs of one allocation",
    ),
)


# Shortest job first (thesis 5.4.2): the shortest job runs at its best.
#
# The thesis minimises the duration of the shortest job, which says nothing of the others; they
# follow in order of their own shortest durations, by the objective of FIFO in that order.


def _shortest(jobs: Instance) -> Total:
    durations = jobs.steps / jobs.rate.max(axis=1)
    order = np.argsort(durations, kind="stable")
    floor = np.zeros(jobs.num_jobs)
    floor[order[0]] = jobs.rate[order[0]].max()
    return Total(worth=in_order(jobs, order), floor=floor)


register(
    Policy(
        name="sjf",
        title="shortest job first",
        sense="min",
        unit="seconds of the shortest job",
        goal=_shortest,
        report=lambda jobs, _: float((jobs.steps / jobs.rate.max(axis=1)).min()),
    )
)


# Maximum total throughput (thesis 6.4.1), in steps or relative to each job's best type.

register(
    Policy(
        name="max_throughput",
        title="most steps per second over all jobs",
        sense="max",
        unit="steps/s",
        goal=lambda jobs: Total(worth=np.ones_like(jobs.rate)),
    ),
    Policy(
        name="max_normalised_throughput",
        title="most throughput over all jobs, each relative to its fastest type",
        sense="max",
        unit="jobs at full speed",
        goal=lambda jobs: Total(worth=_fractional(jobs)),
    ),
)


# Max-min fairness carried on after the first bottleneck: Pareto efficient (thesis 5.4.3).

register(
    Policy(
        name="las_water_filling",
        title="max-min fairness by priority weight, with water filling",
        sense="max",
        unit="normalised throughput per weight",
        goal=lambda jobs: WaterFilling(
            unit=normalised(jobs), weight=jobs.weight, entity=np.full(jobs.num_jobs, -1)
        ),
    )
)
