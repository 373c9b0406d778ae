"""Max-min fairness carried on after the first bottleneck: Pareto efficient (thesis 5.4.3)."""

import numpy as np

from ..policy import Policy, normalised, register
from ..water_filling.water import WaterFilling

register(
    Policy(
        name="las_water_filling",
        title="max-min fairness by priority weight, with water filling",
        sense="max",
        unit="normalised throughput per weight",
        goal=lambda jobs: WaterFilling(
            unit=normalised(jobs),
            weight=jobs.weight,
            entity=np.full(jobs.num_jobs, -1),
        ),
    ),
)
