"""An ordinary training script on scikit-learn's digits; five lines make it run under hetflow.

Plain: ``python examples/train_digits.py``. Under a plan: ``hetflow launch plan.json
examples/train_digits.py``. Profiled: ``hetflow profile examples/train_digits.py:workload``.
"""

import argparse
import json
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf  # 1
from hetflow.profilers.zoo.models import DigitsCNN


def digits(dtype: torch.dtype) -> TensorDataset:
    """The 1,797 digits as images in [0, 1] and classes."""
    images, classes = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=dtype).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(x, torch.tensor(classes, dtype=torch.int64))


def workload() -> tuple[nn.Module, Any, Any, Any, TensorDataset]:
    """Make the training for ``hetflow profile``: model, batches, loss, optimizer, dataset."""
    dataset = digits(torch.float64)

    def make_batch(batch_size: int) -> tuple[torch.Tensor, ...]:
        return dataset[torch.arange(batch_size) % len(dataset)]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return DigitsCNN().double(), make_batch, loss, torch.optim.Adam, dataset


def accuracy_of(model: nn.Module, dataset: TensorDataset, device: torch.device) -> float:
    """The fraction of digits that the model classifies correctly."""
    x, y = (tensor.to(device) for tensor in dataset.tensors)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on digits.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="samples per global step")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args()


def main() -> None:
    """Train, and print the loss of each epoch and the accuracy at the end."""
    arguments = parse()
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    dataset = digits(dtype)
    loader = DataLoader(dataset, batch_size=arguments.batch_size, shuffle=True)
    model = DigitsCNN().to(dtype)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)

    job = hf.prepare(model, optimizer)  # 2
    loss = None  # a job that resumes from a checkpoint gets no batches of finished epochs
    for epoch in range(arguments.epochs):
        for batch in job.batches(loader):  # 3, was: for x, y in loader
            loss = job.backward(lambda x, y: criterion(model(x), y), batch)  # 4; 5 drops backward
            optimizer.step()
            optimizer.zero_grad()
        if loss is not None:
            job.print(f"epoch {epoch + 1}: loss {loss.item():.6f}")

    with job.evaluation() as trained:  # under a pipeline each call runs on all stages
        accuracy = accuracy_of(trained, dataset, job.device)
    if loss is None:  # the job had been stopped after its last step
        job.print(f"accuracy {accuracy:.4f}")
    elif job.is_main:
        print(f"final loss {loss.item():.10f} accuracy {accuracy:.4f}")
        if arguments.json:
            print(json.dumps({"loss": loss.item(), "accuracy": accuracy}))


if __name__ == "__main__":
    main()
