"""Sum gradients so that the bits do not depend on the mapping of virtual nodes (EasyScale 3.3).

The virtual nodes 0, 1, 2, ... are the leaves of one binary tree (``Subtree``). Every sum follows
its branches, ((g0 + g1) + (g2 + g3)) + ..., whichever worker computes it. A worker sums the
subtrees that it holds whole during its passes; sibling leaves add up in the gradient buffer itself,
so a pair of them costs nothing. Then each slice's owner receives the workers' subtrees, finishes
the tree, and sends the sum to all (``Messages``). Where each worker holds one subtree, the traffic
is that of an ordinary all-reduce; for two such workers it is one.

A device keeps at most log2(number of its virtual nodes) buffers, not one for each. Exact
accumulation that needs no order would keep one buffer, but twice as wide; it sends twice the bytes
and cannot serve float64 (benchmarks/reduction.py compares them).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices.backend import backend_of
from ..devices.collectives import is_on_devices, wire_device
from . import peers

# The tree along which gradients are summed, equal for every mapping of virtual nodes. Pure.
#
# The virtual nodes 0, 1, 2, ... are the leaves of one binary tree, aligned at powers of two.


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
            # Always left + right, and into whichever buffer may be overwritten. IEEE addition
            # commutes, so the place of the sum does not matter, and its order is the tree's.
            into = value if value is out else left
            torch.add(left, value, out=into)
            tree, value = tree.parent(num_leaves), into
        stack.append((tree, value))


# Buckets whose received slices are in memory at once; the third waits until the first is summed.
MAX_IN_FLIGHT = 2
_ROUNDED_ONCE = (torch.float32, torch.float64)  # a + b has the same bits in every all-reduce


# Exchange the workers' subtrees of a bucket: each slice goes to its owner, its sum to all.
#
# Over gloo, slices are sent as messages directly from and into the buffers. That takes a third to a
# quarter of the CPU time of gloo's own all-to-all and all-gather, which copy twice and allocate
# each time (benchmarks/reduction.py). Over NCCL, its collectives are used.


class TwoTrees:
    """Two workers with a whole subtree each: a + b has one order, so an all-reduce is exact."""

    def __init__(self, bucket: Tensor) -> None:
        self._work = peers.all_reduce(bucket, async_op=True)

    def gather(self) -> None:
        """Do nothing: the all-reduce does it."""

    def wait(self) -> None:
        """Wait for the all-reduce."""
        peers.wait_for([self._work])


class Messages:
    """Exchange slices as single messages, on the host.

    Args:
        trees: This worker's subtrees of the bucket; the last is in the bucket itself.
        names: [workers] the subtrees of each worker, in the order in which they are sent.
        num_leaves: Virtual nodes of the job.
        room: A receive buffer with a row for each subtree of the others, in order of workers.
        rank: This worker's rank.
        tag: A number that no other bucket of the step uses, and neither does ``tag + 1``.
    """

    def __init__(
        self,
        trees: Sequence[Tensor],
        names: Sequence[Sequence[Subtree]],
        num_leaves: int,
        room: Tensor,
        rank: int,
        tag: int,
    ) -> None:
        self._num_leaves, self._rank, self._tag = num_leaves, rank, tag
        size = len(names)
        self._slices = trees[-1].view(size, -1)
        rows = [tree.view(size, -1) for tree in trees]
        self._parts = list(zip(names[rank], (row[rank] for row in rows), strict=True))
        self._own = self._parts[-1][1]
        # All receives are posted before the first send: gloo moves a message only once its receive
        # is posted, so these can flow at once.
        free = iter(room)
        self._coming, self._works = [], []
        for worker, held in enumerate(names):
            if worker != rank:
                for name in held:
                    # In order of workers here, and in order of leaves in ``root_of``: the order in
                    # which messages arrive decides nothing.
                    self._parts.append((name, next(free)))
                    self._coming.append(peers.irecv(self._parts[-1][1], worker, tag=tag))
        for worker in self._others():
            self._works += [peers.isend(row[worker], worker, tag=tag) for row in rows]

    def _others(self) -> list[int]:
        """The other workers; each worker begins with the one after itself, to spread the load."""
        size = len(self._slices)
        return [(self._rank + step) % size for step in range(1, size)]

    def gather(self) -> None:
        """Sum this worker's slice in place and send it to all.

        The others' slices may be received into the bucket: a worker that sends its sum has
        received our part of it before.
        """
        peers.wait_for(self._coming)
        own, tag = self._own, self._tag + 1
        root_of(self._parts, self._num_leaves, own)
        for worker in self._others():
            self._works.append(peers.irecv(self._slices[worker], worker, tag=tag))
        for worker in self._others():
            self._works.append(peers.isend(own, worker, tag=tag))

    def wait(self) -> None:
        """Wait for all messages to and from this worker."""
        peers.wait_for(self._works)


class Collectives:
    """Exchange slices by an all-to-all and an all-gather."""

    def __init__(
        self, trees: Sequence[Tensor], names: Sequence[Sequence[Subtree]], num_leaves: int
    ) -> None:
        self._names, self._num_leaves = names, num_leaves
        size, self._bucket = len(names), trees[-1]
        length = self._bucket.numel() // size
        rows = [tree.view(size, length) for tree in trees]
        # An all-to-all sends each worker one stretch of memory, and a slice's subtrees lie in
        # several buffers; they are brought side by side first.
        sent = self._bucket if len(rows) == 1 else torch.stack(rows, dim=1).reshape(-1)
        sent = sent.to(wire_device(sent.device))  # gloo exchanges tensors in host memory
        lengths = [len(held) * length for held in names]
        self._sent, self._received = sent, sent.new_empty(sum(lengths))
        self._work = peers.all_to_all_single(
            self._received,
            sent,
            output_split_sizes=lengths,
            input_split_sizes=[len(rows) * length] * size,
            async_op=True,
        )

    def gather(self) -> None:
        """Finish the tree for this worker's slice, and start to gather the others' slices."""
        peers.wait_for([self._work])
        flat_names = [tree for held in self._names for tree in held]
        parts = list(zip(flat_names, self._received.view(len(flat_names), -1), strict=True))
        self._own = parts[0][1]
        root_of(parts, self._num_leaves, self._own)
        self._whole = self._bucket
        if self._own.device != self._whole.device:
            self._whole = torch.empty_like(self._whole, device=self._own.device)
        self._work = peers.all_gather(self._whole, self._own, async_op=True)

    def wait(self) -> None:
        """Wait for the sums of all slices, and put them into the bucket."""
        peers.wait_for([self._work])
        if self._whole is not self._bucket:
            self._bucket.copy_(self._whole)


Exchange = TwoTrees | Messages | Collectives
"""Of one bucket: ``gather`` sums this worker's slice and sends it, ``wait`` gets the others'."""


class InvariantSum:
    """Sum virtual nodes' gradients with the same bits on every mapping.

    A step is ``begin()``, then ``enter(node)`` and ``leave()`` around each pass, ``launch`` for
    each bucket in order, and ``wait``. Virtual nodes without samples may be left out: their
    gradient is zero.

    Args:
        holdings: [workers] the virtual nodes of each worker in running order, by rank.
        rank: This worker's rank.

    Attributes:
        num_spares: Buffers beside the gradient buffer: at most log2 of this worker's virtual nodes.
        num_turns: The number of passes that this worker can have in a step.
        holds_first: Whether this worker runs virtual node 0.
        alignment: The length of every bucket must be a multiple of this.
    """

    def __init__(self, holdings: Sequence[Sequence[int]], rank: int) -> None:
        self._num_leaves = sum(len(nodes) for nodes in holdings)
        plans = [turns_of(nodes, self._num_leaves) for nodes in holdings]
        self._turns = plans[rank][0]
        self._trees = [trees for _, trees in plans]
        self._rank = rank
        self._num_workers = self.alignment = len(holdings)
        self.num_turns, self.holds_first = len(self._turns), 0 in holdings[rank]
        self.num_spares = _num_spares(self._turns)
        self._flats: list[Tensor] = []
        self._spares: list[list[Tensor]] = []
        self._at, self._entered, self._depth = 0, False, 0
        self._exchanges: list[Exchange] = []
        self._num_summed = 0
        self._rooms: dict[tuple[int, torch.dtype], Tensor] = {}
        self._has_two_trees = self._num_workers == sum(len(held) for held in self._trees) == 2

    @property
    def num_received_bytes(self) -> int:
        """Bytes of receive buffers for subtrees: at most those of ``MAX_IN_FLIGHT`` buckets."""
        return sum(room.numel() * room.element_size() for room in self._rooms.values())

    def allocate(self, flats: Sequence[Tensor]) -> None:
        """Take the gradient buffers that all later steps use."""
        self._flats = list(flats)
        self._rooms.clear()
        self._spares = [[torch.zeros_like(flat) for flat in flats] for _ in range(self.num_spares)]

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
        # A virtual node without samples has its turn all the same, with a gradient of zeros:
        # without it, the next one's sum would enter the tree at another leaf.
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
            # The last pass's merges are made bucket by bucket, while the backward pass still runs.
            # From the nearest spare to the farthest, as ``leave`` does.
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
        bucket = real[-1]
        # Other types may be rounded more than once on their way through a library's all-reduce, and
        # would not have the bits of one worker that adds by itself.
        if self._has_two_trees and bucket.dtype in _ROUNDED_ONCE:
            return TwoTrees(bucket)
        if not backend_of(bucket.device).is_host or is_on_devices():
            return Collectives(real, self._trees, self._num_leaves)
        room, tag = self._room(bucket, len(real)), 2 * len(self._exchanges)
        return Messages(real, self._trees, self._num_leaves, room, self._rank, tag)

    def _room(self, bucket: Tensor, num_own: int) -> Tensor:
        """Receive buffers for this worker's slice of each subtree; later buckets reuse them."""
        others = sum(len(held) for held in self._trees) - num_own
        length = len(bucket) // self._num_workers
        # As many rooms as buckets are in flight: ``launch`` has summed the bucket that used this
        # one before.
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
