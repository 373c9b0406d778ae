"""A training with an operator that has no deterministic form. A script, not a test.

Usage: unpooling.py module|function.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf


class Net(nn.Module):
    """Pools and unpools: with a module that a scan sees, or by a function that it cannot see."""

    def __init__(self, which):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.unpool = nn.MaxUnpool1d(2) if which == "module" else None

    def forward(self, x):
        values, indices = nn.functional.max_pool1d(self.layer(x)[:, None], 2, return_indices=True)
        unpool = self.unpool or (lambda *given: nn.functional.max_unpool1d(*given, 2))
        return unpool(values, indices)


def main(which):
    """One step."""
    model = Net(which)
    job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    job.print("prepared")
    for batch in job.batches(DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=16)):
        job.backward(lambda x: model(x).square().mean(), batch)


if __name__ == "__main__":
    main(sys.argv[1])
