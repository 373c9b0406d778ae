"""The tree along which gradients are summed, equal for every mapping of virtual nodes. Pure.

The virtual nodes 0, 1, 2, ... are the leaves of one binary tree, aligned at powers of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Subtree:
    """The existing leaves among [index << level, (index + 1) << level) of the tree."""

    level: int
    index: int

    @property
    def start(self) -> int:
        """The first leaf."""
        return self.index << self.level

    def risen(self, num_leaves: int) -> "Subtree":
        """The highest subtree with the same leaves; without a sibling, it is the parent."""
        tree = self
        while tree.start and tree.index % 2 == 0 and (tree.index + 1) << tree.level >= num_leaves:
            tree = Subtree(tree.level + 1, tree.index // 2)
        return tree

    def completes(self, other: "Subtree") -> bool:
        """Whether ``other`` is the left sibling of this one."""
        return self.level == other.level and self.index % 2 == 1 and other.index == self.index - 1

    def parent(self, num_leaves: int) -> "Subtree":
        """The subtree of this right child and its left sibling together."""
        return Subtree(self.level + 1, self.index // 2).risen(num_leaves)


@dataclass(frozen=True, slots=True)
class Turn:
    """The buffer operations of one virtual node's pass.

    Attributes:
        node: Index of the virtual node.
        spills: Whether to move the running sum to a spare buffer before the pass.
        num_merges: How many of the last spare buffers to add to the running sum after the pass.
    """

    node: int
    spills: bool
    num_merges: int


def turns_of(nodes: Sequence[int], num_leaves: int) -> tuple[list[Turn], list[Subtree]]:
    """Plan how a worker that runs ``nodes`` in this order sums them.

    Returns:
        The buffer operations of each pass, and the subtrees at the end: the last one is in the
        gradient buffer, the others in spare buffers 0, 1, ...
    """
    held: list[Subtree] = []
    turns = []
    for node in nodes:
        tree = Subtree(0, node)
        pairs = bool(held) and tree.completes(held[-1])
        spills = bool(held) and not pairs
        # Backward adds into the buffer, so a leaf next to its sibling gives a finished pair.
        tree = tree.parent(num_leaves) if pairs else tree.risen(num_leaves)
        held = held[:-1] if pairs else held
        num_merges = 0
        while held and tree.completes(held[-1]):
            held.pop()
            tree = tree.parent(num_leaves)
            num_merges += 1
        held.append(tree)
        turns.append(Turn(node, spills, num_merges))
    return turns, held


def root_of(parts: Sequence[tuple[Subtree, Tensor]], num_leaves: int, out: Tensor) -> None:
    """Finish the tree in place.

    Args:
        parts: Subtrees that cover all leaves once, with their sums; the sums are overwritten.
        num_leaves: Leaves of the whole tree.
        out: One of the parts' tensors; receives the sum.
    """
    stack: list[tuple[Subtree, Tensor]] = []
    for tree, value in sorted(parts, key=lambda part: part[0].start):
        while stack and tree.completes(stack[-1][0]):
            left = stack.pop()[1]
            into = value if value is out else left
            torch.add(left, value, out=into)
            tree, value = tree.parent(num_leaves), into
        stack.append((tree, value))
