"""Synthetic batches and losses shared by the zoo, and a perceptron on 28 x 28 pixels.

Timing does not depend on the values.
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
