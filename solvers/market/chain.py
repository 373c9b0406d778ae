"""How spot machines come and go in some zones, as a Markov chain learned from history.

A zone's state says whether spot machines can be had ("there") or not ("gone"), and the class of the
number of ticks since that last changed. Run lengths of real traces have heavy tails: the longer a
state has lasted, the longer it is likely to last. Transitions are counted in windows of history; a
weak prior covers states that the history never shows.

A state of several zones is one of each, so there are as many as the product of theirs: the more
zones, the fewer classes each has. Their transitions are counted in ticks in which all zones are
known. Beside the counts stands what the zones' own chains would give if zones had nothing to do
with each other; it decides where the counts are few.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError

MOST_ZONES = 6
_MOST_STATES = 64
_CLASSES = ((1, 2, 4, 7, 13, 25, 49), (1, 3, 7, 25), (1, 7), (1,))
"""The least run length, in ticks, of each class; for one zone, two, and more."""
_PRIOR_STAYS, _PRIOR_FLIPS = 0.9, 0.1
_APART_TICKS = 12.0  # weight of zones that have nothing to do with each other, in ticks of history


@dataclass(frozen=True, slots=True)
class Chain:
    """Transitions [states, states] of zones together; ``classes`` are those of each zone's runs."""

    transitions: NDArray[np.float64]
    classes: tuple[int, ...]
    num_zones: int

    @property
    def has_spot(self) -> NDArray[np.bool_]:
        """[zones, states] whether a zone has spot machines."""
        states = np.arange(len(self.transitions))
        base = 2 * len(self.classes)
        powers = base ** np.arange(self.num_zones - 1, -1, -1)
        return np.asarray((states // powers[:, None]) % base < len(self.classes))

    def state_of(self, has_spot: Sequence[bool], run_lengths: Sequence[int]) -> int:
        """The state of the zones' runs so far."""
        states = [
            _state_of(there, length, self.classes)
            for there, length in zip(has_spot, run_lengths, strict=True)
        ]
        return _together(states, 2 * len(self.classes))


def num_states(num_zones: int) -> int:
    """States of a chain of so many zones, 1 to ``MOST_ZONES``."""
    return int((2 * len(_classes(num_zones))) ** num_zones)


def chain_of(traces: Sequence[Sequence[Sequence[int | None]]]) -> Chain:
    """Count the transitions of zones together.

    Args:
        traces: [traces][zones][ticks] 1 there, 0 gone, None unknown; the ticks of a trace's zones
            are of the same times. Nothing is counted across what is unknown.

    Raises:
        ProblemError: There are too many zones, or no two neighbouring ticks in which all are known.
    """
    num_zones = len(traces[0]) if traces else 0
    if not 1 <= num_zones <= MOST_ZONES:
        raise ProblemError(
            f"a chain of {num_zones} zones is not possible; it takes 1 to {MOST_ZONES}",
            hint="leave out the zones that are seldom there",
        )
    classes = _classes(num_zones)
    alone = [_alone([trace[zone] for trace in traces], classes) for zone in range(num_zones)]
    counts = alone[0] if num_zones == 1 else _counted_together(traces, alone, classes)
    return Chain(
        transitions=counts / counts.sum(axis=1, keepdims=True), classes=classes, num_zones=num_zones
    )


def _classes(num_zones: int) -> tuple[int, ...]:
    return next(each for each in _CLASSES if (2 * len(each)) ** num_zones <= _MOST_STATES)


def _alone(
    windows: Iterable[Sequence[int | None]], classes: tuple[int, ...]
) -> NDArray[np.float64]:
    """Transitions of one zone, counted [states, states]: those of "there", then of "gone"."""
    half = len(classes)
    counts = np.zeros((2 * half, 2 * half))
    for window in windows:
        for before, after in pairwise(_states_of(window, classes)):
            if before is not None and after is not None:
                counts[before, after] += 1
    if not counts.any():
        raise ProblemError("the history has no two neighbouring ticks that are known")
    for state in range(2 * half):
        counts[state, state] += _PRIOR_STAYS
        counts[state, half if state < half else 0] += _PRIOR_FLIPS
    return counts


def _counted_together(
    traces: Sequence[Sequence[Sequence[int | None]]],
    alone: Sequence[NDArray[np.float64]],
    classes: tuple[int, ...],
) -> NDArray[np.float64]:
    base = 2 * len(classes)
    counts = np.zeros((base ** len(alone), base ** len(alone)))
    for trace in traces:
        states = [list(_states_of(zone, classes)) for zone in trace]
        for before, after in pairwise(zip(*states, strict=True)):
            if None not in before and None not in after:
                counts[_together(before, base), _together(after, base)] += 1
    if not counts.any():
        raise ProblemError("the history has no two neighbouring ticks in which all zones are known")
    apart = np.ones((1, 1))
    for each in alone:
        apart = np.kron(apart, each / each.sum(axis=1, keepdims=True)).astype(np.float64)
    return np.asarray(counts + _APART_TICKS * apart)


def _state_of(has_spot: bool, run_length: int, classes: Sequence[int]) -> int:
    index = sum(run_length >= least for least in classes) - 1
    return index if has_spot else len(classes) + index


def _states_of(window: Sequence[int | None], classes: Sequence[int]) -> Iterator[int | None]:
    """The state in each tick of a window; None where it is unknown.

    The run before the window, or before what is unknown, counts for nothing.
    """
    last, length = None, 0
    for tick in window:
        length = length + 1 if tick == last else 1
        last = tick
        yield None if tick is None else _state_of(bool(tick), length, classes)


def _together(states: Sequence[int | None], base: int) -> int:
    """One number for the states of all zones, the first zone's foremost, as ``np.kron`` has it."""
    number = 0
    for state in states:
        number = number * base + (state or 0)
    return number
