"""The collectives of a tensor-parallel group in a pass: f, g and a gather (thesis 4.2.3).

Each operator is a collective in one direction only: f in backward, g in forward. So a layer that is
cut over a group gives every worker the outputs and gradients of the whole layer. All workers of a
group must run the same passes in the same order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...devices.collectives import is_on_devices
from ...devices.host import TORCH_DEVICE as HOST
from ...schema.errors import TargetError
from ...schema.options import option
from .. import peers


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """A tensor-parallel group, as seen by one of its workers.

    Attributes:
        degree: Number of workers in the group.
        lane: This worker's position in the group, from 0.
        ranks: [degree] the workers' ranks, in order of lanes.
        group: Their process group; None for a single worker.
        keeps_order: Whether sums of tokens add the workers' parts in order of lanes.
    """

    degree: int = 1
    lane: int = 0
    ranks: tuple[int, ...] = ()
    group: dist.ProcessGroup | None = None
    keeps_order: bool = True


_OverGroup = Callable[[Tensor, TensorGroup], Tensor]


def sum_over(value: Tensor, group: TensorGroup) -> Tensor:
    """The sum over the group, in a new tensor; no gradient flows through it."""
    # A copy: a backward function must not write into the gradient that it is given.
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if group.group is not None:
        peers.all_reduce(total, group=group.group)
    return total


def largest_over(value: Tensor, group: TensorGroup) -> Tensor:
    """The elementwise maximum over the group; no gradient flows through it."""
    most = value.detach().clone(memory_format=torch.contiguous_format)
    if group.group is not None:
        peers.all_reduce(most, op=dist.ReduceOp.MAX, group=group.group)
    return most


def joined_over(value: Tensor, group: TensorGroup, size: int) -> Tensor:
    """Join the parts of all workers along the last dimension, to [..., size]; no gradient flows.

    ``value`` is [..., own part]; parts have the sizes that ``torch.tensor_split`` gives.
    """
    if group.group is None:
        return value.detach().clone()
    first, last = bounds(size, group.lane, group.degree)
    most = -(-size // group.degree)
    # The collective needs parts of equal size, so smaller ones are padded.
    own = value.new_zeros((most, *value.shape[:-1]))
    own[: last - first] = value.detach().movedim(-1, 0)
    parts = own.new_empty((group.degree * most, *own.shape[1:]))
    peers.all_gather(parts, own, group=group.group)
    ends = [bounds(size, lane, group.degree) for lane in range(group.degree)]
    shares = [parts[lane * most :][: end - begin] for lane, (begin, end) in enumerate(ends)]
    return torch.cat(shares).movedim(0, -1).contiguous()


def parts_of_all(own: Tensor, group: TensorGroup, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Every worker's part of a tensor, in order of lanes, on the host; no gradient.

    ``shapes`` are [degree] those of their parts.
    """
    found = []
    # One part at a time, so that a device never holds more than its own part and another.
    for lane, (rank, shape) in enumerate(zip(group.ranks, shapes, strict=True)):
        part = own.detach().contiguous() if lane == group.lane else own.new_empty(shape)
        peers.broadcast(part, src=rank, group=group.group)
        found.append(part.to(HOST))
    return found


def gathered_tokens(value: Tensor, group: TensorGroup) -> Tensor:
    """Join the workers' tokens, [..., T/t, C] to [..., T, C]; no gradient flows through it."""
    own = value.detach().contiguous()
    parts = own.new_empty((group.degree, *own.shape))  # [t, ..., T/t, C]
    peers.all_gather(parts.view(-1), own.view(-1), group=group.group)
    return parts.movedim(0, -3).flatten(-3, -2)


def summed_tokens(value: Tensor, group: TensorGroup) -> Tensor:
    """Reduce-scatter tokens over the group, [..., T, C] to [..., T/t, C]; no gradient."""
    *leading, size, channels = value.shape
    split = value.detach().reshape(*leading, group.degree, size // group.degree, channels)
    leaving = split.movedim(-3, 0).contiguous()  # [t, ..., T/t, C]: entry r goes to lane r
    # The library's reduce-scatter adds in an order of its own. Where a level of determinism asks
    # for one order, parts are exchanged as they are, and every worker adds them in order of lanes.
    if not group.keeps_order and is_on_devices(group.group):
        own = torch.empty_like(leaving[0])
        peers.reduce_scatter(own.view(-1), leaving.view(-1), group=group.group)
        return own
    coming = torch.empty_like(leaving)
    peers.all_to_all_single(coming.view(-1), leaving.view(-1), group=group.group)
    return coming.sum(0)


def own_tokens(value: Tensor, group: TensorGroup) -> Tensor:
    """This worker's tokens, [..., T, C] to [..., T/t, C]."""
    size = value.shape[-2] // group.degree
    return value.narrow(-2, group.lane * size, size)


def bounds(size: int, lane: int, degree: int) -> tuple[int, int]:
    """The (start, end) of a worker's part: parts are as equal as possible, larger ones first."""
    part, more = divmod(size, degree)
    first = lane * part + min(lane, more)
    return first, first + part + (lane < more)


def check_length(size: int, degree: int) -> None:
    """Refuse a sequence that does not divide among the workers of a group."""
    if size % degree:
        raise TargetError(
            f"a sequence of {size} tokens does not divide among the {degree} workers of a "
            "tensor-parallel group, as sequence parallelism needs",
            hint=f"give sequences whose length is a multiple of {degree}, or plan without "
            f"{option('sequence_parallel')}",
        )


def copy_to(value: Tensor, group: TensorGroup) -> Tensor:
    """f: the identity in forward; in backward, the gradients are summed over the group."""
    return _exchanged(value, group, lambda given, _: given.view_as(given), sum_over)


def sum_from(value: Tensor, group: TensorGroup) -> Tensor:
    """g: the sum over the group in forward; in backward, the identity.

    The sum is written over ``value``, which nobody else may read.
    """
    return value if group.degree == 1 else _apply(_Sum, value, group)


def join_from(value: Tensor, group: TensorGroup, size: int) -> Tensor:
    """Join the last dimension, to [..., size]; in backward, each worker gets its part."""
    first, last = bounds(size, group.lane, group.degree)
    # No collective: every worker computes on from the whole value, so has its whole gradient.
    return _exchanged(
        value,
        group,
        lambda part, _: joined_over(part, group, size),
        lambda gradient, _: gradient[..., first:last].contiguous(),
    )


def scatter_tokens_to(value: Tensor, group: TensorGroup) -> Tensor:
    """Each worker's tokens of an equal value; in backward, all workers get all tokens' gradient."""
    check_length(value.shape[-2], group.degree)
    return _exchanged(
        value,
        group,
        # A copy: a view would keep all tokens.
        lambda whole, _: own_tokens(whole, group).clone(memory_format=torch.contiguous_format),
        gathered_tokens,
    )


def gather_tokens_from(value: Tensor, group: TensorGroup) -> Tensor:
    """All workers' tokens; in backward, each worker takes its own of an equal gradient."""
    return _exchanged(
        value, group, gathered_tokens, lambda whole, _: own_tokens(whole, group).contiguous()
    )


class SpreadInput:
    """A gathered value and this worker's tokens of it, which column-parallel layers read.

    Only the tokens are kept between the passes. In backward they are gathered again, once for all
    layers that read the value. Their gradients of it are added before one reduce-scatter.

    ``tokens`` are [..., T/t, I], this worker's part of the value.
    """

    def __init__(self, tokens: Tensor, group: TensorGroup) -> None:
        self._tokens, self._readers = tokens, _Readers(tokens.dtype, group)
        self._input: tuple[Any, Tensor] | None = None

    def linear(self, whole: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F with sequence parallelism, and the linear layer behind it, of ``whole`` [..., T, I]."""
        now, readers = recording(), self._readers
        # One node for all layers: autograd adds their gradients before it calls the node. A
        # checkpoint's recomputation makes a node of its own.
        if self._input is None or self._input[0] != now:
            self._input = now, _apply(_ReadTokens, self._tokens, whole.detach(), readers)
        # Detached: the gradient of the value flows through ``_ReadTokens`` alone.
        return _apply(_LinearOfTokens, self._input[1], self._tokens.detach(), weight, bias, readers)


class _Readers:
    """The layers that read a gathered value. It holds no tensor between the passes."""

    def __init__(self, dtype: torch.dtype, group: TensorGroup) -> None:
        self.dtype, self.group = dtype, group
        self._number = self._left = 0
        self._again: Tensor | None = None

    def add(self, dtype: torch.dtype) -> None:
        """Note in a forward pass that a layer, which computes in ``dtype``, needs the value."""
        self.dtype = dtype
        self._number += 1

    def again(self, tokens: Tensor) -> Tensor:
        """[..., T, I] the value again, in a backward pass, where each reader asks once."""
        # Autograd runs equal graphs in equal order, so all workers of the group gather here.
        if self._again is None or self._again.dtype != tokens.dtype:
            self._again, self._left = gathered_tokens(tokens, self.group), self._number
        whole = self._again
        # Freed by the last reader: it is t times as large as what is kept between the passes.
        self._left -= 1
        if self._left <= 0:
            self._again = None
        return whole


def recording() -> Any:
    """How autograd records now; it changes inside a checkpoint."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return torch.is_grad_enabled(), None if hooks is None else hooks(True)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    made: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return made


class SharedInput:
    """F for column-parallel layers side by side that read one value (queries, keys and values).

    They share one f, so each worker adds their gradients before the group sums them, once.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._last: tuple[Tensor, int, Any, Tensor] | None = None

    def copy(self, value: Tensor) -> Tensor:
        """``copy_to``; the same tensor again if the last call had the same value."""
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        if self._last is not None:
            last, version, before, copied = self._last
            # The version counts writes in place: after one, the same tensor is another value.
            if last is value and version == value._version and before == recording():
                return copied
        copied = copy_to(value, self._group)
        self._last = value, value._version, recording(), copied
        return copied

    def forget(self) -> None:
        """Let go of the last value: the layers that read it have run."""
        self._last = None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, group: TensorGroup, exchange: _OverGroup, back: _OverGroup
    ) -> Tensor:
        ctx.group, ctx.back = group, back
        return exchange(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.group), None, None, None


def _exchanged(value: Tensor, group: TensorGroup, exchange: _OverGroup, back: _OverGroup) -> Tensor:
    """Exchange a value over a group, and its gradient by another exchange; each a new tensor."""
    return value if group.degree == 1 else _apply(_Exchange, value, group, exchange, back)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        if group.group is None or not value.is_contiguous():
            return sum_over(value, group)
        # In place: the product is as large as the sum, and nobody reads it.
        ctx.mark_dirty(value)
        peers.all_reduce(value, group=group.group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _ReadTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, whole: Tensor, readers: _Readers) -> Tensor:
        ctx.readers = readers
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        readers = ctx.readers
        sent = gradient.to(readers.dtype)  # under autocast as narrow as the layers compute
        return summed_tokens(sent, readers.group).to(gradient.dtype), None, None


class _LinearOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        tokens: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        readers: _Readers,
    ) -> Tensor:
        made = functional.linear(whole, weight, bias)  # autocast may choose another dtype
        ctx.readers, ctx.dtypes = readers, (whole.dtype, None if bias is None else bias.dtype)
        if ctx.needs_input_grad[2]:
            readers.add(made.dtype)
        ctx.save_for_backward(tokens.to(made.dtype), weight)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        of_whole, of_bias = ctx.dtypes
        wants_whole, _, wants_weight, wants_bias, _ = ctx.needs_input_grad
        into = of_weight = bias = None
        if wants_weight:
            whole = ctx.readers.again(tokens)
            of_weight = (gradient.flatten(0, -2).t() @ whole.flatten(0, -2)).to(weight.dtype)
            del whole  # before the next product, which is as large
        if wants_whole:
            into = (gradient @ weight.to(gradient.dtype)).to(of_whole)
        if wants_bias:
            bias = gradient.flatten(0, -2).sum(0).to(of_bias)
        return into, None, of_weight, bias, None


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Bv: Tensor, targets_B: Tensor, first: int, group: TensorGroup
    ) -> Tensor:
        ctx.dtype = logits_Bv.dtype
        if logits_Bv.dtype in (torch.float16, torch.bfloat16):
            logits_Bv = logits_Bv.float()  # as torch computes it
        # The maximum over the whole vocabulary, so that no exponential overflows. It cancels in the
        # loss, so it needs no gradient.
        most_B = largest_over(logits_Bv.amax(-1), group)
        shares_Bv = logits_Bv - most_B.unsqueeze(-1)
        own_B = targets_B - first
        # A target of another worker's part reads column 0 here, and counts as 0.
        strange_B = (own_B < 0) | (own_B >= logits_Bv.shape[-1])
        own_B = own_B.masked_fill(strange_B, 0).unsqueeze(-1)
        named_B = shares_Bv.gather(-1, own_B).squeeze(-1).masked_fill(strange_B, 0.0)
        # In place from here: one tensor of the logits' size is all that is kept for backward.
        shares_Bv = shares_Bv.exp_()
        # Of ``named_B`` one worker's entry is not 0: the sum is the target's logit itself.
        both_2B = sum_over(torch.stack([shares_Bv.sum(-1), named_B]), group)
        sums_B = both_2B[0]
        shares_Bv = shares_Bv.div_(sums_B.unsqueeze(-1))
        ctx.save_for_backward(shares_Bv, own_B, strange_B)
        return sums_B.log() - both_2B[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_B: Tensor) -> tuple[Tensor, None, None, None]:
        shares_Bv, own_B, strange_B = ctx.saved_tensors
        # The softmax, less 1 at the target, which is in one worker's part. No collective.
        made_Bv = shares_Bv * gradient_B.unsqueeze(-1)
        named_B = gradient_B.masked_fill(strange_B, 0.0).neg().unsqueeze(-1)
        return made_Bv.scatter_add_(-1, own_B, named_B).to(ctx.dtype), None, None, None


# Layers whose weights are cut over a group: each worker calls them with its own part.
#
# Whole inputs and outputs are equal on every worker (thesis 4.2.3). The output of a column-parallel
# layer stays cut, and a row-parallel layer takes it so: no collective is needed between the two.
#
# Shape suffixes: O outputs, I inputs, V vocabulary, C channels, B batch (any leading dimensions);
# ``o``, ``i``, ``v`` are a worker's part.


def column_linear(
    x_BI: Tensor, weight_oI: Tensor, bias_o: Tensor | None, group: TensorGroup
) -> Tensor:
    """A linear layer cut by outputs. Returns [B, o], this worker's outputs."""
    return functional.linear(copy_to(x_BI, group), weight_oI, bias_o)


def row_linear(
    x_Bi: Tensor, weight_Oi: Tensor, bias_O: Tensor | None, group: TensorGroup
) -> Tensor:
    """A linear layer cut by inputs; each worker has its own inputs. Returns [B, O], whole."""
    total_BO = sum_from(functional.linear(x_Bi, weight_Oi), group)
    # After the sum, which would count it once for each worker.
    return total_BO if bias_O is None else total_BO + bias_O


def row_linear_to_tokens(
    x_Bi: Tensor, weight_Oi: Tensor, bias_O: Tensor | None, group: TensorGroup
) -> Tensor:
    """Apply ``row_linear`` with sequence parallelism: this worker's tokens, [..., T/t, O]."""
    # g: a reduce-scatter in forward, an all-gather in backward.
    total = _exchanged(functional.linear(x_Bi, weight_Oi), group, summed_tokens, gathered_tokens)
    # Each worker adds it to its own tokens, so its gradient comes in shares (roles.py).
    return total if bias_O is None else total + bias_O


def joined_linear(
    x_BI: Tensor, weight_oI: Tensor, bias_o: Tensor | None, group: TensorGroup, num_outputs: int
) -> Tensor:
    """A linear layer cut by outputs; the outputs are joined. Returns [B, O], whole."""
    return join_from(column_linear(x_BI, weight_oI, bias_o, group), group, num_outputs)


def vocabulary_embedding(
    ids_B: Tensor,
    weight_vC: Tensor,
    group: TensorGroup,
    *,
    vocabulary: int,
    padding_idx: int | None = None,
) -> Tensor:
    """An embedding cut by vocabulary. Returns [B, C], whole."""
    first, last = bounds(vocabulary, group.lane, group.degree)
    # Ids of another worker's part read row 0 here, and give zeros. So each sum over the group has
    # one term that is not 0, and is exact in any order.
    strange_B = (ids_B < first) | (ids_B >= last)
    own_B = (ids_B - first).masked_fill(strange_B, 0)
    has_padding = padding_idx is not None and first <= padding_idx < last
    padding = padding_idx - first if has_padding and padding_idx is not None else None
    found_BC = functional.embedding(own_B, weight_vC, padding)
    return sum_from(found_BC.masked_fill(strange_B.unsqueeze(-1), 0.0), group)


def vocabulary_cross_entropy(
    logits_Bv: Tensor,
    targets_B: Tensor,
    group: TensorGroup,
    *,
    vocabulary: int,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of logits that are cut by vocabulary.

    Three numbers per sample are exchanged, never the logits (thesis 4.2.3).

    Args:
        logits_Bv: This worker's part of the logits, as ``column_linear`` returns them.
        targets_B: Indices in the whole vocabulary.
        group: The tensor-parallel group.
        vocabulary: Size of the whole vocabulary.
        ignore_index: Targets with this value do not count.
        reduction: ``mean`` over the targets that count, ``sum``, or ``none``.

    Returns:
        [], or [B] for ``none``; equal on every worker.

    Raises:
        IndexError: A target is not in the vocabulary. On a device the loss is then NaN.
    """
    counts_B = targets_B != ignore_index
    unknown_B = counts_B & ((targets_B < 0) | (targets_B >= vocabulary))
    if unknown_B.device.type == HOST and unknown_B.any():
        raise IndexError(f"Target {int(targets_B[unknown_B][0])} is out of bounds.")
    first, _ = bounds(vocabulary, group.lane, group.degree)
    losses_B = _apply(_CrossEntropies, logits_Bv, targets_B, first, group)
    losses_B = losses_B.masked_fill(unknown_B, math.nan).masked_fill(~counts_B, 0.0)
    if reduction == "none":
        return losses_B
    return losses_B.sum() / counts_B.sum() if reduction == "mean" else losses_B.sum()


def sharded_dropout(x: Tensor, probability: float, group: TensorGroup, *, dim: int) -> Tensor:
    """Dropout of a tensor that is cut in one dimension, with the mask of the whole tensor.

    ``x`` is this worker's part; all parts are equally large, and cut in ``dim``. The workers of the
    group must have equal random streams.
    """
    shape = list(x.shape)
    shape[dim] *= group.degree
    # Torch draws in the order of the memory, so the whole tensor is laid out as the part is.
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    laid_out = x.new_ones([shape[d] for d in order])
    ones = laid_out.permute([order.index(d) for d in range(x.dim())])
    mask = functional.dropout(ones, probability)
    # A copy: a view would keep the whole mask for the backward pass.
    return x * mask.narrow(dim, group.lane * x.shape[dim], x.shape[dim]).clone()
