"""What benchmarks/truth.py profiles and trains: targets that bring their own optimizer, Adam."""

import torch
from torch import nn

from hetflow.profilers import zoo
from hetflow.profilers.zoo.resnet import ResNet
from hetflow.profilers.zoo.synthetic import classification_loss, image_batches


def _of_zoo(name):
    return (*zoo.factory_of(name)(), torch.optim.Adam)


def mlp():
    """zoo:mlp; 1,863,690 parameters."""
    return _of_zoo("mlp")


def digits_cnn():
    """zoo:digits-cnn; 188,234 parameters."""
    return _of_zoo("digits-cnn")


def cnn():
    """Three convolutions on 32 x 32 images; 56,970 parameters."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return model, image_batches(3, 32, 10), classification_loss, torch.optim.Adam


def resnet18():
    """ResNet-18 on 32 x 32 images of 10 classes; 11,181,642 parameters."""
    model = ResNet((2, 2, 2, 2), bottleneck=False, num_classes=10)
    return model, image_batches(3, 32, 10), classification_loss, torch.optim.Adam


def gpt():
    """zoo:gpt-small, 4 blocks of 128 channels on 32 tokens."""
    return _of_zoo("gpt-small")


def lstm():
    """zoo:lstm, 3 LSTMs of 128 channels on 32 tokens; 659,456 parameters."""
    return _of_zoo("lstm")
