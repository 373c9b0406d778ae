"""Residual networks (He et al., 2015), ImageNet form, as published: v1.5 strides."""

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
