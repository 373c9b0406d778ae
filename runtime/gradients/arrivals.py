"""Which gradients of a step have come, and which buckets are complete.

A hook of every parameter tells when its gradient has come. Between kernels, where Python's code is
not in the caches, that takes 10 us a hook. So where a step is one pass, it is learned which
parameter completes each bucket. From then on only these have hooks, and on the host those with
large gradients, which are written while they are in the caches.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...devices.backend import backend_of
from .. import peers
from ..invariant import InvariantSum
from .flat_buffers import Bucket, FlatBuffers
from .hooks import FirstGradients, GradientHook, Hooks, came_twice

# Sums of buckets over the workers, which start in the same order on every worker.


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


LARGE_BYTES = 1 << 15
"""Gradients of so many bytes are written to a host's memory when they come."""
MOST_MISSES = 3
"""Steps that began to learn anew, after which every parameter keeps its hook."""
_gradient = attrgetter("grad")


def have_no_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether ``grad`` of all parameters is None."""
    return {*map(_gradient, parameters)} <= {None}


class Arrivals:
    """Watches gradients come, and starts the sums of buckets that are complete.

    A step is ``begin``, backward passes with ``arm`` before the last, and ``finish``. It has hooks
    on parameters until ``close``.

    Args:
        names: [parameters] for errors.
        parameters: All, trainable or not.
        buffers: The views for their gradients, and buckets.
        firsts: Writes the first gradients of a step into the views.
        sums: Told when buckets are complete in an armed backward pass.
        num_misses: As found by an object that watched these parameters before.

    Attributes:
        used: Indices of the parameters whose gradients have come in this step.
        num_misses: Steps in which a bucket was not complete when its last gradient was thought to
            have come.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        buffers: FlatBuffers,
        firsts: FirstGradients,
        sums: BucketSums,
        *,
        num_misses: int = 0,
    ) -> None:
        self._names, self._parameters, self._buffers = names, parameters, buffers
        self._firsts, self._sums = firsts, sums
        self._trained = [parameters[index] for index in buffers.views]
        self._hooks = Hooks()
        self._is_armed = False
        self.used: set[int] = set()
        self._fired: set[int] = set()  # in the armed backward pass
        self._awaited: set[int] = set()  # whose first gradient of the step has not come
        self._is_single = False  # the step is one pass, and no gradient was there when it began
        self._learns, self._has_learned, self.num_misses = False, False, num_misses
        self._is_lean = False  # only some parameters have hooks
        self._versions: dict[int, int] = {}  # of buffers that hold gradients, in a lean step
        self._watch_all()

    def have_none(self) -> bool:
        """Whether no parameter has a gradient."""
        return have_no_gradients(self._trained)

    def begin(self, *, awaits_all: bool, num_passes: int | None) -> None:
        """Start a step.

        Args:
            awaits_all: Whether each parameter's next gradient is its first, which is written over
                what its view holds. Otherwise every ``grad`` is its view by now.
            num_passes: Backward passes of the step, if known.
        """
        self.used.clear()
        self._versions.clear()
        self._awaited.clear()
        self._is_single = awaits_all and num_passes is not None and num_passes <= 1
        self._choose_hooks()
        if awaits_all:
            self._awaited.update(self._buffers.views)

    def arm(self, *, starts_sums: bool) -> None:
        """Let the next backward pass start sums as buckets fill, if ``starts_sums``."""
        self._is_armed = starts_sums
        self._fired.clear()
        for bucket in self._buffers.buckets:
            bucket.num_ready = 0
        self._learns = (
            starts_sums and self._is_single and len(self._awaited) == len(self._buffers.views)
        )
        if self._is_lean and not self.have_none():
            # The script's function went back by itself: what has come may not be all.
            self._is_armed = False

    def finish(self) -> None:
        """End the passes: the buffers are complete; what no pass has used is zero."""
        self._is_armed = False
        self._complete()
        self._learn()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._hooks.remove()

    def _complete(self) -> None:
        views = self._buffers.views
        if self._is_lean:
            self._check_versions()
            self._take_all([i for i in self._awaited if self._parameters[i].grad is not None])
        self._firsts.write()
        if not self._awaited:
            return
        with torch.no_grad():
            torch._foreach_zero_([views[index] for index in self._awaited])
        for index in self._awaited:
            self._parameters[index].grad = views[index]
        self._awaited.clear()

    def _take_all(self, indices: Iterable[int]) -> None:
        indices = list(indices)
        self.used.update(indices)
        self._awaited.difference_update(indices)
        views = self._buffers.views
        self._firsts.take_all([(self._parameters[index], views[index]) for index in indices])

    # A hook for each parameter

    def _watch_all(self) -> None:
        for index in self._buffers.views:
            self._hooks.add(self._parameters[index], self._hook(index))

    def _hook(self, index: int) -> GradientHook:
        # It runs between kernels, where Python's code is not in the caches, so it is kept short.
        view, bucket = self._buffers.views[index], self._buffers.bucket_of.get(index)
        is_host = backend_of(view.device).is_host
        used, awaited, have_fired = self.used, self._awaited, self._fired
        take, launch_ready = self._firsts.take, self._sums.launch_ready

        def fired(parameter: Tensor) -> None:
            used.add(index)
            if index in awaited:
                awaited.remove(index)
                take(parameter, view, is_host)
            if self._is_armed:
                if index in have_fired:
                    raise came_twice(self._names[index])
                have_fired.add(index)
                if bucket is not None:  # else it has no numbers
                    bucket.num_ready += 1
                    if bucket.num_ready == len(bucket.parameters):
                        bucket.last = index
                        launch_ready()

        return fired

    # A hook for each bucket

    def _learn(self) -> None:
        """After a step's passes, note whether each bucket was complete when its last one came."""
        if not self._learns or self.num_misses >= MOST_MISSES:
            return
        in_time = all(bucket.is_ready for bucket in self._buffers.buckets)
        if self._is_lean and not in_time:
            self.num_misses += 1
        self._has_learned = in_time

    def _choose_hooks(self) -> None:
        """Let all parameters have hooks in this step, or only those that need one."""
        self._learns = False
        if self._is_lean and not self._is_single:
            self.num_misses += 1
            self._has_learned = False
        if self._has_learned == self._is_lean:
            return
        self._hooks.remove()
        self._is_lean = self._has_learned
        if self._is_lean:
            self._watch_few()
        else:
            self._watch_all()

    def _watch_few(self) -> None:
        for bucket in self._buffers.buckets:
            for index in bucket.parameters:
                if index == bucket.last:
                    self._hooks.add(self._parameters[index], self._closing_hook(bucket))
                elif self._is_large(index):
                    self._hooks.add(self._parameters[index], self._large_hook(index, bucket))

    def _is_large(self, index: int) -> bool:
        view = self._buffers.views[index]
        return backend_of(view.device).is_host and view.nbytes >= LARGE_BYTES

    def _closing_hook(self, bucket: Bucket) -> GradientHook:
        """The hook that comes after a bucket's other gradients; else it changes nothing."""
        parameters = [self._parameters[index] for index in bucket.parameters]
        awaited = self._awaited

        def closed(_: Tensor) -> None:
            if not self._is_armed:
                return
            if None in {*map(_gradient, parameters)}:
                return
            if bucket.is_ready:
                raise came_twice(self._names[bucket.last])
            self._check_versions()
            self._take_all([index for index in bucket.parameters if index in awaited])
            bucket.num_ready = len(parameters)
            self._versions[bucket.place[0]] = 0
            self._sums.launch_ready()
            self._note_versions()

        return closed

    def _large_hook(self, index: int, bucket: Bucket) -> GradientHook:
        """A hook that writes a large gradient at once."""
        view, number = self._buffers.views[index], bucket.place[0]
        flat, versions = self._buffers.flats[number], self._versions
        used, awaited, take = self.used, self._awaited, self._firsts.take

        def came(parameter: Tensor) -> None:
            if not self._is_armed:
                return
            if index not in awaited or versions.get(number, flat._version) != flat._version:
                raise came_twice(self._names[index])
            used.add(index)
            awaited.remove(index)
            take(parameter, view, True)
            versions[number] = flat._version

        return came

    def _note_versions(self) -> None:
        """Note the state of the buffers that hold gradients: only this object changes them."""
        for number in self._versions:
            self._versions[number] = self._buffers.flats[number]._version

    def _check_versions(self) -> None:
        """Refuse a gradient that was added after its bucket was complete: it may be on its way.

        Raises:
            TargetError: There is one.
        """
        for number, version in self._versions.items():
            if self._buffers.flats[number]._version != version:
                raise came_twice("a parameter")
