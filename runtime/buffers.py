"""Buffers such as batch-norm statistics: each virtual node owns its own, or all share one.

Before a pass, the virtual node's buffers are put into the model by reference. A pass that changes
a buffer gives the virtual node its own copy; the other virtual nodes keep theirs. So statistics
belong to the virtual node, not to the device, and memory grows only by the buffers that change.

Evaluation and the final model need one value. A floating-point buffer becomes the mean over the
virtual nodes, weighted by their batch sizes and summed in order of virtual nodes. Other buffers
(such as counts of batches) take virtual node 0's value. Every mapping gives the same bits. If the
script writes a buffer between steps, all virtual nodes use the new value from then on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..schema.errors import TargetError
from . import peers
from .group import Place, gathered
from .log import log
from .nested_tensors import byte_view

AllReduce = Callable[[Tensor], object]


class BufferSlot:
    """One buffer: its places in the model, its shared value, and each virtual node's own copy."""

    def __init__(self, name: str, owners: Sequence[tuple[nn.Module, str]]) -> None:
        self.name, self.owners = name, owners
        value = self.current()
        self.base = value.detach().clone()
        self.shared = value
        self.own: dict[int, Tensor] = {}
        self.left = value
        self.version = value._version
        # Batch-norm's kernels write its statistics without increasing the tensor's version.
        self.writes_silently = any(isinstance(module, _NormBase) for module, _ in owners)
        self.checked = False

    @property
    def is_persistent(self) -> bool:
        """Whether it is part of the model's ``state_dict``."""
        module, key = self.owners[0]
        return key not in module._non_persistent_buffers_set

    def current(self) -> Tensor:
        """The value that is in the model now."""
        module, key = self.owners[0]
        value = module._buffers[key]
        assert value is not None
        return value

    def install(self, value: Tensor) -> None:
        """Put a value into the model, at every place where the buffer is registered."""
        for module, key in self.owners:
            module._buffers[key] = value
        self.left, self.version = value, value._version

    def was_written(self) -> bool:
        """Whether it was written to since it was put into the model."""
        current = self.current()
        return current is not self.left or current._version != self.version

    def was_changed_by_pass(self) -> bool:
        """Whether the pass that just ended has changed it."""
        if not self.checked:
            # Other modules may write as batch-norm does, so the first pass compares values.
            self.checked = True
            current = self.current()
            same = current.shape == self.base.shape and torch.equal(current, self.base)
            self.writes_silently = self.writes_silently or not same
        return self.writes_silently or self.was_written()

    def value_of(self, node: int) -> Tensor:
        """A virtual node's value: its own copy if it has one, else the shared value."""
        return self.own.get(node, self.base)


class Follower(Protocol):
    """Keeps copies of all virtual nodes' buffers; it is told of changes made outside of passes."""

    def rewrite(self, written: Sequence[BufferSlot]) -> None:
        """Take the shared values of buffers that the script wrote between steps."""

    def reset(self, state: dict[str, Any]) -> None:
        """Replace all copies by a state in the form of ``VirtualNodeBuffers.capture``."""


class VirtualNodeBuffers:
    """The buffers of a model, one set for each virtual node of this device.

    Attributes:
        is_merged: Whether the model now has what all virtual nodes have together, not one's own
            values.
    """

    def __init__(
        self,
        model: nn.Module,
        local: Sequence[int],
        batch_sizes: Sequence[int],
        slots: "list[BufferSlot] | None" = None,
    ) -> None:
        """Take the model, this device's virtual nodes, and all virtual nodes' batch sizes.

        ``slots`` are the buffers that this worker holds; by default all of the model's, where there
        are several virtual nodes.
        """
        self._model = model
        self._local = tuple(local)
        self._batch_sizes = tuple(batch_sizes)
        # A lone virtual node needs no slots: its buffers are the model's.
        self._is_alone = slots is None and len(batch_sizes) <= 1
        if slots is None:
            places = {} if self._is_alone else buffer_places(model)
            slots = [BufferSlot(*entry) for entry in places.items()]
        self.slots = slots
        self._follower: Follower | None = None
        self.is_merged = True

    def all(self) -> dict[str, Tensor]:
        """All buffers of the model by name; of those that only other workers hold, stand-ins."""
        named = {slot.name: slot.base for slot in self.slots}
        return named or dict(self._model.named_buffers())

    @property
    def names(self) -> set[str]:
        """The names of the buffers that this worker holds."""
        return set(self.all())

    def follow(self, follower: Follower) -> None:
        """Tell ``follower`` of every change made outside of passes."""
        self._follower = follower

    def begin_step(self) -> None:
        """Share what the script wrote since the last pass with all virtual nodes."""
        written = [slot for slot in self.slots if slot.was_written()]
        for slot in written:
            value = slot.current()
            slot.base, slot.shared = value.detach().clone(), value
            slot.own.clear()
            slot.install(value)
        if written and self._follower is not None:
            self._follower.rewrite(written)

    def move(self, local: Sequence[int], state: dict[str, Any]) -> None:
        """Run other virtual nodes from now on; ``state`` is in the form of ``capture``."""
        self._local = tuple(local)
        self._take(state)

    def load(self, node: int) -> None:
        """Put a virtual node's buffers into the model."""
        for slot in self.slots:
            slot.install(slot.own.get(node, slot.shared))

    def save(self, node: int) -> None:
        """Keep the buffers that a virtual node's pass changed."""
        for slot in self.slots:
            if not slot.was_changed_by_pass():
                continue
            current = slot.current()
            current = current.detach() if current.requires_grad else current
            # The pass wrote into the shared value: that becomes this node's own, and the others get
            # a new one. A copy is so made only for a node's first change, never for each step.
            if slot.left is slot.shared and current.data_ptr() == slot.shared.data_ptr():
                slot.shared = slot.base.clone()
            slot.own[node] = current
            slot.install(current)
            self.is_merged = self.is_merged and not slot.is_persistent

    def merged(self, all_reduce: AllReduce | None) -> dict[str, Tensor]:
        """The merged value, by name, of each buffer that a pass has changed, equal on every worker.

        ``all_reduce`` sums a tensor in place over the workers; None for a single worker.
        """
        if not self.slots:
            return {}
        device = self.slots[0].base.device
        flags = torch.tensor([float(bool(slot.own)) for slot in self.slots], device=device)
        if all_reduce is not None:
            all_reduce(flags)
        changed = [s for s, flag in zip(self.slots, flags.tolist(), strict=True) if flag]
        return {slot.name: self._merged(slot, all_reduce) for slot in changed}

    def install(self, merged: dict[str, Tensor]) -> None:
        """Put merged buffers into the model; virtual nodes keep their own copies."""
        for slot in self.slots:
            if slot.name in merged:
                slot.install(merged[slot.name].to(slot.base.device))
        self.is_merged = True

    def capture(self, holders: Sequence[int], distributed: bool) -> dict[str, Any]:
        """Every virtual node's buffers, on every worker, as a checkpoint keeps them.

        ``holders`` are [virtual nodes] the rank that holds each.
        """
        self.begin_step()
        if not self.slots:
            return {"base": dict(self._model.named_buffers()), "nodes": []}
        nodes = []
        # A broadcast for each node, of all its buffers as bytes. Who does not hold the node sends
        # nothing, but has a vector of the right length to receive into.
        for node, holder in enumerate(holders):
            packed = torch.cat([byte_view(slot.value_of(node)) for slot in self.slots])
            if distributed:
                peers.broadcast(packed, src=holder)
            nodes.append(self._unpacked(packed))
        return {"base": {slot.name: slot.base for slot in self.slots}, "nodes": nodes}

    def _unpacked(self, packed: Tensor) -> dict[str, Tensor]:
        """The buffers of which a virtual node has its own copy, by name."""
        found, at = {}, 0
        for slot in self.slots:
            size = slot.base.numel() * slot.base.element_size()
            # A clone starts at an aligned address; a slice of the bytes may not.
            flat = packed[at : at + size].clone().view(slot.base.dtype)
            value, at = flat.reshape(slot.base.shape), at + size
            if not torch.equal(value, slot.base):
                found[slot.name] = value
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Take buffers back from ``capture``; the mapping may be another one."""
        self._take(state)
        if self._follower is not None:
            self._follower.reset(state)

    def _take(self, state: dict[str, Any]) -> None:
        if self._is_alone:
            with torch.no_grad():
                for name, value in self._model.named_buffers():
                    value.copy_(state["base"][name])
        for slot in self.slots:
            device = slot.base.device
            slot.base = state["base"][slot.name].to(device, copy=True)
            slot.shared = slot.base.clone()
            slot.own = {
                node: state["nodes"][node][slot.name].to(device, copy=True)
                for node in self._local
                if slot.name in state["nodes"][node]
            }
            slot.install(slot.shared)
        self.is_merged = not any(slot.own and slot.is_persistent for slot in self.slots)

    def _merged(self, slot: BufferSlot, all_reduce: AllReduce | None) -> Tensor:
        if not slot.base.is_floating_point():
            return self._of_first_node(slot, all_reduce)
        rows = torch.zeros(
            (len(self._batch_sizes), slot.base.numel()),
            dtype=torch.float64,
            device=slot.base.device,
        )
        for node in self._local:
            rows[node] = slot.value_of(node).reshape(-1).double()
        if all_reduce is not None:
            # Each row has one worker's values and zeros from the others: exact in any order.
            all_reduce(rows)
        # In order of nodes and not of workers: the same bits whoever runs them.
        mean, total = torch.zeros_like(rows[0]), sum(self._batch_sizes)
        for row, size in zip(rows, self._batch_sizes, strict=True):
            mean += row * (size / total)
        return mean.to(slot.base.dtype).reshape(slot.base.shape)

    def _of_first_node(self, slot: BufferSlot, all_reduce: AllReduce | None) -> Tensor:
        # Counters and flags have no mean. Node 0's value reaches all by a sum with zeros, in a type
        # that every library sums.
        real = torch.view_as_real(slot.base) if slot.base.is_complex() else slot.base
        wide = torch.float64 if slot.base.is_complex() else torch.int64
        value = torch.zeros_like(real, dtype=wide)
        if 0 in self._local:
            own = slot.value_of(0)
            value.copy_(torch.view_as_real(own) if own.is_complex() else own)
        if all_reduce is not None:
            all_reduce(value)
        narrow = value.to(real.dtype)
        return torch.view_as_complex(narrow) if slot.base.is_complex() else narrow


_SAVED: WeakKeyDictionary[nn.Module, VirtualNodeBuffers] = WeakKeyDictionary()
"""Models whose ``state_dict`` may hold one virtual node's buffers, until the first that does."""


def warn_of_saving(model: nn.Module, buffers: VirtualNodeBuffers) -> None:
    """Warn once if the script reads ``model.state_dict()`` while its buffers are not merged.

    The class is changed, because a hook of the model itself would go with its copies and pickles.
    """
    if not buffers.slots:
        return
    _SAVED[model] = buffers
    original = nn.Module.state_dict
    if getattr(original, "warns", False):
        return

    @wraps(original)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = _SAVED.get(self)
        if held is not None and not held.is_merged:
            del _SAVED[self]
            log.warning(
                "model.state_dict() is read between steps: its buffers (running statistics of "
                "batch norm) are those of one virtual node; call job.sync_buffers() on all "
                "workers before, or read it inside job.evaluation()"
            )
        return original(self, *args, **kwargs)

    state_dict.warns = True  # type: ignore[attr-defined]
    nn.Module.state_dict = state_dict  # type: ignore[method-assign]


def buffer_places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Every buffer of a model once, in order of registration: by its name, all its places."""
    found: dict[int, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for key, value in module._buffers.items():
            if value is not None:
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(value), (name, []))[1].append((module, key))
    return dict(found.values())


@contextmanager
def buffers_apart(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules copies of their buffers for a while; what is written to them is dropped."""
    held = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        # Other stages' buffers of a pipeline have no values here, and refuse to be read.
        if buffer is not None and not getattr(type(buffer), "is_refusing", False)
    ]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in held}
    for module, name, buffer in held:
        module._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        put_back(held)


def put_back(held: Iterable[tuple[nn.Module, str, Tensor | None]]) -> None:
    """Give modules their buffers back: (module, name, buffer) of each."""
    for module, name, buffer in held:
        module._buffers[name] = buffer


# SyncBatchNorm under a split plan: the statistics of the whole global batch.
#
# A worker runs all its virtual nodes in one pass. Each layer gathers every worker's count, mean and
# sum of squared deviations, and combines them in order of ranks (Chan et al. 1979), so all workers
# have the same bits. The backward pass sums the two terms by which other samples enter a gradient.


Gather = Callable[[Tensor], Tensor]
"""Takes a worker's numbers [n]; gives those of all, [workers, n], in order of ranks."""


class NormCall(NamedTuple):
    """The arguments of ``torch.nn.functional.batch_norm``: there all batch norms end."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


@contextmanager
def over_workers(norms: Sequence[nn.SyncBatchNorm], place: Place) -> Iterator[None]:
    """Let these layers normalise over the samples of all workers in the body.

    Enter it on all workers; each runs one forward and one backward pass in it.
    """
    gather = partial(gathered, place=place)
    for norm in norms:
        norm.forward = partial(_forward, norm, gather=gather)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def joined(inputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The inputs [virtual nodes] of several virtual nodes, of so many samples, as those of one.

    Raises:
        TargetError: They are no tensors with a row for each sample.
    """
    if len(inputs) == 1:
        return inputs[0]
    flat = [tree_flatten(entry) for entry in inputs]
    is_rows = all(
        isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size
        for (leaves, _), size in zip(flat, sizes, strict=True)
        for leaf in leaves
    )
    try:
        if is_rows:
            columns = zip(*(leaves for leaves, _ in flat), strict=True)
            return tree_unflatten([torch.cat(column) for column in columns], flat[0][1])
    except (RuntimeError, ValueError):  # unlike shapes or trees
        pass
    raise TargetError(
        "with SyncBatchNorm a worker runs its whole share of a batch at once, and these samples "
        "are no tensors with a row of one shape for each sample",
        hint="collate to fixed shapes, or use BatchNorm",
    )


def _forward(norm: nn.SyncBatchNorm, x: Tensor, *, gather: Gather) -> Tensor:
    if not norm.training and norm.running_mean is not None:
        return nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )
    momentum = norm.momentum
    if norm.running_mean is not None:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        momentum = momentum if momentum is not None else 1 / int(norm.num_batches_tracked)
    return normalised(
        x,
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        momentum=momentum or 0.0,
        eps=norm.eps,
        gather=gather,
    )


def normalised(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    momentum: float,
    eps: float,
    gather: Gather,
    counts: bool = True,
) -> Tensor:
    """Normalise by the statistics of all workers, and move the running ones; call it on all.

    Args:
        x: [samples, channels, ...] this worker's samples.
        running_mean: [channels], changed in place; None where it is not tracked.
        running_var: [channels], likewise.
        weight: [channels] the factor after; None is 1.
        bias: [channels] the term after; None is 0.
        momentum: What the batch counts in the running statistics.
        eps: What is added to the variance.
        gather: Gathers the workers' numbers.
        counts: Whether these samples count; a worker without any runs one that does not.
    """
    y, mean, variance, count = _Normalise.apply(x, weight, bias, eps, gather, counts)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return y  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """x [samples, channels, ...] normalised by channel, over all workers' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        gather: Gather,
        counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        own_mean = wide.mean(dims)
        squares = (wide - own_mean.view(shape)).square().sum(dims)
        own_count = wide.new_full((1,), wide.numel() / wide.shape[1])
        own = torch.cat([own_count, own_mean, squares])
        count, mean, total = wide.new_zeros(1), own_mean.new_zeros(()), own_mean.new_zeros(())
        for row in gather(own if counts else torch.zeros_like(own)):
            n, m, s = row.split([1, len(own_mean), len(own_mean)])
            apart, both = m - mean, (count + n).clamp(min=1)  # the first workers may have none
            total = total + s + apart.square() * (count * n / both)
            mean = mean + apart * (n / both)
            count = count + n
        scale = (total / count + eps).rsqrt()
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.gather, ctx.dims, ctx.shape, ctx.has_bias = gather, dims, shape, bias is not None
        ctx.counts = counts
        y = normal if weight is None else normal * weight.view(shape)
        y = y if bias is None else y + bias.view(shape)
        variance = total / count
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, scale, weight, count = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        if not ctx.counts:  # it may hold what is no number, which no factor of 0 removes
            wide, normal = torch.zeros_like(wide), torch.zeros_like(normal)
        of_bias, of_weight = wide.sum(ctx.dims), (wide * normal).sum(ctx.dims)
        rows = ctx.gather(torch.cat([of_bias, of_weight]))
        mean, product = (rows.sum(0) / count).view(2, *ctx.shape[1:])[:, None]
        own = wide - mean - normal * product
        own = own * (scale if weight is None else scale * weight).view(ctx.shape)
        return (
            own.to(gradient.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(gradient.dtype if weight is None else weight.dtype)
            if ctx.has_bias
            else None,
            None,
            None,
            None,
        )
