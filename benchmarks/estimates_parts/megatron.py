"""GPT's layers as Megatron-LM runs them eagerly, for counting: what the measured runs computed.

Sailor profiled OPT-350M and vTrain GPT models, both in Megatron-DeepSpeed. Shapes and operators
follow its unfused path (``ParallelTransformerLayer``, ``vocab_parallel_cross_entropy``).
x: [sequence, batch, hidden]; ``shards`` is the tensor-parallel degree, of which this is one shard.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetflow.profilers.operator_counts import tallied
from hetflow.schema.layers import Operator


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its widths, and how many shards each layer is cut into."""

    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 50304
    shards: int = 1
    dtype: torch.dtype = torch.float32
    attention_dropout: float = 0.1


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, part = shape.hidden, shape.hidden // shape.shards
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * part), nn.Linear(part, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * part), nn.Linear(4 * part, hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention with its scores in memory, then the multi-layer perceptron."""
        shape, (length, batch, _) = self.shape, x.shape
        heads = shape.heads // shape.shards
        q, k, v = (
            part.reshape(length, batch * heads, -1).transpose(0, 1)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        into = torch.empty(batch * heads, length, length, dtype=x.dtype)
        scores = torch.baddbmm(into, q, k.transpose(1, 2), beta=0.0, alpha=q.shape[-1] ** -0.5)
        scores = scores.masked_fill_(mask, -10000.0)
        weights = torch.softmax(scores, dim=-1)
        if shape.attention_dropout:
            weights = functional.dropout(weights, shape.attention_dropout)
        mixed = torch.bmm(weights, v).transpose(0, 1).reshape(length, batch, -1)
        x = x + functional.dropout(self.out(mixed), 0.1)
        inner = functional.gelu(self.up(self.norms[1](x)))
        return x + functional.dropout(self.down(inner), 0.1)


class CrossEntropy(torch.autograd.Function):
    """By Megatron's steps, each of which passes over all logits."""

    @staticmethod
    def forward(context, logits: Tensor, labels: Tensor) -> Tensor:
        """One loss a token."""
        logits = logits - logits.max(dim=-1, keepdim=True).values
        picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        shares = logits.exp()
        sums = shares.sum(dim=-1)
        context.save_for_backward(shares.div_(sums.unsqueeze(-1)), labels)
        return sums.log() - picked

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        """In the place of the saved shares."""
        shares, labels = context.saved_tensors
        shares.scatter_add_(-1, labels.unsqueeze(-1), torch.full_like(gradient, -1.0).unsqueeze(-1))
        return shares.mul_(gradient.unsqueeze(-1)), None


class Head(nn.Module):
    """The last norm, the logits of a shard of the vocabulary, and their cross entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden)
        self.table = nn.Linear(shape.hidden, shape.vocabulary // shape.shards, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """In 32 bits."""
        losses: Tensor = CrossEntropy.apply(self.table(self.norm(x)).float(), labels)
        return losses.mean()


def block_counts(shape: Shape, batch: int) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Operators of a layer's forward and backward pass."""
    mask = torch.empty(1, shape.sequence, shape.sequence, dtype=torch.bool)
    return _counts(Block, shape, batch, mask)


def head_counts(shape: Shape, batch: int) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Operators of the head's forward and backward pass."""
    return _counts(Head, shape, batch, torch.empty(shape.sequence, batch, dtype=torch.int64))


def _counts(
    kind: type[nn.Module], shape: Shape, batch: int, beside: Tensor
) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        module = kind(shape)
        x = torch.empty(shape.sequence, batch, shape.hidden, requires_grad=True) * 1
    finally:
        torch.set_default_dtype(usual)
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    with tallied() as forward:
        answer = module(x, beside)
    gradient = torch.empty_like(answer)
    with tallied() as backward:
        answer.backward(gradient)
    return forward.operators, backward.operators
