"""Models of images, in ImageNet form as published, and the small one of the demo.

ResNets (He et al., 2015) have v1.5 strides; VGG-16 (Simonyan and Zisserman, 2014) is configuration
D. The demo's has no batch-norm and no dropout, so that every split of a batch gives the one-device
result. A pass of 128 samples takes tens of milliseconds on one core: long enough for an emulated
slow device to be steady, short enough for a demo.
"""

from torch import Tensor, nn

from .synthetic import Parts, classification_loss, image_batches


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class _Block(nn.Module):
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
                blocks.append(_Block(body, shortcut))
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
