"""Share out what an optimum leaves idle: lexicographic max-min past the bottleneck (5.4.3).

The optimum of a max-min policy asks a throughput of every job and says nothing of what is left.
Water filling from there raises all throughputs together, each in proportion to what the optimum
asks of its job, until some can rise no further; the others rise on. The first level is the
optimum itself, so the policy's objective stays.
"""

from dataclasses import replace
from itertools import count

import numpy as np

from ....schema.errors import BackendError
from ...effort import OutOfTimeError, never
from ..engine import Outcome
from ..goals import LeastCurve, MaxMin
from ..instance import Instance
from ..program import Floats, equal_rows
from .water import WaterFilling, fill

# A filled allocation may lose this part of the objective to rounding.
KEPT = 1e-9
# Entries (rows x columns) of all programs together that are looked at without a time limit: half
# a minute of work, some six times that of the optimum where that ends the filling.
MOST_WORK = 2e8


def filled(instance: Instance, goal: MaxMin | LeastCurve, bare: Outcome) -> Outcome:
    """Share out what an optimum leaves idle; unique throughputs, with a proof of every level.

    Without a limit of the caller's it ends after a fixed amount of work.

    Args:
        instance: The jobs and the pool.
        goal: What was optimised.
        bare: An optimum, with the program's own objective.

    Returns:
        The filled outcome under the optimum's bound and prices; ``bare`` again, saying why,
        where water filling finds no proof, or not in time.
    """
    asked = _asked(goal, bare.objective)
    if isinstance(goal, MaxMin) and goal.allowed is not None:
        instance = replace(instance, rate=np.where(goal.allowed, instance.rate, 0.0))
    each = WaterFilling(
        unit=asked, weight=np.ones(len(asked)), entity=np.full(len(asked), -1, dtype=np.int64)
    )
    should_stop, late = instance.should_stop, "the time limit came before they were shared out"
    if should_stop is never:
        rows = int(equal_rows(np.column_stack((instance.rate, asked))).max()) + 1
        pieces, done = int(MOST_WORK / (rows * instance.rate.shape[1])), count()

        def should_stop() -> bool:
            return next(done) >= pieces

        late = "sharing them out takes more work than is done without a time limit"
    try:
        found = fill(replace(instance, should_stop=should_stop), each)
    except OutOfTimeError:
        return replace(bare, unfilled=late)
    except BackendError as error:
        return replace(bare, unfilled=f"sharing them out broke down ({error.message})")
    value = _value(goal, found.throughput)
    bound = bare.bound if np.isfinite(bare.bound) else value
    lost = (bare.objective - value) * (1.0 if isinstance(goal, MaxMin) else -1.0)
    if lost > KEPT * abs(bare.objective) or found.num_unproved:
        unproved = "no way of sharing them out could be proved"
        return replace(bare, unfilled=late if should_stop() else unproved)
    return replace(
        found,
        objective=value,
        bound=bare.bound,
        gap=max(abs(bound - value) / max(abs(bound), abs(value), 1e-300), found.gap),
        job_prices=bare.job_prices,
        resource_prices=bare.resource_prices,
        time_prices=bare.time_prices,
        method=f"{bare.method}; filled: {found.method}",
        is_filled=True,
    )


def _asked(goal: MaxMin | LeastCurve, objective: float) -> Floats:
    """Throughputs that the optimum demands of the jobs, up to a common factor [jobs]."""
    return goal.level if isinstance(goal, MaxMin) else goal.needed(objective)


def _value(goal: MaxMin | LeastCurve, throughput: Floats) -> float:
    """The program's objective at throughputs [jobs]."""
    if isinstance(goal, LeastCurve):
        return goal.value(throughput)
    rows = goal.level > 0
    return float((throughput[rows] / goal.level[rows]).min())
