"""Sum gradients so that the bits do not depend on who holds which virtual node (EasyScale 3.3).

The virtual nodes 0, 1, 2, ... are the leaves of one binary tree, aligned at powers of two, and
every sum is taken along its branches: ((g0 + g1) + (g2 + g3)) + ..., whoever computes it. A
worker adds up the subtrees it holds whole while it runs (sibling leaves meet in the gradient
buffer itself, so a pair costs nothing); then the owner of each slice gets the workers' subtrees,
finishes the tree, and all gather the slices. Where each worker holds one subtree that is the
traffic of an ordinary all-reduce.

A device keeps at most log2 of its virtual nodes buffers instead of one each. Exact order-free
accumulation would keep one, but twice as wide, sends twice the bytes, and cannot serve float64
(benchmarks/reduction.py compares them).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Newer torch has another name for it, and warns of this one.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, slots=True)
class Subtree:
    """Leaves [index << level, (index + 1) << level) of the tree, as far as they exist."""

    level: int
    index: int

    @property
    def start(self) -> int:
        """The first leaf."""
        return self.index << self.level

    def risen(self, num_leaves: int) -> "Subtree":
        """The highest subtree with the same leaves: one without a sibling is its parent."""
        tree = self
        while tree.start and tree.index % 2 == 0 and (tree.index + 1) << tree.level >= num_leaves:
            tree = Subtree(tree.level + 1, tree.index // 2)
        return tree

    def completes(self, other: "Subtree") -> bool:
        """Whether ``other`` is the left sibling of this one."""
        return self.level == other.level and self.index % 2 == 1 and other.index == self.index - 1

    def parent(self, num_leaves: int) -> "Subtree":
        """What this right child and its left sibling are together."""
        return Subtree(self.level + 1, self.index // 2).risen(num_leaves)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one virtual node's pass does to the buffers.

    Before it, ``spills`` moves the running sum to a spare buffer; after it, the ``num_merges``
    last spares are added to the running sum.
    """

    node: int
    spills: bool
    num_merges: int


def turns_of(nodes: Sequence[int], num_leaves: int) -> tuple[list[Turn], list[Subtree]]:
    """How a worker that runs ``nodes`` in this order sums them, and which subtrees it ends with.

    Pure. The last subtree is in the gradient buffer, the others are in spares 0, 1, ...
    """
    held: list[Subtree] = []
    turns = []
    for node in nodes:
        tree = Subtree(0, node)
        pairs = bool(held) and tree.completes(held[-1])
        spills = bool(held) and not pairs
        # Backward adds into the buffer, so a leaf beside its sibling is a finished pair.
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


@dataclass(slots=True)
class _Exchange:
    """One bucket on its way: the workers' subtrees of this worker's slice."""

    bucket: Tensor
    sent: Tensor
    received: Tensor
    work: "dist.Work | None"


class InvariantSum:
    """The same sum of virtual nodes' gradients on every mapping.

    A step is ``begin()``, then ``enter(node)`` and ``leave()`` around each pass, ``launch`` for
    each bucket in order, and ``wait``. Virtual nodes without samples may be left out: their
    gradient is zero.

    Args:
        holdings: The virtual nodes of each worker in running order, by rank.
        rank: This worker.
        group: The process group; None is the default one.
    """

    def __init__(
        self,
        holdings: Sequence[Sequence[int]],
        rank: int,
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self._num_leaves = sum(len(nodes) for nodes in holdings)
        plans = [turns_of(nodes, self._num_leaves) for nodes in holdings]
        self._turns = plans[rank][0]
        self._trees = [trees for _, trees in plans]
        self._rank, self._group = rank, group
        self._num_workers = len(holdings)
        self._num_spares = _num_spares(self._turns)
        self._flats: list[Tensor] = []
        self._spares: list[list[Tensor]] = []
        self._at, self._entered, self._depth = 0, False, 0
        self._exchanges: list[_Exchange] = []

    @property
    def alignment(self) -> int:
        """What the length of every bucket must be a multiple of."""
        return self._num_workers

    @property
    def holds_first(self) -> bool:
        """Whether virtual node 0 runs here."""
        return any(turn.node == 0 for turn in self._turns)

    @property
    def num_spares(self) -> int:
        """Buffers kept beside the gradient buffer: at most log2 of the virtual nodes here."""
        return self._num_spares

    def allocate(self, flats: Sequence[Tensor]) -> None:
        """Take the gradient buffers of all later steps."""
        self._flats = list(flats)
        self._spares = [[torch.zeros_like(flat) for flat in flats] for _ in range(self._num_spares)]

    def begin(self) -> None:
        """Start a step."""
        self._at, self._entered, self._depth = 0, False, 0

    @property
    def in_last_turn(self) -> bool:
        """Whether the pass that runs is the last that this worker can have."""
        return self._at == len(self._turns) - 1 and self._entered

    def enter(self, node: int) -> None:
        """Make the gradient buffer ready for a virtual node's pass."""
        while self._turns[self._at].node != node:
            self._skip()
        self._enter()

    def leave(self) -> None:
        """Add up what the pass completed. The last pass is added up bucket by bucket."""
        if self._at == len(self._turns) - 1:
            return
        for _ in range(self._turns[self._at].num_merges):
            self._depth -= 1
            for flat, spare in zip(self._flats, self._spares[self._depth], strict=True):
                flat.add_(spare)
        self._at, self._entered = self._at + 1, False

    def settle(self) -> None:
        """Pass over the virtual nodes that had no samples, up to the last one's pass."""
        while not self.in_last_turn:
            self._skip()

    def _skip(self) -> None:
        if not self._entered:
            self._enter()
        self.leave()

    def _enter(self) -> None:
        self._entered = True
        if self._turns[self._at].spills:
            for flat, spare in zip(self._flats, self._spares[self._depth], strict=True):
                spare.copy_(flat)
                flat.zero_()
            self._depth += 1

    def launch(self, flat_index: int, start: int, end: int) -> None:
        """Finish a bucket's local sums and send them to the owners of its slices."""
        with torch.no_grad():
            bucket = self._flats[flat_index][start:end]
            kept = self._depth - self._turns[-1].num_merges
            for depth in reversed(range(kept, self._depth)):
                bucket.add_(self._spares[depth][flat_index][start:end])
            if self._num_workers > 1:
                spares = [self._spares[depth][flat_index][start:end] for depth in range(kept)]
                self._exchanges.append(self._send([*spares, bucket]))

    def _send(self, trees: list[Tensor]) -> _Exchange:
        real = [torch.view_as_real(t).reshape(-1) if t.is_complex() else t for t in trees]
        slice_length = real[0].numel() // self._num_workers
        rows = [tree.view(self._num_workers, slice_length) for tree in real]
        sent = real[0] if len(rows) == 1 else torch.stack(rows, dim=1).reshape(-1)
        if sent.is_cuda and dist.get_backend(self._group) == "gloo":
            sent = sent.cpu()  # gloo exchanges slices of host memory only
        lengths = [len(held) * slice_length for held in self._trees]
        received = sent.new_empty(sum(lengths))
        work = dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=lengths,
            input_split_sizes=[len(rows) * slice_length] * self._num_workers,
            group=self._group,
            async_op=True,
        )
        return _Exchange(real[-1], sent, received, work)

    def wait(self) -> None:
        """Finish the tree for this worker's slices, and gather the others'."""
        gathers = []
        for exchange in self._exchanges:
            if exchange.work is not None:
                exchange.work.wait()
            own = self._root_of(exchange.received)
            whole = exchange.bucket
            if own.device != whole.device:
                whole = torch.empty_like(whole, device=own.device)
            work = all_gather(whole, own, group=self._group, async_op=True)
            gathers.append((exchange.bucket, whole, own, work))
        for bucket, whole, _, work in gathers:
            if work is not None:
                work.wait()
            if whole is not bucket:
                bucket.copy_(whole)
        self._exchanges.clear()

    def _root_of(self, received: Tensor) -> Tensor:
        names = [tree for held in self._trees for tree in held]
        parts = received.view(len(names), -1)
        stack: list[tuple[Subtree, Tensor]] = []
        for number in sorted(range(len(names)), key=lambda number: names[number].start):
            tree, value = names[number], parts[number]
            while stack and tree.completes(stack[-1][0]):
                value = stack.pop()[1].add_(value)
                tree = tree.parent(self._num_leaves)
            stack.append((tree, value))
        return stack[0][1]


def _num_spares(turns: Sequence[Turn]) -> int:
    depth = most = 0
    for turn in turns:
        depth += int(turn.spills)
        most = max(most, depth)
        depth -= turn.num_merges
    return most
