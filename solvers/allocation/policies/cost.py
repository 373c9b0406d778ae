"""Minimum cost, with and without SLOs (thesis 5.4.2, 6.4.2, 6.4.3).

Three readings, by name. ``min_cost`` is what Gavel's code maximises: the sum of throughput per
dollar over columns, sum_m sum_j T_mj / c_j X_mj, one linear program. ``min_cost_ratio`` is the
linear-fractional one: total throughput over total dollars, each job's throughput relative to
its best. ``min_cost_per_job`` is the text's sum of ratios throughput(m, X) / cost(m, X): each
ratio depends only on where a job runs, not how long, so each job keeps to its cheapest column,
and of all such allocations a max-min fair one is returned. With SLOs that force jobs off their
cheapest columns a sum of ratios is no linear program: ``min_cost_per_job_slo`` is solved by branch
and bound (``sum_of_ratios``). ``min_dollars_slo`` spends least.
"""

import numpy as np

from ....schema.errors import ProblemError
from ..goals import MaxMin, Ratio, Total
from ..instance import Instance
from ..policy import Policy, normalised, register
from ..program import Floats
from ..sum_of_ratios import SumOfRatios


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
