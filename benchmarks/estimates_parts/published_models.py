"""Models as NVIDIA's examples train them, for counting."""

import math

import torch
from torch import nn
from torch.nn import functional

from hetflow.profilers.zoo.models import Parts, ResNet, classification_loss, image_batches, resnet50

GROUPS, BASE = 32, 128


def resnext101() -> Parts:
    """32x4d: ResNet-101 whose 3x3 convolutions are twice as wide, in 32 groups."""
    model = ResNet((3, 4, 23, 3), bottleneck=True)
    for level, depth in enumerate((3, 4, 23, 3)):
        width = BASE << level
        for index in range(depth):
            block = model.blocks[sum((3, 4, 23, 3)[:level]) + index]
            for number in (0, 2, 4):
                before = block.body[number][0]
                inputs = before.in_channels if number == 0 else width
                outputs = before.out_channels if number == 4 else width
                block.body[number] = nn.Sequential(
                    nn.Conv2d(
                        inputs,
                        outputs,
                        before.kernel_size,
                        before.stride,
                        before.padding,
                        groups=GROUPS if number == 2 else 1,
                        bias=False,
                    ),
                    nn.BatchNorm2d(outputs),
                )
    return model, image_batches(3, 224, 1000), classification_loss


def resnet50_channels_last() -> Parts:
    """As their 16-bit runs have it."""
    return _channels_last(resnet50())


def resnext101_channels_last() -> Parts:
    """As their 16-bit runs have it."""
    return _channels_last(resnext101())


def _channels_last(parts: Parts) -> Parts:
    model, *others = parts
    return model.to(memory_format=torch.channels_last), *others


def bert_large() -> Parts:
    """bert-large-uncased with a classifier of sequences of 512 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )

    def batch(size: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.randint(config.vocab_size, (size, 512)),
            "labels": torch.randint(2, (size,)),
        }

    return BertForSequenceClassification(config), batch, lambda model, batch: model(**batch).loss


def se_resnext101() -> Parts:
    """ResNeXt-101 whose blocks weigh their channels (Hu et al., 2018; a sixteenth of the width)."""
    model, *others = resnext101()
    assert isinstance(model, ResNet)
    for block in model.blocks:
        outputs = block.body[4][0].out_channels
        block.body.append(_ChannelWeights(outputs, outputs // 16, nn.ReLU()))
    return model, *others


def se_resnext101_channels_last() -> Parts:
    """As their 16-bit runs have it."""
    return _channels_last(se_resnext101())


class _ChannelWeights(nn.Module):
    """Squeeze and excitation: channels times weights that come from their means."""

    def __init__(self, channels: int, squeezed: int, activation: nn.Module) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            activation,
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.weights(images) * images


# Of EfficientNet-B0's stages (Tan and Le, 2019): kernel size, stride, repeats, expansion, channels.
_STAGES = (
    (3, 1, 1, 1, 16),
    (3, 2, 2, 6, 24),
    (5, 2, 2, 6, 40),
    (3, 2, 3, 6, 80),
    (5, 1, 3, 6, 112),
    (5, 2, 4, 6, 192),
    (3, 1, 1, 6, 320),
)


class _Inverted(nn.Module):
    """An inverted bottleneck: widen, convolve each channel alone, weigh channels, narrow."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.has_shortcut = stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            *(_unit(inputs, width, 1) if expansion > 1 else ()),
            *_unit(width, width, kernel, stride, groups=width),
            _ChannelWeights(width, max(1, inputs // 4), nn.SiLU(inplace=True)),
            *_unit(width, outputs, 1)[:2],
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images) + images if self.has_shortcut else self.body(images)


def _unit(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(inplace=True),
    )


def _efficientnet(width: float, depth: float, pixels: int) -> Parts:
    def scaled(channels: int) -> int:
        rounded = max(8, int(channels * width + 4) // 8 * 8)
        return rounded + 8 * (rounded < 0.9 * channels * width)

    channels = scaled(32)
    layers = [*_unit(3, channels, 3, 2)]
    for kernel, first, repeats, expansion, outputs in _STAGES:
        for number in range(math.ceil(repeats * depth)):
            stride = 1 if number else first
            layers.append(_Inverted(channels, scaled(outputs), kernel, stride, expansion))
            channels = scaled(outputs)
    layers += [*_unit(channels, scaled(1280), 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Dropout(0.2), nn.Linear(scaled(1280), 1000)]
    return nn.Sequential(*layers), image_batches(3, pixels, 1000), classification_loss


def efficientnet_b0() -> Parts:
    """5,288,548 parameters."""
    return _efficientnet(1.0, 1.0, 224)


def efficientnet_b0_channels_last() -> Parts:
    """As their 16-bit runs have it."""
    return _channels_last(efficientnet_b0())


def efficientnet_b4() -> Parts:
    """19,341,616 parameters."""
    return _efficientnet(1.4, 1.8, 380)


def efficientnet_b4_channels_last() -> Parts:
    """As their 16-bit runs have it."""
    return _channels_last(efficientnet_b4())


_BOXES = (4, 6, 6, 6, 4, 4)  # of a place, by map of features
_CLASSES, _ALL_BOXES = 81, 8732


class _SSD(nn.Module):
    """SSD300 (Liu et al., 2016) on three levels of ResNet-50, of which the last has no stride."""

    def __init__(self) -> None:
        super().__init__()
        whole = ResNet((3, 4, 6, 3), bottleneck=True)
        third = whole.blocks[7]
        for convolution in (third.body[2][0], third.shortcut[0]):
            convolution.stride = (1, 1)
        maps = [nn.Sequential(whole.stem, whole.blocks[:13])]
        channels = 1024
        for number, (width, outputs) in enumerate(
            ((256, 512), (256, 512), (128, 256), (128, 256), (128, 256))
        ):
            stride, padding = (2, 1) if number < 3 else (1, 0)
            maps.append(
                nn.Sequential(
                    nn.Conv2d(channels, width, 1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, outputs, 3, stride, padding, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(),
                )
            )
            channels = outputs
        self.maps = nn.ModuleList(maps)
        widths = (1024, 512, 512, 256, 256, 256)
        heads = [*zip(widths, _BOXES, strict=True)]
        self.places = nn.ModuleList(nn.Conv2d(w, 4 * n, 3, padding=1) for w, n in heads)
        self.kinds = nn.ModuleList(nn.Conv2d(w, _CLASSES * n, 3, padding=1) for w, n in heads)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places, kinds = [], []
        for features, place, kind in zip(self.maps, self.places, self.kinds, strict=True):
            images = features(images)
            places.append(place(images).flatten(2).unflatten(1, (4, -1)).flatten(2))
            kinds.append(kind(images).flatten(2).unflatten(1, (_CLASSES, -1)).flatten(2))
        return torch.cat(places, 2), torch.cat(kinds, 2)


def ssd300() -> Parts:
    """The loss counts three times as many boxes without a thing as with one, the worst ones."""

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        boxes = torch.rand(size, 4, _ALL_BOXES) + 0.1
        return torch.randn(size, 3, 300, 300), boxes, torch.randint(_CLASSES, (size, _ALL_BOXES))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        images, boxes, kinds = batch
        found, scores = model(images)
        is_thing = kinds > 0
        number = is_thing.sum(1)
        off = functional.smooth_l1_loss(found, boxes.log(), reduction="none").sum(1)
        wrong = functional.cross_entropy(scores, kinds, reduction="none")
        rank = wrong.masked_fill(is_thing, 0).argsort(1, descending=True).argsort(1)
        counts = is_thing.float() + (rank < 3 * number[:, None]).float()
        total = (is_thing.float() * off).sum(1) + (wrong * counts).sum(1)
        return (total / number.clamp(min=1)).mean()

    return _SSD(), batch, loss


def ssd300_channels_last() -> Parts:
    """As their 16-bit runs have it."""
    return _channels_last(ssd300())
