"""Train steps of which a late one reads weights outside of their layers. A script for launches.

Usage: sharded_reads.py FOLDER [WAY...]. Each worker writes what these ways of reading, or all, made
of each step from which they begin: losses and trained parameters, or the line that refuses it.
"""

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import hetflow as hf
from hetflow.schema.errors import TargetError
from hetflow.tests.runtime.sharded_run import WORDS, Model, loss_of

FIRST_STEPS = 3, 5, 6
"""Steps that test no loss."""


def _of(model: Any) -> nn.Parameter:
    found: nn.Parameter = model.blocks[1].up.weight
    return found


def _squares(parameters: Any) -> Any:
    return sum(p.square().sum() for p in parameters)


def _against_detached(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
    held = {name: 0.5 * p.detach() for name, p in model.named_parameters()}
    taught = functional_call(model, held, ids)
    return loss_of(model, ids, targets) + (model(ids) - taught.detach()).square().mean()


def _copied(model: Any) -> Any:
    return copy.deepcopy(_of(model)).square().sum().detach()


def _pickled(model: Any) -> Any:
    written = io.BytesIO()
    torch.save(_of(model), written)
    written.seek(0)
    return torch.load(written).square().sum().detach()


def _no_gradient(model: Any) -> Any:
    with torch.no_grad():
        return _of(model).norm()


def _model_copied(model: Any) -> Any:
    return _squares(copy.deepcopy(model).parameters()).detach()


AHEAD: dict[str, Callable[[Any], Any]] = {
    "detach": lambda model: _of(model).detach().norm(),
    "data": lambda model: _of(model).data.norm(),
    "no_grad": _no_gradient,
    "kept elsewhere": lambda model: model.kept[0].detach().norm(),
    "foreach": lambda model: sum(torch._foreach_norm([p.detach() for p in model.parameters()])),
    "as a list": lambda model: sum(map(sum, _of(model).tolist())),
    "numpy": lambda model: float(_of(model).detach().numpy().sum()),
    "transposed": lambda model: _of(model).T[0].sum().detach(),
    "a row": lambda model: _of(model)[0].sum().detach(),
    "iterated": lambda model: sum(row.sum().detach() for row in _of(model)),
    "state_dict": lambda model: model.state_dict()["blocks.1.up.weight"].norm(),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).detach().norm(),
    "copied": _copied,
    "model copied": _model_copied,
    "pickled": _pickled,
    "numel": lambda model: sum(p.numel() for p in model.parameters()) / 1e4,
    "shape": lambda model: _of(model).shape[0] / 10 + len(_of(model)) + _of(model).size(1),
    "types": lambda model: float(_of(model).dtype.itemsize + _of(model).is_floating_point()),
    "zeros_like": lambda model: torch.zeros_like(_of(model)).sum() + _of(model).new_ones(2).sum(),
    "square": lambda model: _of(model).square().sum(),
    "all squares": lambda model: _squares(model.parameters()),
    "all data": lambda model: _squares(p.data for p in model.parameters()),
}


def _ahead(read: Callable[[Any], Any]) -> Callable[..., Tensor]:
    def loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        found = read(model)
        return loss_of(model, ids, targets) * (1 + 0.01 * found)

    return loss


def _behind(read: Callable[[Any], Any]) -> Callable[..., Tensor]:
    def loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        found = loss_of(model, ids, targets)
        return found * (1 + 0.01 * read(model))

    return loss


WAYS: dict[str, Callable[..., Tensor]] = {
    **{f"{name} ahead": _ahead(read) for name, read in AHEAD.items()},
    **{f"{name} behind": _behind(AHEAD[name]) for name in ("detach", "square", "all squares")},
    "functional": _against_detached,
}


def train(
    way: Callable[..., Tensor], first: int, masters: torch.dtype | None = None, last: int = 0
) -> Any:
    """Losses and parameters of steps, of which those from the first one read, or the refusal.

    The last step is the first that reads, or ``last``. With it comes this worker's rank.
    """
    torch.manual_seed(0)
    model: Any = Model().double()
    model.kept = [_of(model)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job: Any = hf.prepare(model, optimizer, masters=masters)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (8 * max(first, last), 5), generator=generator)
    losses, said, step = [], "", 0

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (way if step >= first else loss_of)(model, x, y)

    try:
        for batch in job.batches(DataLoader(TensorDataset(ids, ids.flip(1)), batch_size=8)):
            step += 1
            optimizer.zero_grad()
            losses.append(float(job.backward(loss, batch)))
            optimizer.step()
        job.sync_buffers()
    except TargetError as refused:
        said = str(refused)
    except Exception as error:
        said = repr(error)
    made = said or (losses, [p.detach().clone() for p in model.parameters()])
    job.abandon()
    return made, job.rank


def main() -> None:
    """Train in the ways that are asked for, or in each, from each step."""
    found = {}
    for name, way in WAYS.items():
        if name not in (sys.argv[2:] or WAYS):
            continue
        is_first = name == "detach ahead"
        for first in FIRST_STEPS if is_first else FIRST_STEPS[:1]:
            found[name, first], rank = train(way, first, last=FIRST_STEPS[-1] * is_first)
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")


if __name__ == "__main__":
    main()
