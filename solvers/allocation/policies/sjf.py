"""Shortest job first (thesis 5.4.2): the shortest job runs at its best.

The thesis minimises the duration of the shortest job, which says nothing of the others; they
follow in order of their own shortest durations, by the objective of FIFO in that order.
"""

import numpy as np

from ..goals import Total
from ..instance import Instance
from ..policy import Policy, register
from .fifo import in_order


def _shortest(jobs: Instance) -> Total:
    durations = jobs.steps / jobs.rate.max(axis=1)
    order = np.argsort(durations, kind="stable")
    place = np.empty(jobs.num_jobs)
    place[order] = np.arange(jobs.num_jobs)
    floor = np.zeros(jobs.num_jobs)
    floor[order[0]] = jobs.rate[order[0]].max()
    return Total(worth=in_order(jobs, place), floor=floor)


register(
    Policy(
        name="sjf",
        title="shortest job first",
        sense="min",
        unit="seconds of the shortest job",
        goal=_shortest,
        report=lambda jobs, _: float((jobs.steps / jobs.rate.max(axis=1)).min()),
    ),
)
