"""Sum gradients so that the bits do not depend on the mapping of virtual nodes (EasyScale 3.3).

The virtual nodes 0, 1, 2, ... are the leaves of one binary tree (subtrees.py). Every sum follows
its branches, ((g0 + g1) + (g2 + g3)) + ..., whichever worker computes it. A worker sums the
subtrees that it holds whole during its passes; sibling leaves add up in the gradient buffer itself,
so a pair of them costs nothing. Then each slice's owner receives the workers' subtrees, finishes
the tree, and sends the sum to all (``Exchange``). Where each worker holds one subtree, the traffic
is that of an ordinary all-reduce; for two such workers it is one.

A device keeps at most log2(number of its virtual nodes) buffers, not one for each. Exact
accumulation that needs no order would keep one buffer, but twice as wide; it sends twice the bytes
and cannot serve float64 (benchmarks/reduction.py compares them).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices.backend import backend_of
from ..devices.collectives import is_on_devices
from .exchange import Collectives, Exchange, Messages, TwoTrees
from .subtrees import Turn, turns_of

# Buckets whose received slices are in memory at once; the third waits until the first is summed.
MAX_IN_FLIGHT = 2
_ROUNDED_ONCE = (torch.float32, torch.float64)  # a + b has the same bits in every all-reduce


class InvariantSum:
    """Sum virtual nodes' gradients with the same bits on every mapping.

    A step is ``begin()``, then ``enter(node)`` and ``leave()`` around each pass, ``launch`` for
    each bucket in order, and ``wait``. Virtual nodes without samples may be left out: their
    gradient is zero.

    Args:
        holdings: [workers] the virtual nodes of each worker in running order, by rank.
        rank: This worker's rank.
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
        self._exchanges: list[Exchange] = []
        self._num_summed = 0
        self._rooms: dict[tuple[int, torch.dtype], Tensor] = {}
        self._has_two_trees = self._num_workers == sum(len(held) for held in self._trees) == 2

    @property
    def alignment(self) -> int:
        """The length of every bucket must be a multiple of this."""
        return self._num_workers

    @property
    def holds_first(self) -> bool:
        """Whether this worker runs virtual node 0."""
        return any(turn.node == 0 for turn in self._turns)

    @property
    def num_turns(self) -> int:
        """The number of passes that this worker can have in a step."""
        return len(self._turns)

    @property
    def num_spares(self) -> int:
        """Buffers beside the gradient buffer: at most log2 of this worker's virtual nodes."""
        return self._num_spares

    @property
    def num_received_bytes(self) -> int:
        """Bytes of receive buffers for subtrees: at most those of ``MAX_IN_FLIGHT`` buckets."""
        return sum(room.numel() * room.element_size() for room in self._rooms.values())

    def allocate(self, flats: Sequence[Tensor]) -> None:
        """Take the gradient buffers that all later steps use."""
        self._flats = list(flats)
        self._rooms.clear()
        self._spares = [[torch.zeros_like(flat) for flat in flats] for _ in range(self._num_spares)]

    def begin(self) -> None:
        """Start a step."""
        self._at, self._entered, self._depth = 0, False, 0
        self._exchanges.clear()
        self._num_summed = 0

    @property
    def in_last_turn(self) -> bool:
        """Whether the running pass is the last one that this worker can have in this step."""
        return self._at == len(self._turns) - 1 and self._entered

    def enter(self, node: int) -> None:
        """Prepare the gradient buffer for a virtual node's pass."""
        while self._turns[self._at].node != node:
            self._skip()
        self._enter()

    def leave(self) -> None:
        """Add up the subtrees that the pass completed; ``launch`` does so for the last pass."""
        if self._at == len(self._turns) - 1:
            return
        for _ in range(self._turns[self._at].num_merges):
            self._depth -= 1
            for flat, spare in zip(self._flats, self._spares[self._depth], strict=True):
                flat.add_(spare)
        self._at, self._entered = self._at + 1, False

    def settle(self) -> None:
        """Skip the virtual nodes that had no samples, up to that of the last pass."""
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

    def held(self, flat_index: int, start: int, end: int) -> list[Tensor]:
        """The parts of a bucket's sums that wait beside the gradient buffer."""
        return [spare[flat_index][start:end] for spare in self._spares[: self._depth]]

    def launch(self, flat_index: int, start: int, end: int) -> None:
        """Finish a bucket's local sums and send each slice to its owner."""
        with torch.no_grad():
            bucket = self._flats[flat_index][start:end]
            kept = self._depth - self._turns[-1].num_merges
            for depth in reversed(range(kept, self._depth)):
                bucket.add_(self._spares[depth][flat_index][start:end])
            if self._num_workers > 1:
                spares = [self._spares[depth][flat_index][start:end] for depth in range(kept)]
                trees = [*spares, bucket]
                if len(self._exchanges) - self._num_summed >= MAX_IN_FLIGHT:
                    # All workers launch in this order, so the others' parts were sent already.
                    self._exchanges[self._num_summed].gather()
                    self._num_summed += 1
                self._exchanges.append(self._exchange(trees))

    def _exchange(self, trees: list[Tensor]) -> Exchange:
        real = [torch.view_as_real(t).reshape(-1) if t.is_complex() else t for t in trees]
        bucket, group = real[-1], self._group
        if self._has_two_trees and bucket.dtype in _ROUNDED_ONCE:
            return TwoTrees(bucket, group)
        if not backend_of(bucket.device).is_host or is_on_devices(group):
            return Collectives(real, self._trees, self._num_leaves, self._rank, group)
        room, tag = self._room(bucket, len(real)), 2 * len(self._exchanges)
        return Messages(real, self._trees, self._num_leaves, room, self._rank, tag, group)

    def _room(self, bucket: Tensor, num_own: int) -> Tensor:
        """Receive buffers for this worker's slice of each subtree; later buckets reuse them."""
        others = sum(len(held) for held in self._trees) - num_own
        length = len(bucket) // self._num_workers
        at = len(self._exchanges) % MAX_IN_FLIGHT, bucket.dtype
        if at not in self._rooms or len(self._rooms[at]) < others * length:
            self._rooms[at] = bucket.new_empty(others * length)
        return self._rooms[at][: others * length].view(others, length)

    def wait(self) -> None:
        """Finish the tree for this worker's slices, and gather the others'."""
        for exchange in self._exchanges[self._num_summed :]:
            exchange.gather()
        for exchange in self._exchanges:
            exchange.wait()
        self._exchanges.clear()
        self._num_summed = 0


def _num_spares(turns: Sequence[Turn]) -> int:
    depth = most = 0
    for turn in turns:
        depth += int(turn.spills)
        most = max(most, depth)
        depth -= turn.num_merges
    return most
