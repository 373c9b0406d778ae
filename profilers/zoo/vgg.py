"""VGG-16 (Simonyan and Zisserman, 2014), configuration D."""

from torch import nn

from .synthetic import Parts, classification_loss, image_batches

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
