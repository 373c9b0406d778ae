"""Steps of pipelines, and what they wait for: ``pipeline_steps.py PLAN=CASE...``.

CASE is ``MODEL:NORM``, NORM the order of the norm to clip by, or nothing. Each case trains under
its plan, one after another in the same processes. Every worker says a line of JSON a case.
"""

import json
import os
import sys
from collections.abc import Callable
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow.tests.runtime import pipeline_cases, tensor_cases

SKIPPED, COUNTED = 4, 5
Loss = Callable[..., Tensor]


def parts(name: str) -> tuple[nn.Module, Loss, DataLoader[Any]]:
    """A model, its loss, and batches of which the last is short."""
    if name == "gpt":
        model, size = tensor_cases.build("zoo"), tensor_cases.GLOBAL_BATCH_SIZE
        ids = torch.randint(16, (rows(size), 7), generator=torch.Generator().manual_seed(1))

        def loss_of(given: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(given).flatten(0, 1), targets.flatten())

        data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    else:
        model, size = pipeline_cases.build(name), pipeline_cases.GLOBAL_BATCH_SIZE
        loss_of, data = pipeline_cases.loss_of(model, False), pipeline_cases.data(rows(size))
    return model, loss_of, DataLoader(data, batch_size=size)


def rows(size: int) -> int:
    return size * (SKIPPED + COUNTED) - 2


def update(model: nn.Module, optimizer: torch.optim.Optimizer, norm: str) -> Tensor | None:
    """Clip, step, and forget the gradients."""
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.5, float(norm)) if norm else None
    optimizer.step()
    optimizer.zero_grad()
    return found


def plain(case: str) -> tuple[float, float | None]:
    """The last loss, and the norm before it was clipped, of one process without hetflow."""
    name, _, norm = case.partition(":")
    model, loss_of, loader = parts(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in loader:
        loss = loss_of(*batch)
        loss.backward()
        found = update(model, optimizer, norm)
    return loss.item(), None if found is None else float(found)


def trained(case: str) -> dict[str, Any]:
    """The same under the plan, and how often the host waited in most of the counted steps.

    A step in which the loss is tested again waits for the test.
    """
    from hetflow import runtime as hf

    name, _, norm = case.partition(":")
    software = sys.modules.get("_fakecuda")
    model, loss_of, loader = parts(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = hf.prepare(model, optimizer)
    waits = [0]
    for batch in job.batches(loader):
        if batch.step == SKIPPED and software is None:
            torch.cuda.set_sync_debug_mode("error")
        if batch.step >= SKIPPED and software is not None:
            software.reset_counts()
        loss = job.backward(loss_of, batch)
        found = update(model, optimizer, norm)
        if batch.step == SKIPPED + COUNTED - 1 and software is None:
            torch.cuda.set_sync_debug_mode("default")
        if batch.step >= SKIPPED and software is not None:
            waits.append(software.counts().get("host_sync", 0))
    told = None if found is None else float(found)
    job.finish(whole=False)
    return {"case": case, "waits": median_low(waits), "loss": loss.item(), "norm": told}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        plan, _, text = argument.partition("=")
        os.environ["HETFLOW_PLAN"] = plan
        sys.stdout.write(json.dumps(trained(text)) + "\n")
