"""Train steps with each of many losses. A script for launches; each worker writes what it saw.

Usage: sharded_losses.py FOLDER [right]. A case gives what it made and the trained parameters, or
the line that refuses it. With ``right`` those that are refused everywhere are left out.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import hetflow as hf
from hetflow.schema.errors import TargetError
from hetflow.tests.runtime import losses, over_batch, test_promise

BATCH = 16
# That of a fixed batch fails by its own error in whatever splits a batch.
WRONG = {name: make for name, (make, _) in losses.WRONG.items() if name != "a fixed batch"}


def first_batch(job: Any, data: Any) -> Any:
    """The first global batch."""
    return next(iter(job.batches(DataLoader(data, batch_size=BATCH))))


def plain(make: Callable[..., Any], job: Any, model: nn.Module, _: Any = None) -> None:
    """One step with a loss."""
    job.backward(make(model), first_batch(job, test_promise.data()))


def in_parts(job: Any, model: nn.Module, _: Any = None) -> float:
    """One step in the script's own loop."""
    batch, loss_of = first_batch(job, test_promise.data()), losses.mean(model)
    return [float(job.backward(loss_of(x, y))) for x, y in job.parts(batch)][-1]


def of_values(job: Any, model: nn.Module, _: Any = None) -> list[float]:
    """One step whose function gives other values."""
    loss_of, batch = losses.mean(model), first_batch(job, test_promise.data())
    _, rest = job.backward(lambda x, y: (loss_of(x, y), x.sum()), batch, has_aux=True)
    return [float(value) for value in rest]


def of_batch(job: Any, model: nn.Module, _: Any = None) -> float:
    """One step with a loss that compares samples."""
    outputs, loss_of = over_batch.triplet(model)
    batch = first_batch(job, over_batch.data())
    return float(job.backward(outputs, batch, over_batch=loss_of))


def masked_later(job: Any, model: nn.Module, _: Any = None) -> tuple[int, bool]:
    """Steps of which a later one's mask makes it no mean; without sharing each worker says its."""
    loss_of = test_promise.MASKED["divided"]
    done, said = test_promise.train_on_later_masks(job, model, loss_of, BATCH, first=4 * BATCH)
    model.zero_grad()
    return done, "so virtual nodes would train on another loss" in said


def predicted(job: Any, model: nn.Module, _: Any = None) -> list[float]:
    """What a model predicts; of the last batch a worker has no sample."""
    loader = DataLoader(Subset(over_batch.data(), range(BATCH + 1)), batch_size=BATCH)
    found = [float(f) for f in job.predict(loader, lambda x, y: model(x).sum(), on_all=True)]
    plain(losses.mean, job, model)
    return found


def short(job: Any, model: nn.Module, optimizer: Any) -> None:
    """A step of a batch of which one worker has no samples."""
    data = Subset(test_promise.data(), range(BATCH + 4))
    for batch in job.batches(DataLoader(data, batch_size=BATCH)):
        optimizer.zero_grad()
        job.backward(losses.mean(model), batch)


def scaled(job: Any, model: nn.Module, optimizer: Any) -> list[float]:
    """Steps under a scaler, of which one overflows on one worker."""
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=256.0), []
    for batch in job.batches(DataLoader(test_promise.data(), batch_size=BATCH)):
        overflows = batch.step == 1

        def loss_of(x: torch.Tensor, y: torch.Tensor, overflows: bool = overflows) -> torch.Tensor:
            loss = losses.mean(model)(x, y)
            return loss * float("inf") if overflows and len(x) == 2 else loss

        optimizer.zero_grad()
        job.backward(loss_of, batch, scaler=scaler, per_virtual_node=True)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.zero_grad()
    return scales


CASES: dict[str, Callable[..., Any]] = {
    **{name: partial(plain, make) for name, make in (losses.RIGHT | WRONG).items()},
    "in parts": in_parts,
    "of values": of_values,
    "of batch": of_batch,
    "masked later": masked_later,
    "predicted": predicted,
    "short": short,
    "scaled": scaled,
}


def main() -> None:
    """Train each case in a job of its own."""
    found: dict[str, object] = {}
    for name, case in CASES.items():
        if name in WRONG and "right" in sys.argv:
            continue
        model = test_promise.model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job: Any = hf.prepare(model, optimizer)
        try:
            made = case(job, model, optimizer)
        except TargetError as refused:
            found[name] = str(refused)
        else:
            optimizer.step()
            job.sync_buffers()
            found[name] = made, [parameter.detach().clone() for parameter in model.parameters()]
        job.abandon()
    torch.save(found, Path(sys.argv[1]) / f"{job.rank}.pt")


if __name__ == "__main__":
    main()
