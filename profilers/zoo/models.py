"""Models of images, of tokens and of vectors, on synthetic batches.

Of images, in ImageNet form as published: ResNets (He et al., 2015) have v1.5 strides; VGG-16
(Simonyan and Zisserman, 2014) is configuration D. The demo's small one has no batch-norm and no
dropout, so that every split of a batch gives the one-device result. A pass of 128 samples takes
tens of milliseconds on one core: long enough for an emulated slow device to be steady, short
enough for a demo. Of tokens: GPT (Radford et al., 2019), BERT (Devlin et al., 2018), LSTMs
(Zaremba, 2014). Shape suffixes: B batch, T tokens, C channels, H heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
Parts = tuple[nn.Module, Callable[[int], Batch], Callable[[nn.Module, Batch], Tensor]]


def image_batches(channels: int, pixels: int, num_classes: int) -> Callable[[int], Batch]:
    """Random square images with random labels."""

    def make_batch(batch_size: int) -> Batch:
        images = torch.randn(batch_size, channels, pixels, pixels)
        return images, torch.randint(num_classes, (batch_size,))

    return make_batch


def token_batches(sequence_length: int, vocabulary: int) -> Callable[[int], Batch]:
    """Random token sequences with a random target for each position."""

    def make_batch(batch_size: int) -> Batch:
        shape = (batch_size, sequence_length)
        return torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)

    return make_batch


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy; the classes are the last dimension of the model's answer."""
    inputs, targets = batch
    logits: Tensor = model(inputs)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def mlp(hidden: int = 1024) -> Parts:
    """Two hidden layers; 1,863,690 parameters at the default width."""
    model = nn.Sequential(
        nn.Linear(784, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )

    def make_batch(batch_size: int) -> Batch:
        return torch.randn(batch_size, 784), torch.randint(10, (batch_size,))

    return model, make_batch, classification_loss


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class _ResidualBlock(nn.Module):
    """A residual: ``relu(body(x) + shortcut(x))``."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.functional.relu(self.body(x) + self.shortcut(x))
        return out


def _basic(inputs: int, width: int, stride: int) -> tuple[nn.Module, int]:
    body = nn.Sequential(
        _convolution(inputs, width, 3, stride), nn.ReLU(), _convolution(width, width, 3)
    )
    return body, width


def _bottleneck(inputs: int, width: int, stride: int) -> tuple[nn.Module, int]:
    body = nn.Sequential(
        _convolution(inputs, width, 1),
        nn.ReLU(),
        _convolution(width, width, 3, stride),
        nn.ReLU(),
        _convolution(width, 4 * width, 1),
    )
    return body, 4 * width


class ResNet(nn.Module):
    """Input ``[batch, 3, 224, 224]``, output ``[batch, num_classes]`` logits."""

    def __init__(self, depths: tuple[int, ...], *, bottleneck: bool, num_classes: int = 1000):
        super().__init__()
        make_body = _bottleneck if bottleneck else _basic
        blocks: list[nn.Module] = []
        channels = 64
        for level, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if level and index == 0 else 1
                body, outputs = make_body(channels, 64 << level, stride)
                same = stride == 1 and channels == outputs
                shortcut = nn.Identity() if same else _convolution(channels, outputs, 1, stride)
                blocks.append(_ResidualBlock(body, shortcut))
                channels = outputs
        self.stem = nn.Sequential(
            _convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        logits: Tensor = self.head(self.blocks(self.stem(images)))
        return logits


def resnet18() -> Parts:
    """ResNet-18; 11,689,512 parameters."""
    model = ResNet((2, 2, 2, 2), bottleneck=False)
    return model, image_batches(3, 224, 1000), classification_loss


def resnet50() -> Parts:
    """ResNet-50; 25,557,032 parameters."""
    model = ResNet((3, 4, 6, 3), bottleneck=True)
    return model, image_batches(3, 224, 1000), classification_loss


_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16() -> Parts:
    """VGG-16 on 224 x 224 images; 138,357,544 parameters."""
    layers: list[nn.Module] = [*_features(1), nn.Flatten()]
    layers += [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers), image_batches(3, 224, 1000), classification_loss


def vgg16_small() -> Parts:
    """VGG-16 with a quarter of the channels on 32 x 32 images, without dropout.

    The same 13 convolutions and three linear layers, in 20 ms of one core for 8 samples.
    """
    layers: list[nn.Module] = [*_features(4), nn.Flatten()]
    layers += [nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), image_batches(3, 32, 10), classification_loss


def _features(divisor: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for level in _WIDTHS:
        for width in level:
            layers += [nn.Conv2d(channels, width // divisor, 3, padding=1), nn.ReLU()]
            channels = width // divisor
        layers.append(nn.MaxPool2d(2))
    return layers


class DigitsCNN(nn.Module):
    """Three convolutions and two linear layers; 188,234 parameters.

    Input ``[batch, 1, 8, 8]``, output ``[batch, 10]`` logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def digits_cnn() -> Parts:
    """The demo's model on random 8 x 8 images."""
    return DigitsCNN(), image_batches(1, 8, 10), classification_loss


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


class _TransformerBlock(nn.Module):
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
            *[_TransformerBlock(channels, num_heads, causal=True) for _ in range(depth)]
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
            *[_TransformerBlock(channels, num_heads, causal=False) for _ in range(depth)]
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
