"""Finish-time fairness (Themis): least largest ratio to finishing on 1/n of the cluster (5.4.2)."""

import numpy as np

from ..goals import LeastCurve
from ..instance import Instance
from ..policy import Policy, register
from ..program import Floats


def _goal(jobs: Instance) -> LeastCurve:
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
        goal=_goal,
    ),
)
