"""Layers whose weights are cut over a group: each worker calls them with its own part.

Whole inputs and outputs are equal on every worker (thesis 4.2.3). The output of a column-parallel
layer stays cut, and a row-parallel layer takes it so: no collective is needed between the two.

Shape suffixes: O outputs, I inputs, V vocabulary, C channels, B batch (any leading dimensions);
``o``, ``i``, ``v`` are a worker's part.
"""

import math

from torch import Tensor
from torch.nn import functional

from ...devices.host import TORCH_DEVICE as HOST
from .operators import (
    TensorGroup,
    bounds,
    copy_to,
    cut_cross_entropies,
    join_from,
    sum_from,
    sum_tokens_from,
)


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
    return total_BO if bias_O is None else total_BO + bias_O


def row_linear_to_tokens(
    x_Bi: Tensor, weight_Oi: Tensor, bias_O: Tensor | None, group: TensorGroup
) -> Tensor:
    """As ``row_linear``, with sequence parallelism. Returns this worker's tokens, [..., T/t, O]."""
    total = sum_tokens_from(functional.linear(x_Bi, weight_Oi), group)
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
    losses_B = cut_cross_entropies(logits_Bv, targets_B, first, group)
    losses_B = losses_B.masked_fill(unknown_B, math.nan).masked_fill(~counts_B, 0.0)
    if reduction == "none":
        return losses_B
    return losses_B.sum() / counts_B.sum() if reduction == "mean" else losses_B.sum()


def sharded_dropout(x: Tensor, probability: float, group: TensorGroup, *, dim: int) -> Tensor:
    """Dropout of a tensor that is cut in one dimension, with the mask of the whole tensor.

    Args:
        x: This worker's part; all parts are equally large.
        probability: The probability that an element is dropped.
        group: The tensor-parallel group; its workers must have equal random streams.
        dim: The dimension that is cut.

    Returns:
        The part after dropout, of the same shape.
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
