"""The sum of a worker's gradients over its passes and over the workers (VirtualFlow 3.2, 5.2)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...devices.backend import backend_of
from ..invariant import InvariantSum
from .arrivals import Arrivals, BucketSums
from .flat_buffers import FIRST_BUCKET_BYTES, FlatBuffers, layout_of
from .hooks import FirstGradients


class GradientReducer:
    """Accumulate the gradients of several passes, then sum them over the workers of a group.

    A step is ``begin()``, any number of backward passes with ``arm()`` before the last, then
    ``finish()``. During the last backward, each bucket is reduced as soon as its gradients are
    complete; the order of buckets is equal on every worker. A bucket with parameters that no pass
    used is reduced by ``finish``. Callers scale their losses so that the sum over passes and
    workers is the mean they want.

    Args:
        parameters: Name and parameter; each parameter once, in the same order on every worker.
        group: The process group; None is the default one.
        distributed: Whether to reduce at all; by default whether a group is initialised.
        bucket_bytes: Minimum size of a bucket, in bytes; the default depends on the device kind.
        invariant: Sums virtual nodes in an order that does not depend on the mapping; then call
            ``enter`` and ``leave`` around each pass. None is an ordinary all-reduce.
        is_first: Whether this worker contributes the gradients left by earlier steps; by default
            rank 0 of the group does.
        keeps_carried: Whether to keep a copy of those gradients, so that a step can be repeated.
        num_sums: How many further float32 numbers travel with the last bucket.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter] | Iterable[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        *,
        distributed: bool | None = None,
        bucket_bytes: int | None = None,
        invariant: InvariantSum | None = None,
        is_first: bool | None = None,
        keeps_carried: bool = False,
        num_sums: int = 0,
    ) -> None:
        named = (
            dict(parameters)
            if isinstance(parameters, Mapping)
            else {f"parameter {index}": p for index, p in enumerate(parameters)}
        )
        self._names = list(named)
        self._parameters = list(named.values())
        self._group = group
        initialised = dist.is_available() and dist.is_initialized()
        self._distributed = initialised if distributed is None else distributed
        self._invariant = invariant
        if is_first is None:
            is_first = not self._distributed or dist.get_rank(group) == 0
        self._is_first = invariant.holds_first if invariant is not None else is_first
        self._carried: set[int] = set()
        self._before: dict[int, Tensor] | None = {} if keeps_carried else None
        self._bucket_bytes, self._num_sums = bucket_bytes, num_sums
        self._firsts = FirstGradients(
            none_is_zero=True,
            host_adds_zero=True,
            device_adds_zero=invariant is not None,
            most_held_bytes=bucket_bytes,
        )
        self._build((), num_misses=0)  # parameters may be cast or moved before the first step

    def _build(self, layout: tuple[object, ...], *, num_misses: int) -> None:
        """Make what depends on the parameters' layout; none has a buffer where that is empty."""
        self._layout = layout
        self._buffers = FlatBuffers(
            self._parameters if layout else (),
            bucket_bytes=self._bucket_bytes,
            alignment=self._invariant.alignment if self._invariant is not None else 1,
            num_sums=self._num_sums,
        )
        self._sums = BucketSums(
            self._buffers, self._firsts, group=self._group, invariant=self._invariant
        )
        self._arrivals = Arrivals(
            self._names,
            self._parameters,
            self._buffers,
            self._firsts,
            self._sums,
            num_misses=num_misses,
        )

    @property
    def flats(self) -> list[Tensor]:
        """The gradient buffers."""
        return self._buffers.flats

    @property
    def sums(self) -> Tensor | None:
        """[num_sums] view of the further numbers; None where the last buffer is not float32."""
        return self._buffers.sums

    @property
    def num_bytes(self) -> int:
        """The bytes of the gradient buffers, which one reduction sends."""
        return self._buffers.num_bytes

    @property
    def num_parameters(self) -> int:
        """The number of parameters, trainable or not."""
        return len(self._parameters)

    def is_finite(self) -> bool:
        """Whether all parameters are numbers. Waits for the device."""
        sums = [parameter.detach().sum(dtype=torch.float64) for parameter in self._parameters]
        return not sums or bool(
            torch.stack([each.to(sums[0].device) for each in sums]).isfinite().all()
        )

    @property
    def num_launched(self) -> int:
        """How many buckets this worker has begun to reduce in this step."""
        return self._sums.num_launched

    @property
    def carried(self) -> bool:
        """Whether gradients of an earlier step were still there when this step began."""
        return bool(self._carried)

    @property
    def has_some(self) -> bool:
        """Whether a gradient has come in this step, as far as hooks on parameters tell."""
        return bool(self._arrivals.used)

    def begin(
        self,
        write_sums: Callable[[Tensor], None] | None = None,
        *,
        num_passes: int | None = None,
    ) -> None:
        """Start a step; when it ends, every gradient is a view of the buffer.

        Gradients that are still set (no ``zero_grad`` since) stay in the sum, as they do in plain
        PyTorch; they are equal on all workers, so only the first worker contributes them.

        Args:
            write_sums: Writes this worker's part into ``sums``, if there is such a place. Called
                once, when all gradients of this worker are complete.
            num_passes: Backward passes of this worker in this step, if the caller knows.
        """
        self._rebuild_if_changed()
        self._firsts.begin()
        self._sums.begin(write_sums)
        is_fresh = self._arrivals.have_none()
        # Several passes over a tree of sums move whole buffers, so these must be whole at once.
        awaits_all = is_fresh and (self._invariant is None or self._invariant.num_turns == 1)
        self._arrivals.begin(awaits_all=awaits_all, num_passes=num_passes)
        self._carried.clear()
        if self._before is not None:
            self._before.clear()
        if not awaits_all:
            self._attach_all(is_fresh=is_fresh)

    def _rebuild_if_changed(self) -> None:
        """Build the buffers again if parameters were frozen, unfrozen or cast since last step."""
        layout = layout_of(self._parameters)
        if layout == self._layout:
            return
        num_misses = self._arrivals.num_misses
        self._arrivals.close()
        self._build((), num_misses=0)  # first, so that there are never two sets of buffers
        self._build(layout, num_misses=num_misses)
        if self._invariant is not None:
            self._invariant.allocate(self.flats)

    def _attach_all(self, *, is_fresh: bool) -> None:
        """Make every gradient its view, with what earlier steps left in it."""
        keeps = self._is_first and not is_fresh
        # By buffer, or by one call: views are many, and each would be a kernel.
        empty = [self.sums] if keeps and self.sums is not None else []
        with torch.no_grad():
            for index, view in self._buffers.views.items():
                if not self._carry(index, view) and keeps:
                    empty.append(view)
                self._parameters[index].grad = view
            if empty:
                torch._foreach_zero_(empty)
            for flat in () if keeps else self.flats:
                flat.zero_()

    def _carry(self, index: int, view: Tensor) -> bool:
        """Note the gradient that earlier steps left; on the first worker, put it into its view."""
        gradient = self._parameters[index].grad
        if gradient is None:
            return False
        self._carried.add(index)
        if self._before is not None:
            self._before[index] = gradient.clone()
        if self._is_first and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        return True

    def multiply(self, factor: Tensor) -> None:
        """Multiply this worker's gradients of this step by a factor [] before they are summed."""
        self._sums.factor = factor

    def enter(self, node: int) -> None:
        """Begin a virtual node's pass."""
        if self._invariant is not None:
            self._invariant.enter(node)

    def leave(self) -> None:
        """End the pass: what it gave may lie in memory that the next pass writes to."""
        self._firsts.write()  # else a replayed graph would write over it
        if self._invariant is not None:
            self._invariant.leave()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Let torch.compile cut a model's graph where buckets end.

        A compiled graph gives all its gradients at its end, so their sums could begin only then.
        torch cuts graphs in parts for a DistributedDataParallel that is active, and asks it only
        for the size of its buckets.
        """
        if not self._parameters or not (self._distributed or self._invariant is not None):
            yield
            return
        usual = self._bucket_bytes or backend_of(self._parameters[0].device).bucket_bytes
        asked = SimpleNamespace(bucket_bytes_cap=max(usual, FIRST_BUCKET_BYTES))
        before = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = asked  # type: ignore[assignment]
        try:
            yield
        finally:
            DistributedDataParallel._active_ddp_module = before

    def arm(self, *, defer_last: bool = False) -> None:
        """Let the next backward reduce buckets as they fill.

        Args:
            defer_last: Keep the last bucket back until ``finish``. On an emulated device, the last
                gradient counts as ready when the stretched pass ends, not the real one.
        """
        self._sums.defers_last = defer_last
        is_last_turn = self._invariant is None or self._invariant.in_last_turn
        self._arrivals.arm(starts_sums=self._distributed and is_last_turn)

    def launch_rest(self) -> None:
        """Start to reduce the buckets that the last backward did not."""
        self._arrivals.finish()
        if self._invariant is not None:
            self._invariant.settle()
        if self._distributed or self._invariant is not None:
            self._sums.launch_rest()

    def wait(self) -> None:
        """Wait until every bucket is reduced. On CUDA this blocks the stream, not the host."""
        self._sums.wait()

    def finish(self) -> None:
        """Reduce what is left and wait: afterwards gradients are the sums over all workers."""
        self.launch_rest()
        self.wait()

    def unused(self) -> list[int]:
        """Indices of the trainable parameters without a gradient on this worker in this step."""
        views, used = self._buffers.views, self._arrivals.used
        if len(used) == len(views):  # as a rule, and the rest takes a while
            return []
        return [
            index for index in sorted(views) if index not in used and index not in self._carried
        ]

    def drop(self, indices: Iterable[int]) -> None:
        """Set gradients to None: what plain PyTorch shows for parameters that no pass used."""
        for index in indices:
            self._parameters[index].grad = None

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor of shape []."""
        with torch.no_grad():
            for flat in self.flats:
                flat.mul_(factor.to(device=flat.device, dtype=_real_dtype(flat)))

    def undo(self) -> None:
        """Reset gradients to their values before ``begin``; needs ``keeps_carried``."""
        for index in self._buffers.views:
            self._parameters[index].grad = (self._before or {}).get(index)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._arrivals.close()


def _real_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.real.dtype if tensor.is_complex() else tensor.dtype
