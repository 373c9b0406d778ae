"""Trainings whose losses see the whole batch. A script for the launcher, not a test.

Usage: over_batch.py OUTPUT_FOLDER. Every worker writes the losses, parameters and buffers.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf

F = nn.functional
NUM_SAMPLES, GLOBAL_BATCH_SIZE = 43, 16  # the last batch is short


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (NUM_SAMPLES,), generator=generator))


class Net(nn.Module):
    """Layers, and a temperature that only the loss reads."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(1)
        between = nn.Sequential(nn.BatchNorm1d(7), nn.Dropout(0.2)) if norm else nn.Tanh()
        self.body = nn.Sequential(nn.Linear(5, 7), between, nn.Linear(7, 3))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.double()

    def forward(self, x):
        return self.body(x)


def contrast(model):
    def outputs(x, y):
        return model(x), model(x.flip(1))

    def loss_of(a, b):
        logits = F.normalize(a) @ F.normalize(b).T / model.temperature
        return F.cross_entropy(logits, torch.arange(len(a)))

    return outputs, loss_of


def triplet(model):
    """The farthest sample of the same class, and the nearest of another."""

    def loss_of(z, y):
        distances = (z[:, None] - z[None]).square().sum(-1)
        same = y[:, None] == y[None]
        far = distances.masked_fill(~same, 0).max(1).values
        near = distances.masked_fill(same, 1e9).min(1).values
        return (far - near + 1).relu().mean()

    return lambda x, y: (model(x), y), loss_of


def root(model):
    return lambda x, y: model(x), lambda z: z.square().mean().sqrt()


def hardest(model):
    def outputs(x, y):
        return {"loss": F.cross_entropy(model(x), y, reduction="none")}

    return outputs, lambda found: found["loss"].topk(len(found["loss"]) // 2).values.mean()


def logarithm(model):
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none"), lambda e: e.mean().log()


LOSSES = {f.__name__: f for f in (contrast, triplet, root, hardest, logarithm)}


def train(name, norm=False):
    model = Net(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = hf.prepare(model, optimizer)
    outputs, loss_of = LOSSES[name](model)
    losses = []
    for _ in range(2):
        for batch in job.batches(DataLoader(data(), batch_size=GLOBAL_BATCH_SIZE, shuffle=True)):
            losses.append(float(job.backward(outputs, batch, over_batch=loss_of)))
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return losses, model.state_dict()


def all_trainings():
    return {(name, norm): train(name, norm) for name in LOSSES for norm in (False, True)}


if __name__ == "__main__":
    torch.save(all_trainings(), Path(sys.argv[1]) / f"results{os.environ['HETFLOW_SLOT']}.pt")
