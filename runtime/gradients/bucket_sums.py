"""Sums of buckets over the workers, which start in the same order on every worker."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .. import peers
from ..invariant import InvariantSum
from .first_gradients import FirstGradients
from .flat_buffers import FlatBuffers


class BucketSums:
    """Starts the sums of buckets, and waits for them.

    Args:
        buffers: Their buffers and buckets.
        firsts: Holds gradients back that must be in the buffers before a sum starts.
        group: The process group; None is the default one.
        invariant: Sums in an order that does not depend on the mapping; None is an all-reduce.

    Attributes:
        num_launched: How many buckets' sums were started in this step.
        defers_last: Whether ``launch_ready`` keeps the last bucket back.
        factor: [] what this worker's gradients are multiplied by before they are summed, if it is
            not None.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        firsts: FirstGradients,
        *,
        group: dist.ProcessGroup | None,
        invariant: InvariantSum | None,
    ) -> None:
        self._buffers, self._firsts = buffers, firsts
        self._group, self._invariant = group, invariant
        self._works: list[peers.Transfer] = []
        self._write_sums: Callable[[Tensor], None] | None = None
        self.num_launched, self.defers_last = 0, False
        self.factor: Tensor | None = None

    def begin(self, write_sums: Callable[[Tensor], None] | None) -> None:
        """Start a step; ``write_sums`` as for ``GradientReducer.begin``."""
        # Kept only until it was called: it may refer to the owner, which must be freed at once.
        self._write_sums = write_sums if self._buffers.sums is not None else None
        self._works.clear()
        self.num_launched, self.factor = 0, None
        if self._invariant is not None:
            self._invariant.begin()

    def launch_ready(self) -> None:
        """Start the sums of the next buckets whose gradients have come."""
        buckets = self._buffers.buckets
        limit = len(buckets) - int(self.defers_last)
        while self.num_launched < limit and buckets[self.num_launched].is_ready:
            self._launch_next()

    def launch_rest(self) -> None:
        """Start the sums of all buckets that are left."""
        while self.num_launched < len(self._buffers.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        self._firsts.write()
        bucket, sums = self._buffers.buckets[self.num_launched], self._buffers.sums
        if self.factor is not None:
            held = self._invariant.held(*bucket.place) if self._invariant is not None else []
            with torch.no_grad():
                torch._foreach_mul_([bucket.flat, *held], self.factor)
        if sums is not None and self.num_launched == self._buffers.first_with_sums:
            assert self._write_sums is not None
            self._write_sums(sums)
            self._write_sums = None
        self.num_launched += 1
        if self._invariant is not None:
            self._invariant.launch(*bucket.place)
            return
        work = peers.all_reduce(bucket.flat, group=self._group, async_op=True)
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        """Wait until every sum is done. On CUDA this blocks the stream, not the host."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._invariant is not None:
            self._invariant.wait()
