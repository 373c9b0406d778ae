"""The released optimizer's antichains, step by step as it makes them.

Kept for its costs alone, which depend on its order of states and on its reading of what crosses
a cut: the antichain's members and every ancestor of one that feeds a layer which is not itself
an ancestor of that same member. Where two members share a parent the parent is counted although
nothing of it crosses.
"""

from dataclasses import dataclass

import numpy as np

from ....schema.pipeline import PipelineProblem
from ..cuts import Floats, Mask, layers_of

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
