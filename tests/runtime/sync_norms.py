"""A training with SyncBatchNorm. A script for the launcher, not a test.

Usage: sync_norms.py OUTPUT_FOLDER. Every worker writes the losses, parameters and buffers.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf

BATCH = 16


def data():
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(43, 2, 4, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (43,), generator=generator))


def model_of():
    torch.manual_seed(1)
    first = nn.BatchNorm2d(5, momentum=None)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3), first, nn.ReLU(), nn.Flatten(),
        nn.Linear(20, 6, bias=False), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 3),
    )  # fmt: skip
    return nn.SyncBatchNorm.convert_sync_batchnorm(model).double()


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = hf.prepare(model, optimizer)
    losses = []
    for _ in range(2):
        for batch in job.batches(DataLoader(data(), batch_size=BATCH, shuffle=True)):
            loss = job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
            losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return losses, model.state_dict()


if __name__ == "__main__":
    torch.save(train(model_of()), Path(sys.argv[1]) / f"results{os.environ['HETFLOW_SLOT']}.pt")
