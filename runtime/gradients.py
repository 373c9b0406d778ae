"""One gradient buffer per worker, and its reduction over the workers (VirtualFlow 3.2, 5.2).

Every parameter's gradient is a view into one flat buffer (one per dtype and device). The order is
the reverse of registration, which is about the order in which backward fills it. All virtual
nodes of a device add into it, so memory does not grow with their number. A bucket of the
all-reduce is a slice of the buffer. The last bucket has space for a few more numbers, so the sums
of a step need no collective of their own.

A step's first gradient of a parameter is what autograd made; it is written over what the buffer
held, so the buffer need not be cleared and read first. Later passes add to it. On an accelerator
the first gradients of a bucket are written together, by one kernel.

A hook of every parameter tells when its gradient has come. Between kernels, where Python's code is
not in the caches, that takes 10 us a hook. So where a step is one pass, a reducer learns which
parameter completes each bucket. From then on only these have hooks, and on the host those with
large gradients, which are written while they are in the caches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..devices.backend import backend_of
from ..schema.errors import TargetError
from . import peers
from .invariant import InvariantSum

# The first bucket is small, so that a small model's reduction also begins during backward, as in
FIRST_BUCKET_BYTES = 1 << 20
_LARGE_BYTES = 1 << 15  # of gradients that are written to a host's memory when they come
_MAX_MISSES = 3  # steps that began to learn anew, after which every parameter keeps its hook
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


@dataclass(slots=True)
class _Bucket:
    """A slice of a flat buffer that one collective reduces."""

    flat: Tensor
    place: tuple[int, int, int]  # (number of the flat buffer, start, end)
    parameters: list[int] = field(default_factory=list)
    num_ready: int = 0
    last: int = -1  # the parameter whose gradient was the last to come

    @property
    def is_ready(self) -> bool:
        """Whether all its gradients have come."""
        return self.num_ready == len(self.parameters)


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

    Attributes:
        flats: The gradient buffers.
        sums: [num_sums] view of those numbers; None where the last buffer is not float32.
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
        self._before: dict[int, Tensor] | None = {} if keeps_carried else None
        self._bucket_bytes = bucket_bytes
        self._layout: tuple[object, ...] = ()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._views: dict[int, Tensor] = {}
        self._trained: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self.flats: list[Tensor] = []
        self._num_sums, self.sums = num_sums, cast("Tensor | None", None)
        self._write_sums: Callable[[Tensor], None] | None = None
        self._first_with_sums = -1
        self._armed = False
        self._defer_last = False
        self._num_launched = 0
        self._works: list[peers.Transfer] = []
        self._used: set[int] = set()
        self._fired: set[int] = set()
        self._carried: set[int] = set()
        self._awaited: set[int] = set()  # whose first gradient of the step has not come
        self._held: list[int] = []  # whose first gradient has come, and is not in the buffer
        self._num_held_bytes = 0
        self._is_single = False  # the step is one pass, and no gradient was there when it began
        self._learns, self._has_learned, self._num_misses = False, False, 0
        self._is_lean = False  # only some parameters have hooks
        self._versions: dict[int, int] = {}  # of buffers that hold gradients, in a lean step

    @property
    def num_bytes(self) -> int:
        """The bytes of the gradient buffers, which one reduction sends."""
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    @property
    def carried(self) -> bool:
        """Whether gradients of an earlier step were still there when this step began."""
        return bool(self._carried)

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
        # Kept only until it was called: it refers to this reducer, which must be freed at once.
        self._write_sums = write_sums if self.sums is not None else None
        self._used.clear()
        self._works.clear()
        self._carried.clear()
        if self._before is not None:
            self._before.clear()
        self._num_launched = 0
        if self._invariant is not None:
            self._invariant.begin()
        self._awaited.clear()
        self._held.clear()
        self._num_held_bytes = 0
        self._versions.clear()
        is_fresh = self._has_no_gradients()
        # Several passes over a tree of sums move whole buffers, so these must be whole at once.
        waits = is_fresh and (self._invariant is None or self._invariant.num_turns == 1)
        self._is_single = waits and num_passes is not None and num_passes <= 1
        self._choose_hooks()
        if waits:
            self._awaited.update(self._views)
            return
        with torch.no_grad():
            for flat in self.flats if is_fresh else ():
                flat.zero_()
            for index, view in self._views.items():
                if is_fresh:
                    self._parameters[index].grad = view
                else:
                    self._attach(index, view)
            if self.sums is not None and not is_fresh:
                self.sums.zero_()

    def _has_no_gradients(self) -> bool:
        return have_no_gradients(self._trained)

    def _attach(self, index: int, view: Tensor) -> None:
        parameter = self._parameters[index]
        if parameter.grad is None:
            view.zero_()
        else:
            self._carried.add(index)
            if self._before is not None:
                self._before[index] = parameter.grad.clone()
            if not self._is_first:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        parameter.grad = view

    def enter(self, node: int) -> None:
        """Begin a virtual node's pass."""
        if self._invariant is not None:
            self._invariant.enter(node)

    def leave(self) -> None:
        """End the pass."""
        if self._invariant is not None:
            self._invariant.leave()

    def arm(self, *, defer_last: bool = False) -> None:
        """Let the next backward reduce buckets as they fill.

        Args:
            defer_last: Keep the last bucket back until ``finish``. On an emulated device, the last
                gradient counts as ready when the stretched pass ends, not the real one.
        """
        self._armed = self._distributed
        if self._invariant is not None:
            self._armed = self._armed and self._invariant.in_last_turn
        self._defer_last = defer_last
        self._fired.clear()
        for bucket in self._buckets:
            bucket.num_ready = 0
        self._learns = self._armed and self._is_single and len(self._awaited) == len(self._views)
        if self._is_lean and not self._has_no_gradients():
            # The script's function went back by itself: what has come may not be all.
            self._armed = False

    def launch_rest(self) -> None:
        """Start to reduce the buckets that the last backward did not."""
        self._armed = False
        self._complete()
        self._learn()
        if self._invariant is not None:
            self._invariant.settle()
        if self._distributed or self._invariant is not None:
            while self._num_launched < len(self._buckets):
                self._launch_next()

    def wait(self) -> None:
        """Wait until every bucket is reduced. On CUDA this blocks the stream, not the host."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._invariant is not None:
            self._invariant.wait()

    def finish(self) -> None:
        """Reduce what is left and wait: afterwards gradients are the sums over all workers."""
        self.launch_rest()
        self.wait()

    def unused(self) -> list[int]:
        """Indices of the trainable parameters without a gradient on this worker in this step."""
        if len(self._used) == len(self._views):  # as a rule, and the rest takes a while
            return []
        return [
            index
            for index in sorted(self._views)
            if index not in self._used and index not in self._carried
        ]

    def drop(self, indices: Iterable[int]) -> None:
        """Set gradients to None: what plain PyTorch shows for parameters that no pass used."""
        for index in indices:
            self._parameters[index].grad = None

    @property
    def num_parameters(self) -> int:
        """The number of parameters, trainable or not."""
        return len(self._parameters)

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor of shape []."""
        with torch.no_grad():
            for flat in self.flats:
                flat.mul_(factor.to(device=flat.device, dtype=_real_dtype(flat)))

    def undo(self) -> None:
        """Reset gradients to their values before ``begin``; needs ``keeps_carried``."""
        for index in self._views:
            self._parameters[index].grad = (self._before or {}).get(index)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _rebuild_if_changed(self) -> None:
        """Build the buffers again if parameters were frozen, unfrozen or cast since last step."""
        layout = layout_of(self._parameters)
        if layout != self._layout:
            self._layout = layout
            self._build()

    def _build(self) -> None:
        self.close()
        self._views, self._bucket_of = {}, {}
        self._buckets, self.flats, self.sums = [], [], None
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in reversed(range(len(self._parameters))):
            parameter = self._parameters[index]
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        for number, ((dtype, device), members) in enumerate(kinds.items(), start=1):
            has_sums = number == len(kinds) and dtype == torch.float32 and self._num_sums > 0
            self._lay_out(members, dtype, device, num_sums=self._num_sums if has_sums else 0)
        if self._invariant is not None:
            self._invariant.allocate(self.flats)
        self._trained = [self._parameters[index] for index in self._views]
        self._has_learned = self._is_lean = False
        self._watch_all()

    def _lay_out(
        self, members: Sequence[int], dtype: torch.dtype, device: torch.device, *, num_sums: int
    ) -> None:
        total = sum(self._parameters[index].numel() for index in members)
        # Buckets end at multiples of this; the remainder goes into the next bucket.
        unit = self._invariant.alignment if self._invariant is not None else 1
        flat = torch.zeros(-(-(total + num_sums) // unit) * unit, dtype=dtype, device=device)
        self.flats.append(flat)
        start, offset = 0, 0
        usual = self._bucket_bytes or backend_of(device).bucket_bytes
        bucket: list[int] = []
        for index in members:
            parameter = self._parameters[index]
            self._views[index] = view_like(flat, offset, parameter)
            bucket.append(index)
            offset += parameter.numel()
            least = usual if self._buckets else min(usual, FIRST_BUCKET_BYTES)
            if (offset - start) * flat.element_size() >= least or offset == total:
                end = len(flat) if offset == total else offset // unit * unit
                for cut in _cuts(start, end, usual // flat.element_size(), unit):
                    # Further buckets of a large parameter are ready together with its first.
                    self._add_bucket(flat, *cut, bucket)
                    bucket = []
                start = end
        if num_sums:
            self.sums = flat[total : total + num_sums]
            self._first_with_sums = next(
                number
                for number, bucket in enumerate(self._buckets)
                if bucket.place[0] == len(self.flats) - 1 and bucket.place[2] > total
            )

    def _add_bucket(self, whole: Tensor, start: int, end: int, members: list[int]) -> None:
        flat = whole[start:end]
        for index in members:
            self._bucket_of[index] = len(self._buckets)
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        self._buckets.append(_Bucket(real, (len(self.flats) - 1, start, end), members))

    # A hook for each bucket

    def _choose_hooks(self) -> None:
        """Let all parameters have hooks in this step, or only those that need one."""
        self._learns = False
        if self._is_lean and not self._is_single:
            self._num_misses += 1
            self._has_learned = False
        if self._has_learned == self._is_lean:
            return
        self.close()
        self._is_lean = self._has_learned
        # A hook of the script may use a gradient up, and it would not be seen to have come.
        if self._is_lean and any(_has_hooks(self._parameters[index]) for index in self._views):
            self._is_lean, self._has_learned, self._num_misses = False, False, _MAX_MISSES
        if not self._is_lean:
            self._watch_all()
            return
        for bucket in self._buckets:
            for index in bucket.parameters:
                if index == bucket.last:
                    self._watch(index, self._closing_hook(bucket))
                elif self._is_large(index):
                    self._watch(index, self._large_hook(index, bucket))

    def _is_large(self, index: int) -> bool:
        view = self._views[index]
        is_host = backend_of(view.device).is_host
        return is_host and view.numel() * view.element_size() >= _LARGE_BYTES

    def _watch(self, index: int, hook: Callable[[Tensor], None]) -> None:
        self._handles.append(self._parameters[index].register_post_accumulate_grad_hook(hook))

    def _learn(self) -> None:
        """After a step's passes, note whether each bucket was complete when its last one came."""
        if not self._learns or self._num_misses >= _MAX_MISSES:
            return
        in_time = all(bucket.is_ready for bucket in self._buckets)
        if self._is_lean and not in_time:
            self._num_misses += 1
        self._has_learned = in_time

    def _closing_hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        """The hook that comes after a bucket's other gradients; else it changes nothing."""
        parameters = [self._parameters[index] for index in bucket.parameters]

        def closed(_: Tensor) -> None:
            if not self._armed:
                return
            if None in {*map(_gradient, parameters)}:
                return
            if bucket.is_ready:
                raise came_twice(self._names[bucket.last])
            self._check_versions()
            self._take_all([index for index in bucket.parameters if index in self._awaited])
            bucket.num_ready = len(parameters)
            self._versions[bucket.place[0]] = 0
            self._launch_ready()
            self._note_versions()

        return closed

    def _large_hook(self, index: int, bucket: _Bucket) -> Callable[[Tensor], None]:
        """A hook that writes a large gradient at once."""
        view, flat, number = self._views[index], self.flats[bucket.place[0]], bucket.place[0]
        used, awaited, versions = self._used, self._awaited, self._versions

        def came(parameter: Tensor) -> None:
            if not self._armed:
                return
            if index not in awaited or versions.get(number, flat._version) != flat._version:
                raise came_twice(self._names[index])
            used.add(index)
            awaited.remove(index)
            self._take_first(index, parameter, view, at_once=True)
            versions[number] = flat._version

        return came

    def _take_all(self, indices: Sequence[int]) -> None:
        """Put the first gradients of parameters into the buffer, on a device by one kernel."""
        self._used.update(indices)
        self._awaited.difference_update(indices)
        for index in indices:
            parameter, view = self._parameters[index], self._views[index]
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                self._take_first(index, parameter, view, at_once=True)
            elif gradient.is_cpu:
                parameter.grad = torch.add(gradient, 0.0, out=view)  # as in ``_take_first``
            else:
                self._held.append(index)
        self._write_held()

    def _note_versions(self) -> None:
        """Note the state of the buffers that hold gradients: only this object changes them."""
        for number in self._versions:
            self._versions[number] = self.flats[number]._version

    def _check_versions(self) -> None:
        """Refuse a gradient that was added after its bucket was complete: it may be on its way.

        Raises:
            TargetError: There is one.
        """
        for number, version in self._versions.items():
            if self.flats[number]._version != version:
                raise came_twice("a parameter")

    def _watch_all(self) -> None:
        for index in self._views:
            self._watch(index, self._hook(index))

    # A hook for each parameter

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        # It runs between kernels, where Python's code is not in the caches, so it is kept short.
        view, number = self._views[index], self._bucket_of.get(index)
        bucket = None if number is None else self._buckets[number]  # None: it has no numbers
        is_host = backend_of(view.device).is_host
        used, awaited, have_fired = self._used, self._awaited, self._fired

        def fired(parameter: Tensor) -> None:
            used.add(index)
            if index in awaited:
                awaited.remove(index)
                self._take_first(index, parameter, view, at_once=is_host)
            if self._armed:
                if index in have_fired:
                    raise came_twice(self._names[index])
                have_fired.add(index)
                if bucket is not None:
                    bucket.num_ready += 1
                    if bucket.num_ready == len(bucket.parameters):
                        bucket.last = index
                        self._launch_ready()

        return fired

    def _take_first(self, index: int, parameter: Tensor, view: Tensor, *, at_once: bool) -> None:
        """Put a parameter's first gradient of the step into the buffer, at once or soon."""
        gradient = parameter.grad
        if gradient is None:  # a hook of the script has used it up
            view.zero_()
        elif gradient.layout != torch.strided:
            parameter.grad = view.zero_().add_(gradient)
        elif at_once:
            # Adding 0 to a copy makes +0 of -0, as adding to a cleared buffer does.
            parameter.grad = torch.add(gradient, 0.0, out=view)
        else:
            self._held.append(index)
            self._num_held_bytes += view.numel() * view.element_size()
            if self._num_held_bytes >= (self._bucket_bytes or backend_of(view.device).bucket_bytes):
                self._write_held()

    def _write_held(self) -> None:
        """Write the gradients that have come into the buffer."""
        if not self._held:
            return
        views = [self._views[index] for index in self._held]
        found = [self._parameters[index].grad for index in self._held]
        gradients = [
            torch.zeros_like(view) if gradient is None else gradient  # as above
            for view, gradient in zip(views, found, strict=True)
        ]
        with torch.no_grad():
            torch._foreach_copy_(views, gradients)
            if self._invariant is not None:  # +0 of -0, as above
                torch._foreach_add_(views, 0.0)
        for index, view in zip(self._held, views, strict=True):
            self._parameters[index].grad = view
        self._held.clear()
        self._num_held_bytes = 0

    def _complete(self) -> None:
        """Make the buffer complete: what no pass has used is zero."""
        if self._is_lean:
            self._check_versions()
            self._take_all([i for i in self._awaited if self._parameters[i].grad is not None])
        self._write_held()
        if not self._awaited:
            return
        views = [self._views[index] for index in self._awaited]
        with torch.no_grad():
            torch._foreach_zero_(views)
        for index, view in zip(self._awaited, views, strict=True):
            self._parameters[index].grad = view
        self._awaited.clear()

    def _launch_ready(self) -> None:
        limit = len(self._buckets) - int(self._defer_last)
        while self._num_launched < limit:
            bucket = self._buckets[self._num_launched]
            if bucket.num_ready < len(bucket.parameters):
                return
            self._launch_next()

    def _launch_next(self) -> None:
        self._write_held()
        bucket = self._buckets[self._num_launched]
        if self.sums is not None and self._num_launched == self._first_with_sums:
            assert self._write_sums is not None
            self._write_sums(self.sums)
            self._write_sums = None
        self._num_launched += 1
        if self._invariant is not None:
            self._invariant.launch(*bucket.place)
            return
        work = peers.all_reduce(bucket.flat, group=self._group, async_op=True)
        if work is not None:
            self._works.append(work)


def came_twice(name: str) -> TargetError:
    """The error where a parameter gets two gradients in a backward pass that overlaps with sums."""
    return TargetError(
        f"{name} got its gradient twice in one backward; hetflow cannot tell which is the last",
        hint="use checkpoint(..., use_reentrant=False), or prepare(..., overlap=False)",
    )


def _cuts(start: int, end: int, usual: int, unit: int) -> Iterator[tuple[int, int]]:
    """Cut [start, end) into about equal parts of about ``usual`` numbers, at multiples of unit."""
    parts = max(round((end - start) / max(usual, 1)), 1)
    length = max(-(-(end - start) // (parts * unit)) * unit, unit)
    for at in range(start, end, length):
        yield at, min(at + length, end)


def have_no_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether ``grad`` of all parameters is None."""
    return {*map(_gradient, parameters)} <= {None}


def layout_of(parameters: Sequence[nn.Parameter]) -> tuple[object, ...]:
    """All that the buffers of gradients depend on, to be compared in every step."""
    # By ``map``, which takes half as long as a loop.
    return *map(_kind, parameters), *map(Tensor.stride, parameters)


def view_like(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """The part of ``flat`` for one parameter, in the parameter's memory format."""
    part = flat[offset : offset + parameter.numel()]
    dense = any(
        parameter.dim() == dims and parameter.is_contiguous(memory_format=layout)
        for dims, layout in zip((4, 5), _CHANNELS_LAST, strict=True)
    )
    if dense and not parameter.is_contiguous():
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)


_gradient, _kind = attrgetter("grad"), attrgetter("requires_grad", "dtype", "device", "shape")


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether something else than a reducer waits for the parameter's gradients."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _real_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.real.dtype if tensor.is_complex() else tensor.dtype
