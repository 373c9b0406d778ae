"""Least attained service: max-min fairness over normalised throughput (thesis 5.4.1)."""

from ..goals import MaxMin
from ..policy import LeastAttained, Policy, normalised, register

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
