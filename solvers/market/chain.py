"""How spot machines come and go, as a Markov chain over the length of the present run.

A state says whether spot machines can be had ("there") or not ("gone"), and the class of the number
of ticks since that last changed. Run lengths of real traces have heavy tails: the longer a state
has lasted, the longer it is likely to last. Transitions are counted in windows of history; a weak
prior covers states that the history never shows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError

RUN_CLASSES = (1, 2, 4, 7, 13, 25, 49)
"""The least run length, in ticks, of each class."""
_PRIOR_STAYS, _PRIOR_FLIPS = 0.9, 0.1


@dataclass(frozen=True, slots=True)
class Chain:
    """Transitions [states, states]; states are the classes of "there", then those of "gone"."""

    transitions: NDArray[np.float64]

    @property
    def num_states(self) -> int:
        """Both kinds of classes."""
        return len(self.transitions)

    @property
    def num_there(self) -> int:
        """The states in which spot machines can be had."""
        return self.num_states // 2


def state_of(has_spot: bool, run_length: int, classes: Sequence[int] = RUN_CLASSES) -> int:
    """The state of a run so far; ``classes`` as for ``chain_of``."""
    index = sum(run_length >= least for least in classes) - 1
    return index if has_spot else len(classes) + index


def states_of(
    window: Sequence[int | None], classes: Sequence[int] = RUN_CLASSES
) -> Iterator[int | None]:
    """The state in each tick of a window; None where it is unknown.

    The run before the window, or before what is unknown, counts for nothing.
    """
    last, length = None, 0
    for tick in window:
        length = length + 1 if tick == last else 1
        last = tick
        yield None if tick is None else state_of(bool(tick), length, classes)


def chain_of(
    windows: Iterable[Sequence[int | None]], classes: Sequence[int] = RUN_CLASSES
) -> Chain:
    """Count the transitions of windows of history.

    Args:
        windows: Each [ticks]: 1 there, 0 gone, None unknown. Nothing is counted across what is
            unknown.
        classes: The least run length of each class; the first is 1.

    Raises:
        ProblemError: No two neighbouring ticks are known.
    """
    half = len(classes)
    counts = np.zeros((2 * half, 2 * half))
    for window in windows:
        for before, after in pairwise(states_of(window, classes)):
            if before is not None and after is not None:
                counts[before, after] += 1
    if not counts.any():
        raise ProblemError("the history has no two neighbouring ticks that are known")
    for state in range(2 * half):
        counts[state, state] += _PRIOR_STAYS
        counts[state, half if state < half else 0] += _PRIOR_FLIPS
    return Chain(counts / counts.sum(axis=1, keepdims=True))
