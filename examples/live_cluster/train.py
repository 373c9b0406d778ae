"""A small network on made-up data, with hetflow's lines: the second model of ``run.py``."""

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf


def make_dataset() -> TensorDataset:
    """1,024 points; the class says whether the sum of their first coordinates is positive."""
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, :8].sum(1) > 0).long())


def make_model() -> nn.Sequential:
    """Three layers, with dropout: its masks are the same wherever the job moves."""
    return nn.Sequential(
        nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 2),
    )  # fmt: skip


def workload() -> tuple[nn.Module, Any, Any, Any, TensorDataset]:
    """The target of ``hetflow profile``: model, batches, loss, optimizer, dataset."""
    dataset = make_dataset()

    def make_batch(batch_size: int) -> tuple[torch.Tensor, ...]:
        return dataset[torch.arange(batch_size) % len(dataset)]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return make_model(), make_batch, loss, torch.optim.SGD, dataset


def main() -> None:
    """Train for the epochs of the command line, and print the loss every five epochs."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_dataset(), batch_size=128, shuffle=True)
    job = hf.prepare(model, optimizer)
    loss = None  # a job that resumes from a checkpoint gets no batches of finished epochs
    for epoch in range(int(sys.argv[1])):
        for batch in job.batches(loader):
            loss = job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
            optimizer.step()
            optimizer.zero_grad()
        if epoch % 5 == 4 and loss is not None:
            job.print(f"epoch {epoch + 1}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
