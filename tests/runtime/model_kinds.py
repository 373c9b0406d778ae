"""Models as people write them, small: what profiles must take apart and pipelines must train.

Each function here without a leading underscore is a factory for ``hetflow profile``. As a script:

    model_kinds.py FOLDER KIND...

trains each kind under FOLDER/KIND.json in the same processes, and every worker writes what came
out.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, LONGEST, TOKENS, PIXELS, CLASSES = 32, 16, 16, 8, 8, 3
GLOBAL_BATCH_SIZE, NUM_SAMPLES = 12, 30


class _Attention(nn.Module):
    """Of nanoGPT: shapes unpacked, views by them, a mask among the buffers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        mask = torch.tril(torch.ones(LONGEST, LONGEST))
        self.register_buffer("mask", mask.view(1, 1, LONGEST, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        B, S, C = x.shape
        q, k, v = (part.view(B, S, 2, C // 2).transpose(1, 2) for part in self.qkv(x).split(C, 2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :S, :S] == 0, float("-inf"))
        mixed = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.proj(mixed.transpose(1, 2).contiguous().view(B, S, C))


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), _Attention(dropout)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _NanoGpt(nn.Module):
    """Positions, tied weights, a check of the length, and targets that decide what is answered."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([_Block(dropout) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        b, t = idx.size()
        if t > LONGEST:
            raise ValueError(f"{t} tokens are too many")
        positions = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(b * t, -1), targets.view(-1), ignore_index=-1)


@dataclass
class _Output:
    """An answer that pytree does not know, with more than tensors in it."""

    logits: Tensor
    kind: str = "classes"


class _PlainVit(nn.Module):
    """Patches by a convolution, a class token, positions, torch's own encoder layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (PIXELS // 4) ** 2 + 1, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: Tensor) -> _Output:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return _Output(logits=self.head(x[:, 0]))


class _UNet(nn.Module):
    """Skips from each level down to the same level up, by concatenation; sizes by the input.

    It counts its calls in a buffer of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, 4), self._block(4, 8)])
        self.middle = self._block(8, 8)
        self.up = nn.ModuleList([self._block(16, 4), self._block(8, 4)])
        self.head = nn.Conv2d(4, CLASSES, 1)
        self.register_buffer("calls", torch.zeros(()))

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, size=skip.shape[-2:])
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.bn_1, self.bn_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn_1(self.first(x)))
        return F.relu(self.bn_2(self.second(out)) + x)


class _Frozen(nn.Module):
    """A backbone that is run without gradients: torch.fx does not see that."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(torch.relu(self.middle(x)))


def _text(samples: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    ids = torch.randint(WORDS, (samples, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, TOKENS - 2 :] = 0
    return ids, mask


def _images(samples: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    pixels = torch.randn(samples, 3, PIXELS, PIXELS, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(CLASSES, (samples,), generator=generator)


def _rows(samples: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    rows = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return rows, torch.randint(CLASSES, (samples,), generator=generator)


def _hub_loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """As a script for transformers calls a model: by names, the loss inside the answer."""
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def _of(model: nn.Module, data: Any, loss: Any) -> tuple[Any, Any, Any]:
    return model.double(), data, lambda model, batch: loss(model, *batch)


def nano_gpt(dropout: float = 0.0) -> Any:
    return _of(_NanoGpt(dropout), _text, lambda m, ids, mask: m(ids, ids)[1])


def hf_gpt2(dropout: float = 0.0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=LONGEST, n_embd=WIDTH, n_layer=2, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _of(GPT2LMHeadModel(config), _text, _hub_loss)


def hf_llama(dropout: float = 0.0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_hub_sizes(), num_key_value_heads=1, attention_dropout=dropout)
    return _of(LlamaForCausalLM(config), _text, _hub_loss)


def hf_bert(dropout: float = 0.0) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        **_hub_sizes(), hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return _of(BertForMaskedLM(config), _text, _hub_loss)


def hf_vit(dropout: float = 0.0) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=PIXELS, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return _of(
        ViTForImageClassification(config),
        _images,
        lambda m, pixels, labels: m(pixel_values=pixels, labels=labels).loss,
    )


def _hub_sizes() -> dict[str, int]:
    return {
        "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": LONGEST,
    }  # fmt: skip


def plain_vit(dropout: float = 0.0) -> Any:
    return _of(_PlainVit(dropout), _images, lambda m, x, y: F.cross_entropy(m(x).logits, y))


def resnet(dropout: float = 0.0) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), _Residual(4),
        _Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout),
        nn.Linear(4, CLASSES),
    )  # fmt: skip
    return _of(model, _images, lambda m, x, y: F.cross_entropy(m(x), y))


def unet(dropout: float = 0.0) -> Any:
    return _of(_UNet(), _images, lambda m, x, y: F.cross_entropy(m(x).mean((2, 3)), y))


def frozen_backbone(dropout: float = 0.0) -> Any:
    return _of(_Frozen(), _rows, lambda m, x, y: F.cross_entropy(m(x), y))


KINDS = {
    made.__name__: made
    for made in (
        nano_gpt, hf_gpt2, hf_llama, hf_bert, hf_vit, plain_vit, resnet, unet, frozen_backbone,
    )
}  # fmt: skip


def build(kind: str, dropout: float = 0.0) -> tuple[nn.Module, Any, Any]:
    """The model of a kind with the same weights each time, its batches and its loss."""
    torch.manual_seed(0)
    model, make_batch, loss = KINDS[kind](dropout)
    return model.train(), make_batch, loss


def train(kind: str) -> dict[str, Any]:
    """Two and a half batches: the last is short, so its microbatches have another size."""
    from hetflow import runtime as hf

    model, make_batch, loss_of = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = hf.prepare(model, optimizer)
    data = TensorDataset(*make_batch(NUM_SAMPLES, torch.Generator().manual_seed(1)))
    losses = []
    for batch in job.batches(DataLoader(data, batch_size=GLOBAL_BATCH_SIZE)):
        losses.append(float(job.backward(lambda *entries: loss_of(model, entries), batch)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "state": state}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {}
    for asked in sys.argv[2:]:
        os.environ["HETFLOW_PLAN"] = str(folder / f"{asked}.json")
        results[asked] = train(asked)
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")
