"""Finish all jobs as soon as possible (thesis 5.4.2), also within a budget (6.4.3).

With z = 1 / makespan both are one linear program; no search over the makespan is needed.
"""

from dataclasses import replace

import numpy as np

from ....schema.errors import InfeasibleError, ProblemError
from ....schema.options import option
from ..goals import MaxMin, Total, total
from ..instance import Instance
from ..policy import Policy, inverse, register
from ..program import Floats
from .cost import priced

BUDGET_MARGIN = 1e-9  # the budget is kept to the last bit after rounding


def _within_budget(jobs: Instance) -> MaxMin:
    if jobs.budget_dollars is None:
        raise ProblemError(
            "makespan_budget needs a budget",
            hint=f"give {option('budget_dollars', 'DOLLARS')}",
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
    found = total(
        replace(jobs, capacity=plenty * jobs.num_jobs),
        Total(worth=np.zeros_like(jobs.rate), charge=dollars, floor=jobs.steps / pace),
    )
    return pace * -found.objective


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
