"""How many spot machines there are, as a Markov chain learned from traces.

Transitions are counted in the history. A count that the history shows seldom or never changes as
counts do on average: of the changes seen anywhere, those that stay between none and all.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ....schema.errors import ProblemError

Transitions = NDArray[np.float64]
"""[counts + 1, counts + 1] chances of the count in the next tick, by that of this one."""
_POOLED_TICKS = 12.0  # weight of the average change, in ticks of history at one count
_ANY_CHANGE = 0.01  # chance of a change that the history does not show


def transitions_of(traces: Iterable[Sequence[int | None]], num_machines: int) -> Transitions:
    """Count the transitions of traces.

    Args:
        traces: Each [ticks] spot machines there; None unknown, across which nothing is counted.
        num_machines: What counts are cut at: a job has no use for more.

    Raises:
        ProblemError: No two neighbouring ticks are known.
    """
    counts = np.zeros((num_machines + 1, num_machines + 1))
    for trace in traces:
        for before, after in zip(trace, trace[1:], strict=False):
            if before is not None and after is not None:
                counts[min(before, num_machines), min(after, num_machines)] += 1
    if not counts.any():
        raise ProblemError("the history has no two neighbouring ticks that are known")
    places = np.arange(num_machines + 1)
    change = places[None, :] - places[:, None]
    seen = np.array(
        [counts[change == step].sum() for step in range(-num_machines, num_machines + 1)]
    )
    pooled = (seen / seen.sum())[change + num_machines] + _ANY_CHANGE / (num_machines + 1)
    pooled /= pooled.sum(axis=1, keepdims=True)
    weighed = counts + _POOLED_TICKS * pooled
    return np.asarray(weighed / weighed.sum(axis=1, keepdims=True))
