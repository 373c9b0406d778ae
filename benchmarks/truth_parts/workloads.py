"""What benchmarks/truth.py profiles and trains: targets with their own optimizer and dataset."""

import torch
from torch import nn
from torch.utils.data import Dataset

from hetflow.profilers import zoo
from hetflow.profilers.zoo.models import ResNet, classification_loss, image_batches

NUM_SAMPLES, LENGTH = 256, 1 << 20


class Samples(Dataset):
    """``length`` samples, of which ``NUM_SAMPLES`` are different, so that they take little memory.

    Drawn when first read: what only looks at the dataset has nothing to wait for.
    """

    def __init__(self, make_batch, length=LENGTH):
        self.make_batch, self.length, self.tensors = make_batch, length, None

    def of_length(self, length):
        """The same samples, as many."""
        return Samples(self.make_batch, length)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.tensors is None:
            self.tensors = self.make_batch(NUM_SAMPLES)
        return tuple(tensor[index % NUM_SAMPLES] for tensor in self.tensors)


def _trained(model, make_batch, loss):
    return model, make_batch, loss, torch.optim.Adam, Samples(make_batch)


def _of_zoo(name):
    return _trained(*zoo.factory_of(name)())


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
    return _trained(model, image_batches(3, 32, 10), classification_loss)


def resnet18():
    """ResNet-18 on 32 x 32 images of 10 classes; 11,181,642 parameters."""
    model = ResNet((2, 2, 2, 2), bottleneck=False, num_classes=10)
    return _trained(model, image_batches(3, 32, 10), classification_loss)


def gpt():
    """zoo:gpt-small, 4 blocks of 128 channels on 32 tokens."""
    return _of_zoo("gpt-small")


def lstm():
    """zoo:lstm, 3 LSTMs of 128 channels on 32 tokens; 659,456 parameters."""
    return _of_zoo("lstm")
