"""Sum shared gradients in the tree of virtual nodes, so that their bits follow no mapping.

The tree is that of ``runtime/invariant.py``: a split that shares no states has the same bits. Each
worker sends an owner its virtual nodes' parts one by one; the owner adds siblings as they come::

    nodes 0, 1 | 2, 3 on two workers    round 1: 0 and 2 come    round 2: 1 and 3 come
                                        nothing adds up          (0 + 1) + (2 + 3)

An owner keeps what has no sibling yet: with v passes of each worker at most 1 + log2(v) parts of
each. An ordinary reduction sends as much, and keeps one part of all workers together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..invariant import Subtree, turns_of


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """Which virtual nodes each worker runs, in which turn.

    Attributes:
        holdings: [workers][turns] the virtual nodes.
    """

    holdings: Sequence[Sequence[int]]

    @property
    def num_leaves(self) -> int:
        """Virtual nodes of the job."""
        return sum(map(len, self.holdings))

    def of_turn(self, turn: int) -> list[Subtree]:
        """[workers] the virtual node that each runs in a turn; all run equally many."""
        return [Subtree(0, nodes[turn]).risen(self.num_leaves) for nodes in self.holdings]

    def at_end(self) -> list[list[Subtree | None]]:
        """[trees][workers] the sums of each worker after all turns; None where it has fewer."""
        held = [turns_of(nodes, self.num_leaves)[1] for nodes in self.holdings]
        return [
            [own[number] if number < len(own) else None for own in held]
            for number in range(max(map(len, held)))
        ]


class LeafSums:
    """Sums of virtual nodes, which come in any order."""

    def __init__(self, num_leaves: int) -> None:
        self._num_leaves = num_leaves
        self._held: dict[Subtree, Tensor] = {}

    def add(self, tree: Subtree, value: Tensor) -> None:
        """Add a sum, which is overwritten, to that of its sibling, where that has come."""
        while (sibling := Subtree(tree.level, tree.index ^ 1)) in self._held:
            other = self._held.pop(sibling)
            # Left and right by their place in the tree, whichever came first.
            value = torch.add(*((other, value) if tree.index % 2 else (value, other)), out=value)
            tree = tree.parent(self._num_leaves)
        self._held[tree] = value

    def add_leaf(self, node: int, value: Tensor) -> None:
        """Add a virtual node's."""
        self.add(Subtree(0, node).risen(self._num_leaves), value)

    def settle(self) -> None:
        """Copy what waits for a sibling, so that memory that it shares with others can go."""
        for tree, value in self._held.items():
            if value.untyped_storage().nbytes() > value.nbytes:
                self._held[tree] = value.clone()

    def take(self, tree: Subtree) -> Tensor:
        """Take a sum out."""
        return self._held.pop(tree)

    def root(self) -> Tensor | None:
        """The sum of all; what has not come is 0. None where nothing has."""
        while len(self._held) > 1:  # the lowest has no sibling
            low = min(self._held, key=lambda tree: tree.level)
            self.add(low.parent(self._num_leaves), self._held.pop(low))
        return next(iter(self._held.values()), None)
