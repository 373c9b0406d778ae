"""Drop as few SLOs as needed where not all can be met, so that a run does not end."""

from dataclasses import replace

import numpy as np

from ....schema.errors import InfeasibleError
from ....solvers.allocation import Instance, Policy, solve
from ....solvers.allocation.engine import Outcome
from ....solvers.allocation.goals import MaxMin, max_min
from ..arrays import Floats


def solve_what_can_be_met(instance: Instance, policy: Policy) -> tuple[Outcome, list[int]]:
    """Solve a policy, dropping SLOs until the others can be met.

    Dropped at once: SLOs in the past, and those that ask for more than the job's fastest devices.
    Then, one after another, the SLO whose throughput costs most at the prices of the bottleneck
    (of the program that raises all floors together), of equals the earlier job's.

    Args:
        instance: The jobs; SLOs that are in the past are not positive.
        policy: Any policy; without floors nothing is dropped.

    Returns:
        The outcome, and the jobs (places) whose SLO was dropped.

    Raises:
        InfeasibleError: Something else than SLOs cannot be met.
    """
    slo = instance.slo_seconds.copy()
    floor = _floor(replace(instance, slo_seconds=np.where(slo > 0, slo, np.inf)), policy)
    if floor is None:
        return solve(instance, policy), []
    best = instance.rate.max(axis=1)
    fast = best * (1 - 1e-9) if instance.pair_rate is None else best
    lost = np.flatnonzero((slo <= 0) | (floor > fast)).tolist()
    while True:
        slo[lost] = np.inf
        fewer = replace(instance, slo_seconds=slo)
        try:
            return solve(fewer, policy), lost
        except InfeasibleError:
            floor = _floor(fewer, policy)
            if floor is None or not (floor > 0).any():
                raise
            prices = max_min(fewer, MaxMin(level=floor)).job_prices
            lost.append(int(np.argmax(np.where(floor > 0, prices * floor + 1e-300, 0.0))))


def _floor(instance: Instance, policy: Policy) -> Floats | None:
    """The least throughputs that a policy asks for [jobs], None where it asks for none."""
    floor: Floats | None = getattr(policy.goal(instance), "floor", None)
    return floor
