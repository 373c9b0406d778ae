"""How spot machines come and go in several zones at once, as a Markov chain learned from history.

A state is a state of each zone's own chain (``market.chain``), so there are as many as the product
of theirs: the more zones, the fewer classes of run lengths each has. Transitions are counted in
ticks in which all zones are known. Beside the counts stands what the zones' own chains would give
if zones had nothing to do with each other; it decides where the counts are few.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ....schema.errors import ProblemError
from ..chain import RUN_CLASSES, chain_of, state_of, states_of

MOST_ZONES = 6
_MOST_STATES = 64
_CLASSES = (RUN_CLASSES, (1, 3, 7, 25), (1, 7), (1,))
_APART_TICKS = 12.0  # weight of zones that have nothing to do with each other, in ticks of history


@dataclass(frozen=True, slots=True)
class ZonesChain:
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
            state_of(there, length, self.classes)
            for there, length in zip(has_spot, run_lengths, strict=True)
        ]
        return _together(states, 2 * len(self.classes))


def num_states(num_zones: int) -> int:
    """States of a chain of so many zones, 1 to ``MOST_ZONES``."""
    return int((2 * len(_classes(num_zones))) ** num_zones)


def _classes(num_zones: int) -> tuple[int, ...]:
    return next(each for each in _CLASSES if (2 * len(each)) ** num_zones <= _MOST_STATES)


def chain_of_zones(traces: Sequence[Sequence[Sequence[int | None]]]) -> ZonesChain:
    """Count the transitions of zones together.

    Args:
        traces: [traces][zones][ticks] 1 there, 0 gone, None unknown; the ticks of a trace's zones
            are of the same times.

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
    base = 2 * len(classes)
    alone = [
        chain_of([trace[zone] for trace in traces], classes).transitions
        for zone in range(num_zones)
    ]
    counts = np.zeros((base**num_zones, base**num_zones))
    for trace in traces:
        states = [list(states_of(zone, classes)) for zone in trace]
        for before, after in pairwise(zip(*states, strict=True)):
            if None not in before and None not in after:
                counts[_together(before, base), _together(after, base)] += 1
    if not counts.any():
        raise ProblemError("the history has no two neighbouring ticks in which all zones are known")
    apart = alone[0]
    for transitions in alone[1:]:
        apart = np.kron(apart, transitions).astype(np.float64)
    counts += _APART_TICKS * apart
    return ZonesChain(
        transitions=counts / counts.sum(axis=1, keepdims=True),
        classes=tuple(classes),
        num_zones=num_zones,
    )


def _together(states: Sequence[int | None], base: int) -> int:
    """One number for the states of all zones, the first zone's foremost, as ``np.kron`` has it."""
    number = 0
    for state in states:
        number = number * base + (state or 0)
    return number
