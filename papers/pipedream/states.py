"""The ranges that nested levels work on: cuts but the empty one, and sums between two of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schema.pipeline import PipelineProblem
from ...solvers.pipeline.cuts import Cuts, Floats, Mask, layers_of

# The released optimizer's antichains, step by step as it makes them.
#
# Kept for its costs alone, which depend on its order of states and on its reading of what crosses
# a cut: the antichain's members and every ancestor of one that feeds a layer which is not itself
# an ancestor of that same member. Where two members share a parent the parent is counted although
# nothing of it crosses.

Antichain = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AntichainStates:
    """States in the released order: [states] layers as bits, crossing bytes, and ancestry."""

    layer_sets: tuple[int, ...]
    crossing_bytes: Floats
    before: Mask


class _Graph:
    def __init__(self, problem: PipelineProblem) -> None:
        size = len(problem.layers)
        self.children: list[list[int]] = [[] for _ in range(size)]
        self.ancestors = [0] * size
        self.descendants = [0] * size
        parents: list[list[int]] = [[] for _ in range(size)]
        for source, target in problem.links:
            self.children[source].append(target)
            parents[target].append(source)
        for layer in range(size):
            for parent in parents[layer]:
                self.ancestors[layer] |= self.ancestors[parent] | 1 << parent
        for layer in reversed(range(size)):
            for child in self.children[layer]:
                self.descendants[layer] |= self.descendants[child] | 1 << child

    def augmented(self, antichain: Antichain) -> list[int]:
        """The members, and the ancestors that the released code sees crossing."""
        extra: dict[int, None] = {}
        for member in antichain:
            for ancestor in layers_of(self.ancestors[member]):
                for child in self.children[ancestor]:
                    if not self.ancestors[member] >> child & 1 and child != member:
                        extra[ancestor] = None
        return [*(layer for layer in extra if layer not in antichain), *antichain]

    def following(self, antichain: Antichain) -> list[Antichain]:
        members = self.augmented(antichain)
        inside = sum(1 << layer for layer in members)
        found = []
        for member in members:
            for child in self.children[member]:
                if child not in antichain and not self.descendants[child] & inside:
                    found.append(self._replaced(inside ^ 1 << member | 1 << child))
        return found

    def _replaced(self, inside: int) -> Antichain:
        covered = 0
        for layer in layers_of(inside):
            covered |= self.ancestors[layer]
        return tuple(layers_of(inside & ~covered))

    def behind(self, antichain: Antichain) -> int:
        closed = 0
        for layer in self.augmented(antichain):
            closed |= self.ancestors[layer] | 1 << layer
        return closed


def antichain_states(problem: PipelineProblem) -> AntichainStates:
    """Every antichain that replacing one member by a child reaches from the first layer."""
    graph = _Graph(problem)
    start: Antichain = (0,)
    following: dict[Antichain, list[Antichain]] = {}
    known, queue = [start], [start]
    for antichain in queue:
        if antichain in following:
            continue
        following[antichain] = list(dict.fromkeys(graph.following(antichain)))
        known += [entry for entry in following[antichain] if entry not in known]
        queue += following[antichain]
    order = _sorted(known, following)
    sets = tuple(graph.behind(antichain) for antichain in order)
    sent = [
        float(sum(problem.layers[layer].activation_bytes for layer in graph.augmented(antichain)))
        for antichain in order
    ]
    return AntichainStates(
        layer_sets=sets, crossing_bytes=np.array(sent), before=_ancestry(order, following)
    )


def _sorted(known: list[Antichain], following: dict[Antichain, list[Antichain]]) -> list[Antichain]:
    """Topological, by the finishing times of a depth-first search; written without recursion."""
    done: set[Antichain] = set()
    finished: list[Antichain] = []
    for root in known:
        stack = [(root, iter(following[root]))] if root not in done else []
        done.add(root)
        while stack:
            antichain, rest = stack[-1]
            child = next((entry for entry in rest if entry not in done), None)
            if child is None:
                finished.append(antichain)
                stack.pop()
            else:
                done.add(child)
                stack.append((child, iter(following[child])))
    return finished[::-1]


def _ancestry(order: list[Antichain], following: dict[Antichain, list[Antichain]]) -> Mask:
    rank = {antichain: index for index, antichain in enumerate(order)}
    before = np.zeros((len(order), len(order)), bool)
    for antichain in order:
        source = rank[antichain]
        for child in following[antichain]:
            before[:, rank[child]] |= before[:, source]
            before[source, rank[child]] = True
    return before


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
