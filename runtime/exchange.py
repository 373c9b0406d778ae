"""Exchange the workers' subtrees of a bucket: each slice goes to its owner, its sum to all.

Over gloo, slices are sent as messages directly from and into the buffers. That takes a third to a
quarter of the CPU time of gloo's own all-to-all and all-gather, which copy twice and allocate each
time (benchmarks/reduction.py). Over NCCL, its collectives are used.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices.collectives import wire_device
from . import peers
from .subtrees import Subtree, root_of


class Exchange(Protocol):
    """The exchange of one bucket."""

    def gather(self) -> None:
        """Wait for the other workers' subtrees, sum this worker's slice, send the sum to all."""

    def wait(self) -> None:
        """Wait until the bucket holds the sums of all slices."""


class TwoTrees:
    """Two workers with a whole subtree each: a + b has one order, so an all-reduce is exact."""

    def __init__(self, bucket: Tensor, group: "dist.ProcessGroup | None") -> None:
        self._work = peers.all_reduce(bucket, group=group, async_op=True)

    def gather(self) -> None:
        """Do nothing: the all-reduce does it."""

    def wait(self) -> None:
        """Wait for the all-reduce."""
        if self._work is not None:
            self._work.wait()


class Messages:
    """Exchange slices as single messages, on the host.

    Args:
        trees: This worker's subtrees of the bucket; the last is in the bucket itself.
        names: [workers] the subtrees of each worker, in the order in which they are sent.
        num_leaves: Virtual nodes of the job.
        room: A receive buffer with a row for each subtree of the others, in order of workers.
        rank: This worker's rank.
        tag: A number that no other bucket of the step uses, and neither does ``tag + 1``.
        group: The process group.
    """

    def __init__(
        self,
        trees: Sequence[Tensor],
        names: Sequence[Sequence[Subtree]],
        num_leaves: int,
        room: Tensor,
        rank: int,
        tag: int,
        group: "dist.ProcessGroup | None",
    ) -> None:
        self._num_leaves, self._rank, self._tag, self._group = num_leaves, rank, tag, group
        size = len(names)
        self._slices = trees[-1].view(size, -1)
        rows = [tree.view(size, -1) for tree in trees]
        self._parts = list(zip(names[rank], (row[rank] for row in rows), strict=True))
        self._own = self._parts[-1][1]
        free = iter(room)
        self._coming, self._works = [], []
        for worker, held in enumerate(names):
            if worker != rank:
                for name in held:
                    self._parts.append((name, next(free)))
                    self._coming.append(self._receive(self._parts[-1][1], worker, tag))
        for worker in self._others():
            self._works += [self._send(row[worker], worker, tag) for row in rows]

    def _others(self) -> list[int]:
        """The other workers; each worker begins with the one after itself, to spread the load."""
        size = len(self._slices)
        return [(self._rank + step) % size for step in range(1, size)]

    def _send(self, tensor: Tensor, worker: int, tag: int) -> "peers.Transfer | None":
        return peers.isend(tensor, self._global(worker), group=self._group, tag=tag)

    def _receive(self, tensor: Tensor, worker: int, tag: int) -> "peers.Transfer | None":
        return peers.irecv(tensor, self._global(worker), group=self._group, tag=tag)

    def _global(self, worker: int) -> int:
        return worker if self._group is None else dist.get_global_rank(self._group, worker)

    def gather(self) -> None:
        """Sum this worker's slice in place and send it to all.

        The others' slices may be received into the bucket: a worker that sends its sum has
        received our part of it before.
        """
        _wait(self._coming)
        own = self._own
        root_of(self._parts, self._num_leaves, own)
        for worker in self._others():
            self._works.append(self._receive(self._slices[worker], worker, self._tag + 1))
        for worker in self._others():
            self._works.append(self._send(own, worker, self._tag + 1))

    def wait(self) -> None:
        """Wait for all messages to and from this worker."""
        _wait(self._works)


class Collectives:
    """Exchange slices by an all-to-all and an all-gather."""

    def __init__(
        self,
        trees: Sequence[Tensor],
        names: Sequence[Sequence[Subtree]],
        num_leaves: int,
        rank: int,
        group: "dist.ProcessGroup | None",
    ) -> None:
        self._names, self._num_leaves, self._group = names, num_leaves, group
        size, self._bucket = len(names), trees[-1]
        length = self._bucket.numel() // size
        rows = [tree.view(size, length) for tree in trees]
        sent = self._bucket if len(rows) == 1 else torch.stack(rows, dim=1).reshape(-1)
        sent = sent.to(wire_device(sent.device, group))  # gloo exchanges tensors in host memory
        lengths = [len(held) * length for held in names]
        self._sent, self._received = sent, sent.new_empty(sum(lengths))
        self._work = peers.all_to_all_single(
            self._received,
            sent,
            output_split_sizes=lengths,
            input_split_sizes=[len(rows) * length] * size,
            group=group,
            async_op=True,
        )

    def gather(self) -> None:
        """Finish the tree for this worker's slice, and start to gather the others' slices."""
        _wait([self._work])
        flat_names = [tree for held in self._names for tree in held]
        parts = list(zip(flat_names, self._received.view(len(flat_names), -1), strict=True))
        self._own = parts[0][1]
        root_of(parts, self._num_leaves, self._own)
        self._whole = self._bucket
        if self._own.device != self._whole.device:
            self._whole = torch.empty_like(self._whole, device=self._own.device)
        self._work = peers.all_gather(self._whole, self._own, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for the sums of all slices, and put them into the bucket."""
        _wait([self._work])
        if self._whole is not self._bucket:
            self._bucket.copy_(self._whole)


def _wait(works: Sequence["peers.Transfer | None"]) -> None:
    for work in works:
        if work is not None:
            work.wait()
