"""Multi-level fairness: entities share by weight, and share on by their own policy (5.4.3)."""

import numpy as np

from ....schema.errors import ProblemError
from ..instance import Instance
from ..policy import Policy, normalised
from ..water import Fill, TreeShares


def _goal(jobs: Instance) -> Fill:
    if jobs.entity is None or not jobs.entities:
        raise ProblemError("the hierarchical policy needs entities; the jobs name none")
    tree = TreeShares(jobs.entities, jobs.entity, jobs.weight, np.ones(jobs.num_jobs))
    alike = np.column_stack((jobs.entity, jobs.weight))
    group = np.unique(alike, axis=0, return_inverse=True)[1].reshape(-1)
    # A job that waits its turn is like no other.
    waiting = np.flatnonzero(tree.first_come)
    group[waiting] = len(alike) + np.arange(len(waiting))
    return Fill(unit=normalised(jobs), shares=tree, group=group)


POLICIES = (
    Policy(
        name="hierarchical",
        title="weighted fairness over entities of any depth, fairness or FIFO inside",
        sense="max",
        unit="normalised throughput per share",
        goal=_goal,
    ),
)
