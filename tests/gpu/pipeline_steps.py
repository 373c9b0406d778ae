"""Steps of pipelines, and what they wait for: ``pipeline_steps.py PLAN=CASE...``.

CASE is ``MODEL:NORM``, NORM the order of the norm to clip by, or nothing. Each case trains under
its plan, one after another in the same processes. Every worker says a line of JSON a case.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow.tests.runtime import pipeline_cases, tensor_cases

SKIPPED, COUNTED = 4, 2
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
        loss_of, data = pipeline_cases.loss_of(model), pipeline_cases.data(rows(size))
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


def waited() -> int:
    """How often the host has waited; 0 on real devices, where a wait is an error."""
    software = sys.modules.get("_fakecuda")
    return 0 if software is None else software.counts().get("host_sync", 0)


def may_wait(mode: str) -> None:
    """What a wait is on a real device from now on: ``error`` or ``default``."""
    if "_fakecuda" not in sys.modules:
        torch.cuda.set_sync_debug_mode(mode)


def trained(case: str) -> dict[str, Any]:
    """The same under the plan, and how often the host waited in the counted steps.

    Tests of the loss, which come in few steps, wait and do not count.
    """
    from hetflow import runtime as hf
    from hetflow.runtime.promise import trial

    name, _, norm = case.partition(":")
    model, loss_of, loader = parts(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = hf.prepare(model, optimizer)
    judge, in_tests, waits, is_counting = trial.LossTrial.judge, 0, 0, False

    def judge_apart(*arguments: Any) -> Any:
        nonlocal in_tests
        before = waited()
        may_wait("default")
        try:
            return judge(*arguments)
        finally:
            in_tests += waited() - before
            may_wait("error" if is_counting else "default")

    with mock.patch.object(trial.LossTrial, "judge", judge_apart):
        for batch in job.batches(loader):
            if batch.step == SKIPPED:
                is_counting, in_tests, waits = True, 0, waited()
                may_wait("error")
            loss = job.backward(loss_of, batch)
            found = update(model, optimizer, norm)
            if batch.step == SKIPPED + COUNTED - 1:
                is_counting, waits = False, waited() - waits - in_tests
                may_wait("default")
    told = None if found is None else float(found)
    job.finish(whole=False)
    return {"case": case, "waits": waits, "loss": loss.item(), "norm": told}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        plan, _, text = argument.partition("=")
        os.environ["HETFLOW_PLAN"] = plan
        sys.stdout.write(json.dumps(trained(text)) + "\n")
