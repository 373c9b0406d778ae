"""A multi-layer perceptron on 784 inputs (28 x 28 pixels), 10 classes."""

import torch
from torch import nn

from .synthetic import Batch, Parts, classification_loss


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
