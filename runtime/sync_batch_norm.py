"""SyncBatchNorm under a split plan: the statistics of the whole global batch.

A worker runs all its virtual nodes in one pass. Each layer gathers every worker's count, mean and
sum of squared deviations, and combines them in order of ranks (Chan et al. 1979), so all workers
have the same bits. The backward pass sums the two terms by which other samples enter a gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..schema.errors import TargetError
from .group import Place, gathered

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
