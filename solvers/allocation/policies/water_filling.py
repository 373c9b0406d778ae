"""Max-min fairness carried on after the first bottleneck: Pareto efficient (thesis 5.4.3)."""

import numpy as np

from ..policy import Policy, normalised
from ..water import Fill, constant_shares

POLICIES = (
    Policy(
        name="las_water_filling",
        title="max-min fairness by priority weight, with water filling",
        sense="max",
        unit="normalised throughput per weight",
        goal=lambda jobs: Fill(
            unit=normalised(jobs),
            shares=constant_shares(jobs.weight),
            group=np.unique(jobs.weight, return_inverse=True)[1],
        ),
    ),
)
