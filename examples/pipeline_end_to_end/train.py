"""Train a small VGG-16 or GPT; the same script on one device and as a pipeline.

Plain: ``python train.py vgg``. Under a plan: ``hetflow launch plan.json train.py vgg``.
Profiled: ``hetflow profile train.py:vgg --layers``.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.profilers.zoo.models import gpt_small, vgg16_small


def images(number: int) -> TensorDataset:
    """Ten random patterns with noise; the class is the pattern's number."""
    patterns = torch.randn(10, 3, 32, 32)
    classes = torch.randint(10, (number,))
    return TensorDataset(patterns[classes] + torch.randn(number, 3, 32, 32) / 2, classes)


def sentences(number: int) -> TensorDataset:
    """Sequences in which one rule gives token t + 1 from token t."""
    tokens = [torch.randint(64, (number,))]
    for _ in range(32):
        tokens.append((5 * tokens[-1] + 7) % 64)
    text = torch.stack(tokens, dim=1)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def criterion(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy; the last dimension of ``scores`` is the classes."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def vgg() -> tuple[nn.Module, Any, Any]:
    """VGG-16, as a target of ``hetflow profile``."""
    torch.manual_seed(0)
    model, *rest = vgg16_small()
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            # With torch's default weights, sixteen layers without normalisation learn nothing.
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model, *rest


def gpt() -> tuple[nn.Module, Any, Any]:
    """A GPT whose output matrix is tied to its embedding, as a target of ``hetflow profile``."""
    torch.manual_seed(0)
    model, *rest = gpt_small()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model, *rest


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], TensorDataset]]] = {
    "vgg": (vgg, images),
    "gpt": (gpt, sentences),
}


def main() -> None:
    """Train for a number of steps and print the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    factory, data = MODELS[arguments.model]
    model = factory()[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loader = DataLoader(data(arguments.steps * arguments.batch_size), arguments.batch_size)
    job = hf.prepare(model, optimizer)
    for batch in job.batches(loader):
        loss = job.backward(lambda x, y: criterion(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
        job.print(f"loss {loss.item():.8f}")
    job.finish()


if __name__ == "__main__":
    main()
