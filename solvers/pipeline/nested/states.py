"""The ranges that nested levels work on: cuts but the empty one, and sums between two of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....schema.pipeline import PipelineProblem
from ..cuts import Cuts, Floats, Mask
from .released_antichains import antichain_states


@dataclass(frozen=True, slots=True)
class Block:
    """States ``first`` (inclusive) to ``last`` on ``num_replicas`` components of a level."""

    first: int
    last: int
    num_replicas: int


Nested = tuple[Block, "tuple[Nested, ...]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """What a range of states sums up to, looked up one at a time.

    Args:
        layer_sets: [states] as bits.
        compute, weights, activations: [states] sums of all that lies in a state.
        crossing: [states].
    """

    layer_sets: tuple[int, ...]
    compute: Floats
    weights: Floats
    activations: Floats
    crossing: Floats

    def between(self, block: Block) -> int:
        """The layers of a block, as bits."""
        return self.layer_sets[block.last] & ~(self.layer_sets[block.first - 1] * (block.first > 0))

    def total(self, values: Floats, block: Block) -> float:
        """The part of a block in one of the sums."""
        return float(values[block.last]) - (float(values[block.first - 1]) if block.first else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """State s is a cut; the range (i, j) holds what lies in j and not in state i - 1.

    Args:
        ranges: The sums that the arrays are the differences of.
        compute, weights, stash: [states, states] sums of ranges; stash is weights + activations.
        crossing: [states].
        valid: [states, states] whether a block may be that range.
        allowed: [states, states] whether a pipeline that starts at i may be split behind k.
        splits: for each state, the states it may be split at.
    """

    ranges: Ranges
    compute: Floats
    weights: Floats
    stash: Floats
    crossing: Floats
    valid: Mask
    allowed: Mask
    splits: tuple[NDArray[np.int64], ...]

    @property
    def size(self) -> int:
        """Number of states."""
        return len(self.ranges.layer_sets)


def ranges_of(cuts: Cuts) -> Ranges:
    """States are all cuts but the empty one."""
    return Ranges(
        layer_sets=cuts.layer_sets[1:],
        compute=(cuts.forward_seconds + cuts.backward_seconds)[0, 1:],
        weights=cuts.weight_bytes[1:],
        activations=cuts.activation_bytes[1:],
        crossing=cuts.crossing_bytes[1:],
    )


def inclusion_states(cuts: Cuts) -> States:
    """States from cuts; a range is what lies between two of which one is in the other."""
    size = cuts.size - 1
    before = np.triu(np.ones((size, size), bool), 1)
    if cuts.before is not None:
        before = cuts.before[1:, 1:]
    starts = np.vstack([np.ones((1, size), bool), before[:-1]])
    return _states(ranges_of(cuts), before, starts, starts)


def published_states(problem: PipelineProblem) -> States:
    """The released optimizer's states, in its order and with its reading of a split.

    A split k of a range (i, j) is any ancestor of j that is no ancestor of i - 1; it need not
    lie behind i - 1, and the range (i, k) is then the difference of two sums all the same.
    """
    found = antichain_states(problem)
    size = len(found.layer_sets)
    allowed = np.ones((size, size), bool)
    allowed[1:] = ~found.before[:, : size - 1].T
    pool = problem.pools[0]
    inside = np.array(
        [[bits >> layer & 1 for layer in range(len(problem.layers))] for bits in found.layer_sets],
        np.float64,
    )
    ranges = Ranges(
        layer_sets=found.layer_sets,
        compute=inside @ (np.array(pool.forward_seconds) + np.array(pool.backward_seconds)),
        weights=inside @ np.array([float(layer.weight_bytes) for layer in problem.layers]),
        activations=inside @ np.array([float(layer.kept_bytes) for layer in problem.layers]),
        crossing=found.crossing_bytes,
    )
    return _states(ranges, found.before, np.triu(np.ones((size, size), bool)), allowed)


def _states(ranges: Ranges, before: Mask, valid: Mask, allowed: Mask) -> States:
    return States(
        ranges=ranges,
        compute=_differences(ranges.compute),
        weights=_differences(ranges.weights),
        stash=_differences(ranges.weights + ranges.activations),
        crossing=ranges.crossing,
        valid=valid,
        allowed=allowed,
        splits=tuple(np.flatnonzero(before[:, last]) for last in range(len(ranges.layer_sets))),
    )


def _differences(values: Floats) -> Floats:
    """[i, j]: the sum in state j less that in state i - 1."""
    starts = np.concatenate([[0.0], values[:-1]])
    found: Floats = values[None, :] - starts[:, None]
    return found
