"""VGG-16 (Simonyan and Zisserman, 2014), configuration D."""

from torch import nn

from .synthetic import Parts, classification_loss, image_batches

_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16() -> Parts:
    """VGG-16 on 224 x 224 images; 138,357,544 parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for level in _WIDTHS:
        for width in level:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers), image_batches(3, 224, 1000), classification_loss
