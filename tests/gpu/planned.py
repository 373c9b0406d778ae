"""A GPT that trains under plans, one after another: ``planned.py FAULT PLAN...``.

FAULT ``one-stream`` has no stream beside the one of computation, and ``waits`` waits for each
all-reduce where it begins. Each step ends with the mark ``end``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow.profilers.zoo.models import GPT

VOCABULARY, TOKENS, DEPTH, WIDTH, NUM_STEPS = 64, 16, 4, 64, 2


def model_of() -> nn.Module:
    """Blocks with four heads, so two or four GPUs share one."""
    return GPT(vocabulary=VOCABULARY, max_tokens=TOKENS, depth=DEPTH, num_heads=4, channels=WIDTH)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of tokens and the next ones."""
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def tokens_of(num_samples: int) -> tuple[Tensor, Tensor]:
    """Random ones."""
    tokens = torch.randint(VOCABULARY, (num_samples, TOKENS))
    return tokens, tokens


def workload() -> tuple[Any, ...]:
    """The same to be counted."""
    return model_of(), tokens_of, loss_of, lambda weights: torch.optim.SGD(weights, lr=0.01)


def train(plan: str) -> None:
    """A few steps under a plan."""
    from hetflow import runtime as hf
    from hetflow.schema import files
    from hetflow.schema.plan import Plan

    os.environ["HETFLOW_PLAN"] = plan
    size = files.read(Path(plan), Plan).global_batch_size
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = hf.prepare(model, optimizer)
    data = TensorDataset(*tokens_of(size * NUM_STEPS))
    for batch in job.batches(DataLoader(data, batch_size=size)):
        job.backward(lambda *given: loss_of(model, given), batch)
        optimizer.step()
        sys.modules["_fakecuda"].mark("end")  # type: ignore[attr-defined]
        optimizer.zero_grad()
    job.finish(whole=False)


def main(fault: str, *plans: str) -> None:
    """Without what comes in few steps: tests of the loss, comparisons of parameters."""
    from hetflow.runtime.agreement import agreement
    from hetflow.runtime.promise import trial
    from hetflow.tests.gpu.clocked import plant

    trial.LossTrial.judge = lambda *_, **__: (True, None)
    agreement._AFTER_A_CHANGE = ()
    plant(fault)
    for plan in plans:
        train(plan)


if __name__ == "__main__":
    main(*sys.argv[1:])
