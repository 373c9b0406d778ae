"""SyncBatchNorm under a split plan: the statistics of the whole global batch.

A worker runs all its virtual nodes in one pass. Each layer gathers every worker's count, mean and
sum of squared deviations, and combines them in order of ranks (Chan et al. 1979), so all workers
have the same bits. The backward pass sums the two terms by which other samples enter a gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..devices.collectives import wire_device
from ..schema.errors import TargetError
from . import peers
from .group import Place

Gather = Callable[[Tensor], Tensor]
"""Takes a worker's numbers [n]; gives those of all, [workers, n], in order of ranks."""


def synchronised_norms(model: nn.Module) -> list[nn.SyncBatchNorm]:
    """The layers of a model that normalise over all workers."""
    return [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]


@contextmanager
def over_workers(norms: Sequence[nn.SyncBatchNorm], place: Place) -> Iterator[None]:
    """Let these layers normalise over the samples of all workers in the body.

    Enter it on all workers; each runs one forward and one backward pass in it.
    """
    gather = partial(_gathered, place=place)
    for norm in norms:
        norm.forward = partial(_forward, norm, gather=gather)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def joined(inputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The inputs of several virtual nodes as those of one.

    Args:
        inputs: [virtual nodes] each one's collated samples.
        sizes: [virtual nodes] samples of each.

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


def _gathered(numbers: Tensor, *, place: Place) -> Tensor:
    if not place.distributed:
        return numbers[None]
    sent = numbers.to(wire_device(place.device)).contiguous()
    found = sent.new_empty(place.world_size * len(sent))
    peers.all_gather(found, sent)
    return found.view(place.world_size, -1).to(numbers.device)


def _forward(norm: nn.SyncBatchNorm, x: Tensor, *, gather: Gather) -> Tensor:
    if not norm.training and norm.running_mean is not None:
        return nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )
    y, mean, variance, count = _Normalise.apply(x, norm.weight, norm.bias, norm.eps, gather)  # type: ignore[no-untyped-call]
    if norm.running_mean is not None and norm.running_var is not None:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        new = norm.momentum if norm.momentum is not None else 1 / int(norm.num_batches_tracked)
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), new)
            unbiased = variance * (count / (count - 1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), new)
    return y  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """x [samples, channels, ...] normalised by channel, over all workers' samples."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, gather: Gather
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        own_mean = wide.mean(dims)
        squares = (wide - own_mean.view(shape)).square().sum(dims)
        own_count = wide.new_full((1,), wide.numel() / wide.shape[1])
        count, mean, total = wide.new_zeros(1), 0.0 * own_mean, 0.0 * squares
        for row in gather(torch.cat([own_count, own_mean, squares])):
            n, m, s = row.split([1, len(own_mean), len(own_mean)])
            apart = m - mean
            total = total + s + apart.square() * (count * n / (count + n))
            mean = mean + apart * (n / (count + n))
            count = count + n
        scale = (total / count + eps).rsqrt()
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.gather, ctx.dims, ctx.shape, ctx.has_bias = gather, dims, shape, bias is not None
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
        )
