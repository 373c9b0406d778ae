"""A lower bound on the cost of a job that may move among offers, with all prices known in advance.

For each stretch in which the job may end there is a Lagrangian bound, and the least of these is the
answer. For any value v of a unit of work, dollars >= v * work + min over ways to hold offers of
(dollars - v * work done). The minimum is a dynamic program over stretches and offers; of several v
the one with the greatest bound is taken. Ways to hold offers move at the start of a stretch only,
as all strategies do. A launch loses the work of one restart, or of the whole stretch where that is
shorter; this never counts too much.
"""

import numpy as np

from ...schema.errors import ProblemError
from .offers import MovingJob, Prices

_VALUES = 96  # of a unit of work; more sharpen the bound, any are valid


def least_dollars(job: MovingJob, prices: Prices) -> float:
    """At least what any way to move among the offers costs; O(values x stretches x offers^2).

    Raises:
        ProblemError: The job cannot end before the prices do.
    """
    rates = np.array([job.work_per_second[offer.device_type] for offer in prices.offers])
    known = np.isfinite(prices.dollars_per_second)
    cost = np.where(known, prices.dollars_per_second, np.inf)
    value = _values(cost, rates)[:, None]
    clouds = np.array([offer.cloud for offer in prices.offers])
    groups = [clouds == name for name in dict.fromkeys(clouds)]
    away = job.cloud_move_dollars
    held = np.full((len(value), len(rates)), np.inf)
    bound, most_work = np.inf, 0.0
    for stretch, length in enumerate(prices.seconds):
        lost = value * rates * min(job.restart_seconds, length)
        entered = held.copy()
        if stretch == 0:
            entered = lost
        else:
            anywhere = held.min(axis=1, keepdims=True) + away
            for group in groups:
                near = np.minimum(held[:, group].min(axis=1, keepdims=True), anywhere)
                entered[:, group] = np.minimum(held[:, group], near + lost[:, group])
        paid = cost[stretch] * length
        gained = value * rates * length
        step = np.where(known[stretch], paid - gained, np.inf)
        usable = np.where(known[stretch], entered, np.inf)
        most_work += float(np.max(rates * known[stretch])) * length
        if most_work >= job.work * (1 - 1e-9):  # the job can have ended by the end of this stretch
            last = (usable + np.minimum(step, 0.0)).min(axis=1) + value[:, 0] * job.work
            bound = min(bound, float(last.max()))
        held = usable + step
    if not np.isfinite(bound):
        raise ProblemError("the job cannot end before its prices do", hint="give less work")
    return max(bound, 0.0)


def _values(cost: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Dollars for a unit of work, from what it costs at the best to what it costs at the worst."""
    each = (cost / rates)[np.isfinite(cost)]
    each = each[each > 0]
    if not each.size:
        return np.zeros(1)
    low, high = float(each.min()), float(each.max())
    told = np.unique(each)  # of devices alike, the best value is one of these
    few = told if told.size <= _VALUES else told[:0]
    return np.concatenate([[0.0], np.geomspace(low / 2, high * 2, _VALUES), few])
