"""Gradients summed over the workers that hold a parameter, while the last backward passes run.

A bucket holds the gradients of some parameters of a stage; each gradient is a view of the bucket's
buffer. A bucket's sum starts as soon as its last gradient of the step is there: during the stage's
backward pass of its last microbatch. Buckets with a parameter that no pass has used are summed
after the passes. On accelerators collectives run on streams of their own, and no host waits.

Every worker starts its sums in one order: stages from the last to the first, in a stage from its
last parameter to its first, and weights of several stages at the end. So no two workers can wait
for each other, and a sum adds in the same order in every run.

Where the replicas of a stage have unlike tensor degrees, whole gradients are summed, and a worker
may hold only parts of them. The buffers of such sums are freed when the sums are done.

Where replicas share gradients (ZeRO-2), a sum goes only to the worker that updates the parameter,
which takes half as many bytes. The other workers' gradients are freed then, until the next step.

Hooks of the parameters tell when gradients have come. Between kernels, where Python's code is not
in the caches, a hook takes several times as long as elsewhere. So a stage's parameters have hooks
only in its first backward pass of a step, which puts gradients into the buffers, and in its last.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...devices.backend import backend_of
from ...schema.schedule import FREEING, Operation
from .. import peers
from ..gradients import FirstGradients, Hooks, came_twice, layout_of, view_like
from .ownership import Holders, Ownership, in_buckets

LEAST_BUCKET_BYTES = 1 << 20
"""Buckets of fewer bytes are not made for the sake of overlap; each costs a collective."""
BUCKETS_OF_STAGE = 4
"""The number of buckets into which a small stage's gradients are cut."""
MOST_LENT = 2
"""How many buffers of whole gradients, of which this worker holds parts, may exist at once."""
_NO_STAGE = -1
_FEW_PASSES = 2  # in a step: each is a stage's first or its last

Hook = Callable[[Tensor], None]
Flags = Sequence[float]
"""[parameters] of each, a positive number if some worker has a gradient of it."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter's place in a bucket."""

    name: str
    parameter: nn.Parameter  # what this worker holds of it
    start: int  # where its gradient begins in the bucket's buffer
    whole: torch.Size  # the shape of the gradient that is summed
    contributes: bool  # whether this worker's gradient counts in the sum


@dataclass(slots=True)
class _Bucket:
    """Gradients that one collective sums."""

    slots: list[_Slot]
    group: dist.ProcessGroup  # the process group of the sum
    owner: int | None  # the only rank that gets the sum; None: all do
    stages: tuple[int, ...]  # the stages that use the parameters
    # [slots] the gradients' places in the buffer; none where they are only lent one.
    views: list[Tensor]
    flat: Tensor | None  # while there is one
    # [slots] to call when a parameter's gradient has come.
    hooks: list[Hook] = field(default_factory=list)
    watching: Hooks = field(default_factory=Hooks)  # the hooks, while the parameters have them
    num_missing: int = 0  # how many gradients of the stages' last passes have not come
    is_launched: bool = False  # whether the step's sum was started
    work: peers.Transfer | None = None  # the sum under way

    @property
    def is_in_place(self) -> bool:
        """Whether all gradients are in their places in a buffer that the bucket keeps."""
        return bool(self.views) and all(
            slot.parameter.grad is view for slot, view in zip(self.slots, self.views, strict=True)
        )

    def watch(self) -> None:
        if not self.watching:
            for slot, hook in zip(self.slots, self.hooks, strict=True):
                if slot.parameter.requires_grad:
                    self.watching.add(slot.parameter, hook)

    def unwatch(self) -> None:
        self.watching.remove()


class ReplicaSums:
    """Sums gradients over the workers that hold a parameter.

    A step is ``begin``, the passes, with each backward pass between ``enter`` and ``leave``, and
    ``finish``. Before ``finish`` a parameter without ``grad`` was used by no pass of this worker.

    Args:
        group_of: The process group of each set of ranks with several members.
        told: Says which parameters have a gradient on some worker. None: the buckets carry that.
        owners: Name -> the only rank that gets a parameter's sum; others give it to all.
        overlaps: Whether sums start during backward passes.
        left_out: Names of the parameters that are summed elsewhere (``shares.py``).

    Attributes:
        given: Names of the parameters whose gradients of this step another worker has now.
    """

    def __init__(
        self,
        ownership: Ownership,
        rank: int,
        group_of: Mapping[Holders, dist.ProcessGroup],
        told: Callable[[Sequence[str]], Flags] | None,
        owners: Mapping[str, int],
        *,
        overlaps: bool,
        left_out: Collection[str] = (),
    ) -> None:
        self._ownership, self._rank, self._told = ownership, rank, told
        self._group_of, self._owners, self._overlaps = group_of, owners, overlaps
        sets = {name: ownership.sum_of(name, rank) for name in ownership.parameters}
        self._sets = {
            name: ranks
            for name, ranks in sets.items()
            if ranks in group_of and name not in left_out
        }
        self._held = [ownership.parameters[name] for name in self._sets]
        self._layout: tuple[object, ...] | None = None
        self._buckets: list[_Bucket] = []
        self._firsts = FirstGradients()
        self._operations: Sequence[Operation] | None = None
        self._first: dict[int, Operation] = {}  # by stage, the backward pass that begins the step
        self._last: dict[int, Operation] = {}  # by stage, the backward pass that ends the step
        # By stage, the buckets whose parameters have no hooks between the two; those of this pass.
        self._resting: dict[int, list[_Bucket]] = {}
        self._to_rest: Sequence[_Bucket] = ()
        self._armed, self._holds_back = _NO_STAGE, False
        self._awaited: set[str] = set()  # whose first gradient of the step has not come
        self._num_launched = 0
        self._lent: deque[_Bucket] = deque()
        self.given: set[str] = set()

    def begin(self, operations: Sequence[Operation]) -> None:
        """Start a step of these operations. No parameter may have a gradient."""
        self._rebuild_if_changed()
        if operations is not self._operations:
            self._take(operations)
        for bucket in self._buckets:
            num_last = sum(stage in self._last for stage in bucket.stages)
            bucket.num_missing = num_last * len(bucket.slots)
            bucket.is_launched = False
            bucket.watch()
        self._armed, self._num_launched, self._to_rest = _NO_STAGE, 0, ()
        self._awaited.update(s.name for b in self._buckets if b.views for s in b.slots)
        self._firsts.begin()
        self._lent.clear()
        self.given.clear()

    def _take(self, operations: Sequence[Operation]) -> None:
        passes = [op for op in operations if op.kind in FREEING]
        self._operations = operations
        # A later entry of a comprehension replaces an earlier one, so the order chooses.
        self._first = {op.stage: op for op in reversed(passes)}
        self._last = {op.stage: op for op in passes}
        self._resting = {
            stage: [bucket for bucket in self._buckets if bucket.stages == (stage,)]
            for stage, number in Counter(op.stage for op in passes).items()
            if number > _FEW_PASSES
        }

    def enter(self, operation: Operation, *, is_stretched: bool) -> None:
        """Begin a backward pass, or a half of one that makes gradients of parameters.

        ``is_stretched``: an emulated device makes it longer, and its gradients count as ready when
        it ends.
        """
        stage = operation.stage
        if self._last.get(stage) is operation:
            for bucket in self._resting.get(stage, ()):
                bucket.watch()
            if self._overlaps:
                self._armed, self._holds_back = stage, is_stretched
        elif self._first.get(stage) is operation:
            self._to_rest = self._resting.get(stage, ())

    def leave(self) -> None:
        """End the pass."""
        self._firsts.write()
        if self._to_rest:
            for bucket in self._to_rest:
                bucket.unwatch()
            self._to_rest = ()
        if self._armed != _NO_STAGE:
            self._armed = _NO_STAGE
            self._launch_ready()

    def finish(self) -> None:
        """Start the sums that have not begun and wait for all; on CUDA, only the stream waits."""
        self._armed = _NO_STAGE
        while self._num_launched < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            self._settle(bucket)

    def apart(self, gradient: Tensor) -> Tensor:
        """An earlier step's gradient, copied if this step would write over it."""
        memory = gradient.untyped_storage().data_ptr()
        shared = any(
            bucket.flat is not None and bucket.flat.untyped_storage().data_ptr() == memory
            for bucket in self._buckets
        )
        return gradient.clone() if shared else gradient

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for bucket in self._buckets:
            bucket.unwatch()
        self._buckets, self._layout, self._operations = [], None, None

    # Buckets

    def _rebuild_if_changed(self) -> None:
        """Make the buckets again if parameters were frozen, unfrozen or cast since last step."""
        layout = layout_of(self._held)
        if layout == self._layout:
            return
        self.close()
        self._buckets, self._layout = self._made(), layout
        for bucket in self._buckets:
            bucket.hooks = [
                self._hook(slot.name, bucket, bucket.views[place] if bucket.views else None)
                for place, slot in enumerate(bucket.slots)
            ]

    def _made(self) -> list[_Bucket]:
        """The buckets in the order of their sums, which all workers share."""
        # From facts that all workers know alike (the script's order of parameters, who holds what),
        # never from the order in which gradients come.
        ownership, position = self._ownership, {}
        families: dict[tuple[object, ...], list[str]] = {}
        for place, name in enumerate(reversed(ownership.parameters)):
            parameter, stages = ownership.parameters[name], ownership.stages[name]
            # Weights of several stages are complete late, and those of no stage never.
            kind_of_use = min(len(stages), 2) if stages else 3
            position[name] = (kind_of_use, [-stage for stage in stages], place)
            if name in self._sets and parameter.requires_grad:
                kind = (parameter.dtype, parameter.device, self._owners.get(name))
                # What one collective can sum: of the same workers, in one memory, ready together.
                family = (stages, self._sets[name], self._is_lent(name), *kind)
                families.setdefault(family, []).append(name)
        found = [
            bucket
            for names in families.values()
            for bucket in in_buckets(names, self._summed_bytes, self._bucket_bytes(names))
        ]
        return [self._bucket(b) for b in sorted(found, key=lambda names: position[names[-1]])]

    def _bucket_bytes(self, names: Sequence[str]) -> int:
        """The most bytes of a bucket of these parameters, equal on all workers of the sum."""
        device = self._ownership.parameters[names[0]].device
        # Of what is summed, not of what is held: a worker that holds parts must cut alike.
        total = sum(self._summed_bytes(name) for name in names)
        most = backend_of(device).bucket_bytes
        return min(most, max(LEAST_BUCKET_BYTES, -(-total // BUCKETS_OF_STAGE)))

    def _is_lent(self, name: str) -> bool:
        """Whether whole gradients are summed of which some workers hold parts."""
        lanes, holders = self._ownership.lanes, self._ownership.holders[name]
        return lanes.adds_whole(name, holders) and lanes.is_told_by_parts(name, holders)

    def _summed_shape(self, name: str) -> torch.Size:
        lanes, ownership = self._ownership.lanes, self._ownership
        if lanes.adds_whole(name, ownership.holders[name]):
            return ownership.shapes[name]
        return ownership.parameters[name].shape

    def _summed_bytes(self, name: str) -> int:
        return self._summed_shape(name).numel() * self._ownership.parameters[name].element_size()

    def _bucket(self, names: Sequence[str]) -> _Bucket:
        ownership, start = self._ownership, 0
        slots: list[_Slot] = []
        for name in names:
            shape = self._summed_shape(name)
            adds_whole = ownership.lanes.adds_whole(name, ownership.holders[name])
            counts = not adds_whole or ownership.lanes.contributes(name, self._rank)
            slots.append(_Slot(name, ownership.parameters[name], start, shape, counts))
            start += shape.numel()
        group, owner = self._group_of[self._sets[names[0]]], self._owners.get(names[0])
        made = _Bucket(slots, group, owner, ownership.stages[names[0]], [], None)
        is_part = names[0] in ownership.cut and self._is_lent(names[0])
        if not is_part and owner in (None, self._rank):
            made.flat = self._buffer(made)
            made.views = [view_like(made.flat, slot.start, slot.parameter) for slot in slots]
        return made

    def _buffer(self, bucket: _Bucket) -> Tensor:
        """Memory for a bucket's gradients, and behind them one flag each if it carries these."""
        last = bucket.slots[-1]
        length = last.start + last.whole.numel()
        num_flags = len(bucket.slots) if self._told is None else 0
        return last.parameter.new_empty(length + num_flags)

    # During the passes

    def _hook(self, name: str, bucket: _Bucket, view: Tensor | None) -> Hook:
        # It runs between kernels, where Python's code is not in the caches, so it is kept short.
        stages, awaited, take = bucket.stages, self._awaited, self._firsts.take
        is_host = view is not None and backend_of(view.device).is_host

        def fired(parameter: Tensor) -> None:
            if view is not None and name in awaited and take(parameter, view, is_host):
                awaited.remove(name)
            if bucket.is_launched:
                raise came_twice(name)
            if self._armed in stages:
                # If one comes twice, the bucket is launched too early, and the next one finds that.
                bucket.num_missing -= 1
                if bucket.num_missing == 0 and not self._holds_back:
                    self._launch_ready()

        return fired

    # Sums

    def _launch_ready(self) -> None:
        while self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            # One that is not ready holds up those behind it: all workers start sums in one order.
            if bucket.num_missing or not any(stage in self._last for stage in bucket.stages):
                return
            # For its buffer the host may wait for a sum that other stages begin only after this
            # worker's pass, whose gradients they need.
            if not bucket.views and len(bucket.stages) > 1:
                return
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._num_launched]
        self._num_launched += 1
        self._firsts.write()
        with torch.no_grad():
            flat = self._filled(bucket)
        bucket.is_launched = True
        if bucket.owner is None:
            bucket.work = peers.all_reduce(flat, group=bucket.group, async_op=True)
        else:
            bucket.work = peers.reduce(flat, bucket.owner, group=bucket.group, async_op=True)

    def _filled(self, bucket: _Bucket) -> Tensor:
        """The bucket's buffer with what this worker contributes."""
        gradients = [slot.parameter.grad for slot in bucket.slots]
        # Lent for this sum. Whole gradients are larger than the parts that this worker keeps, so at
        # most ``MOST_LENT`` exist: the oldest is waited for, which all workers started first.
        if bucket.flat is None:
            while len(self._lent) >= MOST_LENT:
                self._settle(self._lent.popleft())
            self._lent.append(bucket)
            bucket.flat = self._buffer(bucket)
        flat = bucket.flat
        # Flags in the gradients' own type, behind them: added up by the same sum. A host tensor is
        # copied to the device only in the rare step where some gradient is missing.
        if self._told is None:
            flags = flat[-len(gradients) :]
            if any(gradient is None for gradient in gradients):
                flags.copy_(flags.new_tensor([float(g is not None) for g in gradients]))
            else:
                flags.fill_(1.0)
        if not bucket.views:
            for slot, gradient in zip(bucket.slots, gradients, strict=True):
                place = _place_of(slot, flat)
                is_part = gradient is not None and gradient.shape != slot.whole
                if gradient is None or is_part or not slot.contributes:
                    place.zero_()  # where others contribute
                if gradient is not None and is_part:
                    self._ownership.lanes.put(slot.name, gradient, place, self._rank)
                elif gradient is not None and slot.contributes:
                    place.copy_(gradient)
            return flat
        cleared = []
        for slot, gradient, view in zip(bucket.slots, gradients, bucket.views, strict=True):
            if gradient is None or not slot.contributes:
                cleared.append(view)
            elif gradient is not view:
                view.copy_(gradient)
        if cleared:
            torch._foreach_zero_(cleared)
        return flat

    def _settle(self, bucket: _Bucket) -> None:
        """Wait for a sum, and make it the parameters' gradients."""
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
        flat, lanes = bucket.flat, self._ownership.lanes
        if flat is None:  # done before, and the buffer was given back
            return
        # Another worker updates these: memory and gradients go at once, which is ZeRO-2's saving.
        if bucket.owner not in (None, self._rank):
            bucket.flat = None
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    self.given.add(slot.name)
                    slot.parameter.grad = None
            return
        if bucket.is_in_place:
            return
        for place, (slot, flag) in enumerate(zip(bucket.slots, self._flags(bucket), strict=True)):
            # No worker has one: it stays None, so that an optimizer leaves the parameter alone, as
            # in one process. A zero would decay weights and momentum.
            if not flag:
                continue
            if bucket.views:
                slot.parameter.grad = bucket.views[place]
            else:
                slot.parameter.grad = lanes.part(slot.name, _place_of(slot, flat), self._rank)
        if not bucket.views:
            bucket.flat = None

    def _flags(self, bucket: _Bucket) -> Flags:
        # Whoever has a gradient itself knows that one exists, and need not wait for the sum.
        if all(slot.parameter.grad is not None for slot in bucket.slots):
            return [1.0] * len(bucket.slots)
        if self._told is not None:
            return self._told([slot.name for slot in bucket.slots])
        assert bucket.flat is not None
        found: list[float] = bucket.flat[-len(bucket.slots) :].tolist()
        return found


def _place_of(slot: _Slot, flat: Tensor) -> Tensor:
    return flat[slot.start : slot.start + slot.whole.numel()].view(slot.whole)
