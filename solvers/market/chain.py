"""How spot machines come and go in some zones, as a Markov chain learned from history.

For a job of one machine, a zone's state says whether spot machines can be had ("there") or not
("gone"). It also has the class of the number of ticks since that last changed. Run lengths of real
traces have heavy tails: the longer a state has lasted, the longer it is likely to last. Transitions
are counted in windows of history; a weak prior covers states that the history never shows.

For a job of several, a zone's state is how many there are. A count that the history shows seldom or
never changes as counts do on average: of the changes seen anywhere, those that stay between none
and all.

A state of several zones is one of each, so there are as many as the product of theirs: the more
zones, the fewer classes each has. Their transitions are counted in ticks in which all zones are
known. Beside the counts stands what the zones' own chains would give if zones had nothing to do
with each other; it decides where the counts are few.

    one zone, were there a single class; the history is there, there, gone, there
    from "there" once each to "there" and "gone", with the prior 1.9 and 1.1: 0.63 and 0.37
    from "gone" once to "there", with the prior 0.9 and 1.1: 0.45 stays, 0.55 comes back
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from .job import Counts

_MOST_ZONES = 6
_MOST_STATES, _MOST_COUNTS = 64, 144
_CLASSES = ((1, 2, 4, 7, 13, 25, 49), (1, 3, 7, 25), (1, 7), (1,))
"""The least run length, in ticks, of each class; for one zone, two, and more."""
_PRIOR_STAYS, _PRIOR_FLIPS = 0.9, 0.1
_APART_TICKS = 12.0  # weight of zones that have nothing to do with each other, in ticks of history
_POOLED_TICKS = 12.0  # weight of the average change, in ticks of history at one count
_ANY_CHANGE = 0.01  # chance of a change that the history does not show

Ticks = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Chain:
    """Transitions [states, states] of zones together, for a job of so many machines.

    ``classes`` are those of each zone's runs; there are none where a state is a count.
    """

    transitions: NDArray[np.float64]
    num_zones: int
    num_machines: int

    @property
    def classes(self) -> tuple[int, ...]:
        """The least run length of each class."""
        return _classes(self.num_zones, self.num_machines)

    @property
    def available(self) -> NDArray[np.int64]:
        """[zones, states] spot machines that a zone has, as far as the job has use for them."""
        base = _base(self.num_zones, self.num_machines)
        # The first zone's digit is the foremost, as in ``_together``.
        powers = base ** np.arange(self.num_zones - 1, -1, -1)
        each = np.arange(len(self.transitions)) // powers[:, None] % base
        return np.asarray(each < len(self.classes), np.int64) if self.classes else each

    def state_of(self, available: Counts, run_lengths: Sequence[int]) -> int:
        """The state of the zones' runs so far."""
        states = [
            _state_of(there, length, self.num_machines, self.classes)
            for there, length in zip(available, run_lengths, strict=True)
        ]
        return _together(states, _base(self.num_zones, self.num_machines))


def most_zones(num_machines: int) -> int:
    """How many zones a chain takes for a job of so many machines."""
    if num_machines == 1:
        return _MOST_ZONES
    return next(zones for zones in range(5, 0, -1)
                if zones == 1 or (num_machines + 1) ** zones <= _MOST_COUNTS)  # fmt: skip


def num_states(num_zones: int, num_machines: int = 1) -> int:
    """States of a chain of so many zones, 1 to ``most_zones``."""
    return int(_base(num_zones, num_machines) ** num_zones)


def chain_of(traces: Sequence[Sequence[Ticks]], num_machines: int = 1) -> Chain:
    """Count the transitions of zones together.

    Args:
        traces: [traces][zones][ticks] spot machines, None unknown; the ticks of a trace's zones
            are of the same times. Nothing is counted across what is unknown.
        num_machines: What the job can use; more count as so many.

    Raises:
        ProblemError: There are too many zones, or no two neighbouring ticks in which all are known.
    """
    num_zones, most = len(traces[0]) if traces else 0, most_zones(num_machines)
    if not 1 <= num_zones <= most:
        raise ProblemError(
            f"a chain of {num_zones} zones is not possible; it takes 1 to {most}",
            hint="leave out the zones that are seldom there",
        )
    classes = _classes(num_zones, num_machines)
    states = [[list(_states_of(zone, num_machines, classes)) for zone in trace] for trace in traces]
    base = _base(num_zones, num_machines)
    # Each zone by itself, then together: counts of pairs are few, so the zones' own chains fill
    # in.
    alone = [_alone([trace[zone] for trace in states], base) for zone in range(num_zones)]
    alone = [_with_runs(each) if classes else _with_counts(each) for each in alone]
    counts = alone[0] if num_zones == 1 else _counted_together(states, alone, base)
    return Chain(counts / counts.sum(axis=1, keepdims=True), num_zones, num_machines)


def _classes(num_zones: int, num_machines: int) -> tuple[int, ...]:
    if num_machines > 1:
        return ()
    # The most classes with which all zones together have a state that can be counted.
    return next(each for each in _CLASSES if (2 * len(each)) ** num_zones <= _MOST_STATES)


def _base(num_zones: int, num_machines: int) -> int:
    """States of one zone."""
    return 2 * len(_classes(num_zones, num_machines)) or num_machines + 1


def _alone(traces: Sequence[Ticks], base: int) -> NDArray[np.float64]:
    """Transitions of one zone's states, counted [states, states]."""
    counts = np.zeros((base, base))
    for states in traces:
        for before, after in pairwise(states):
            if before is not None and after is not None:
                counts[before, after] += 1
    if not counts.any():
        raise ProblemError("the history has no two neighbouring ticks that are known")
    return counts


def _with_runs(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """With the prior of "there" and then "gone"; what the history never shows hardly changes."""
    half = len(counts) // 2
    for state in range(2 * half):
        counts[state, state] += _PRIOR_STAYS
        # A flip leads to the youngest class of the other side.
        counts[state, half if state < half else 0] += _PRIOR_FLIPS
    return counts


def _with_counts(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """With the average change of a count."""
    most = len(counts) - 1
    # The average change of a count, of those that stay between none and all; changes never seen
    # keep a small chance.
    places = np.arange(most + 1)
    change = places[None, :] - places[:, None]
    seen = np.array([counts[change == step].sum() for step in range(-most, most + 1)])
    pooled = (seen / seen.sum())[change + most] + _ANY_CHANGE / (most + 1)
    pooled /= pooled.sum(axis=1, keepdims=True)
    return np.asarray(counts + _POOLED_TICKS * pooled)


def _counted_together(
    traces: Sequence[Sequence[Ticks]], alone: Sequence[NDArray[np.float64]], base: int
) -> NDArray[np.float64]:
    counts = np.zeros((base ** len(alone), base ** len(alone)))
    for states in traces:
        for before, after in pairwise(zip(*states, strict=True)):
            # A pair of ticks with anything unknown counts for nothing.
            if None not in before and None not in after:
                counts[_together(before, base), _together(after, base)] += 1
    if not counts.any():
        raise ProblemError("the history has no two neighbouring ticks in which all zones are known")
    apart = np.ones((1, 1))
    for each in alone:
        # The chain of zones that have nothing to do with each other, weighed like a few ticks of
        # history.
        apart = np.kron(apart, each / each.sum(axis=1, keepdims=True)).astype(np.float64)
    return np.asarray(counts + _APART_TICKS * apart)


def _state_of(there: int, run_length: int, num_machines: int, classes: Sequence[int]) -> int:
    if not classes:
        return min(there, num_machines)
    # The last class whose least length has been reached.
    index = sum(run_length >= least for least in classes) - 1
    return index if there else len(classes) + index


def _states_of(window: Ticks, num_machines: int, classes: Sequence[int]) -> Iterator[int | None]:
    """The state in each tick of a window; None where it is unknown."""
    # The run before the window, or before what is unknown, counts for nothing.
    last, length = None, 0
    for tick in window:
        length = length + 1 if tick == last else 1
        last = tick
        yield None if tick is None else _state_of(tick, length, num_machines, classes)


def _together(states: Sequence[int | None], base: int) -> int:
    """One number for the states of all zones, the first zone's foremost, as ``np.kron`` has it."""
    number = 0
    for state in states:
        number = number * base + (state or 0)
    return number
