"""First in, first out, each job on its fastest type (thesis 5.4.2); jobs stand in that order."""

import numpy as np

from ..goals import Total
from ..instance import Instance
from ..policy import Policy, register
from ..program import Floats


def in_order(jobs: Instance, place: Floats) -> Floats:
    """(M - place) / throughput on the fastest type [jobs, 1]."""
    worth: Floats = ((jobs.num_jobs - place) / jobs.rate.max(axis=1))[:, None] + 0.0 * jobs.rate
    return worth


def _by_weight(jobs: Instance) -> Floats:
    place = np.empty(jobs.num_jobs)
    place[np.argsort(-jobs.weight, kind="stable")] = np.arange(jobs.num_jobs)
    return place


register(
    Policy(
        name="fifo",
        title="first in, first out",
        sense="max",
        unit="weighted normalised throughput",
        goal=lambda jobs: Total(worth=in_order(jobs, np.arange(jobs.num_jobs, dtype=float))),
    ),
    Policy(
        name="static_priority",
        title="heaviest priority weight first, of equals the first in",
        sense="max",
        unit="weighted normalised throughput",
        goal=lambda jobs: Total(worth=in_order(jobs, _by_weight(jobs))),
    ),
)
