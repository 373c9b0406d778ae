"""Maximum total throughput (thesis 6.4.1), in steps or relative to each job's best type."""

import numpy as np

from ..goals import Total
from ..policy import Policy, register

register(
    Policy(
        name="max_throughput",
        title="most steps per second over all jobs",
        sense="max",
        unit="steps/s",
        goal=lambda jobs: Total(worth=np.ones_like(jobs.rate)),
    ),
    Policy(
        name="max_normalised_throughput",
        title="most throughput over all jobs, each relative to its fastest type",
        sense="max",
        unit="jobs at full speed",
        goal=lambda jobs: Total(worth=np.ones_like(jobs.rate) / jobs.rate.max(axis=1)[:, None]),
    ),
)
