"""Models of tokens: GPT (Radford et al., 2019), BERT (Devlin et al., 2018), LSTMs (Zaremba, 2014).

Shape suffixes: B batch, T tokens, C channels, H heads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .synthetic import Parts, classification_loss, token_batches


class _Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, channels: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_channels = channels // num_heads
        self.causal = causal
        self.project_in = nn.Linear(channels, 3 * channels)
        self.project_out = nn.Linear(channels, channels)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        # As many heads as there are: a tensor-parallel worker has some of them.
        qkv = self.project_in(x_BTC).view(B, T, 3, -1, self.head_channels)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y_BHTc = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.project_out(y_BHTc.transpose(1, 2).reshape(B, T, -1))
        return out


class _Block(nn.Module):
    """Attention and a feed-forward net, each with a residual.

    GPT normalises before each part, BERT after.
    """

    def __init__(self, channels: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm_first = causal
        self.attention = _Attention(channels, num_heads, causal=causal)
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.feed_forward = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        for part, norm in zip((self.attention, self.feed_forward), self.norms, strict=True):
            x_BTC = x_BTC + part(norm(x_BTC)) if self.norm_first else norm(x_BTC + part(x_BTC))
        return x_BTC


class GPT(nn.Module):
    """Input token ids ``[B, T]``, output next-token logits ``[B, T, vocabulary]``."""

    def __init__(
        self, *, vocabulary: int, max_tokens: int, depth: int, num_heads: int, channels: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, channels)
        self.positions = nn.Embedding(max_tokens, channels)
        self.blocks = nn.Sequential(
            *[_Block(channels, num_heads, causal=True) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(channels)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Score the next token at each position; the output matrix is the embedding's."""
        x_BTC = self.tokens(ids_BT) + self.positions(
            torch.arange(ids_BT.shape[1], device=ids_BT.device)
        )
        return functional.linear(self.norm(self.blocks(x_BTC)), self.tokens.weight)


class BERT(nn.Module):
    """Input token ids ``[B, T]``, output masked-token logits ``[B, T, vocabulary]``.

    The encoder with its pooler has the published 109,482,240 parameters; the output matrix
    is the embedding's.
    """

    def __init__(
        self, *, vocabulary: int, max_tokens: int, depth: int, num_heads: int, channels: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, channels)
        self.positions = nn.Embedding(max_tokens, channels)
        self.segments = nn.Embedding(2, channels)
        self.norm = nn.LayerNorm(channels)
        self.blocks = nn.Sequential(
            *[_Block(channels, num_heads, causal=False) for _ in range(depth)]
        )
        self.pooler = nn.Linear(channels, channels)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Score every token; the pooled first token is added as a context for all."""
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        embedded = self.tokens(ids_BT) + self.positions(positions)
        x_BTC = self.blocks(self.norm(embedded + self.segments(torch.zeros_like(ids_BT))))
        pooled_BC = torch.tanh(self.pooler(x_BTC[:, 0]))
        return functional.linear(x_BTC + pooled_BC[:, None], self.tokens.weight)


def gpt() -> Parts:
    """A small GPT on 65 characters and 256 positions (nanoGPT's character model's shape)."""
    model = GPT(vocabulary=65, max_tokens=256, depth=6, num_heads=6, channels=384)
    return model, token_batches(256, 65), classification_loss


def gpt_small() -> Parts:
    """A GPT of 4 blocks on 64 characters and 32 positions; 20 ms of one core for 4 samples."""
    model = GPT(vocabulary=64, max_tokens=32, depth=4, num_heads=4, channels=128)
    return model, token_batches(32, 64), classification_loss


def gpt2() -> Parts:
    """GPT-2 small; 124,439,808 parameters; batches of 256 tokens a sample."""
    model = GPT(vocabulary=50257, max_tokens=1024, depth=12, num_heads=12, channels=768)
    return model, token_batches(256, 50257), classification_loss


def bert() -> Parts:
    """BERT-base; 109,482,240 parameters; batches of 128 tokens a sample."""
    model = BERT(vocabulary=30522, max_tokens=512, depth=12, num_heads=12, channels=768)
    return model, token_batches(128, 30522), classification_loss


class _Recurrent(nn.Module):
    """One LSTM over all tokens; its last state is dropped."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, channels, batch_first=True)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.lstm(x_BTC)[0]
        return out


class LSTMLanguageModel(nn.Module):
    """Input token ids ``[B, T]``, output next-token logits ``[B, T, vocabulary]``.

    One module for each LSTM of the stack, so that a pipeline can be cut between them.
    """

    def __init__(self, *, vocabulary: int, depth: int, channels: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, channels)
        self.stack = nn.Sequential(*[_Recurrent(channels) for _ in range(depth)])
        self.head = nn.Linear(channels, vocabulary)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Score the next token at each position."""
        logits_BTV: Tensor = self.head(self.stack(self.tokens(ids_BT)))
        return logits_BTV


def lstm() -> Parts:
    """Three LSTMs of 128 channels, 1,024 words, 32 tokens a sample; 659,456 parameters."""
    model = LSTMLanguageModel(vocabulary=1024, depth=3, channels=128)
    return model, token_batches(32, 1024), classification_loss
