"""Trainer's trial of a loss: every form of the batch's loss is right, or it is refused."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetflow.runtime.adapters.transformers import Form, form_of
from hetflow.schema.errors import TargetError
from hetflow.tests.runtime.script_campaign import LOSSES, REFUSED_BY_STEPS, RIGHT

SHARES = ([(0, 18)], [(18, 24)])
SUMS = {"sum", "sum / 16", "variational"}


class Worker:
    """A worker's training, whose sums go over the workers' threads."""

    def __init__(self, rank: int, parts: list[tuple[int, int]], sums: "Sums") -> None:
        self._rank, self._parts, self._sums = rank, parts, sums
        self.world_size = len(SHARES)
        self.place = SimpleNamespace(device=torch.device("cpu"))
        self.piece = SimpleNamespace(own_samples=parts[-1][1] - parts[0][0], num_samples=24)

    def parts_of(self, _: Any) -> list[tuple[int, int]]:
        return self._parts

    def sum_of(self, own: Tensor) -> Tensor:
        return self._sums.of(self._rank, own)


class Sums:
    """Sums over threads that all call it as often."""

    def __init__(self, number: int) -> None:
        self._given: list[Any] = [None] * number
        self._barrier = threading.Barrier(number, timeout=30)

    def of(self, rank: int, own: Tensor) -> Tensor:
        self._given[rank] = own
        self._barrier.wait()
        total: Tensor = torch.stack(self._given).sum(0)
        self._barrier.wait()
        return total


class Script:
    """What a trial asks of a Trainer."""

    def __init__(self, text: str) -> None:
        self._loss = compile(text, "loss", "exec")
        self.args = SimpleNamespace(average_tokens_across_devices=True, bf16=False, fp16=False)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        self.compute_loss_context_manager = contextlib.nullcontext

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs

    def compute_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        given = {"torch": torch, "F": F, "nn": nn, "model": model, "out": model(inputs["x"])}
        given |= inputs
        exec(self._loss, given)  # noqa: S102
        found: Tensor = given["loss"]
        return found


def batch_of(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = 3 + torch.randn(24, 6, generator=drawn, dtype=torch.float64)
    return {"x": x, "y": torch.randint(3, (24,), generator=drawn)}


def model_of(seed: int, last_weights: float = 1.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.mul_(last_weights)
    return model


def forms_of(text: str, model: nn.Module, batch: dict[str, Tensor]) -> list[Form]:
    """The form that each worker finds of the loss of its share."""
    sums = Sums(len(SHARES))

    def found(rank: int) -> Form:
        parts = SHARES[rank]
        share = {name: value[parts[0][0] : parts[-1][1]] for name, value in batch.items()}
        return form_of(Script(text), model, share, None, Worker(rank, parts, sums))

    with ThreadPoolExecutor(len(SHARES)) as workers:
        return [done.result() for done in [workers.submit(found, rank) for rank in range(2)]]


def with_full_masks(batch: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    """A batch whose mask hides nothing in the first rows of a share."""
    x = batch["x"].clone()
    x[start : start + 4, 0] = 4.0
    return {**batch, "x": x}


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_loss_has_a_known_form_or_is_refused(loss: str) -> None:
    for seed in range(8):
        batch = with_full_masks(with_full_masks(batch_of(seed), 0), 18)
        if loss in SUMS or loss in RIGHT - REFUSED_BY_STEPS:
            forms = forms_of(LOSSES[loss], model_of(seed), batch)
            assert {form.kind for form in forms} == {"sum" if loss in SUMS else "samples"}
        else:
            with pytest.raises(TargetError, match="is not known"):
                forms_of(LOSSES[loss], model_of(seed), batch)


def test_a_mask_is_seen_where_all_samples_losses_are_equal() -> None:
    """As before training, where the last layer begins with zeros."""
    model = model_of(0, last_weights=0.0)
    assert {f.kind for f in forms_of(LOSSES["mean"], model, batch_of(0))} == {"samples"}
    with pytest.raises(TargetError, match="is not known"):
        forms_of(LOSSES["masked"], model, batch_of(0))


def test_a_mask_that_hides_nothing_is_seen() -> None:
    each = 'each = F.cross_entropy(out, y, reduction="none")\n'
    batch = {**batch_of(0), "mask": torch.ones(24, dtype=torch.float64)}
    with pytest.raises(TargetError, match="is not known"):
        forms_of(f"{each}loss = (each * mask).sum() / mask.sum()", model_of(0), batch)
    forms = forms_of(f"{each}loss = (each * mask).mean()", model_of(0), batch)
    assert {form.kind for form in forms} == {"samples"}


def test_ones_that_are_no_mask_are_left_alone_where_the_loss_needs_them() -> None:
    batch = {**batch_of(0), "sizes": torch.ones(24, dtype=torch.int64)}
    text = "if not sizes.all(): raise ValueError\nloss = F.cross_entropy(out, y)"
    assert {form.kind for form in forms_of(text, model_of(0), batch)} == {"samples"}


def test_labels_that_begin_to_count_nothing_are_refused() -> None:
    drawn = batch_of(0)
    batch = {"x": drawn["x"], "labels": drawn["y"]}
    form = forms_of("loss = F.cross_entropy(out, labels)", model_of(0), batch)[0]
    share = {**batch, "labels": batch["labels"].clone()}
    worker = Worker(0, SHARES[0], Sums(1))
    assert form.weights([(share, 18)], worker.piece, worker) == [1.5]
    share["labels"][3] = -100
    with pytest.raises(TargetError, match="-100 now"):
        form.weights([(share, 18)], worker.piece, worker)


def test_a_mean_over_labels_that_are_ignored_counts_labels() -> None:
    drawn = batch_of(0)
    labels = drawn["y"].masked_fill(drawn["x"][:, 0] > 3, -100)
    forms = forms_of(
        "loss = F.cross_entropy(out, labels)", model_of(0), {"x": drawn["x"], "labels": labels}
    )
    assert {form.kind for form in forms} == {"labels"}


def test_a_mask_that_was_full_in_the_first_batch_is_refused_later() -> None:
    first, model = batch_of(0), model_of(0)
    first["x"][:, 0] = 4.0
    for loss in ("masked", "ignoring"):
        form = forms_of(LOSSES[loss], model, first)[1]
        script = Script(LOSSES[loss])
        form.check(script.compute_loss(model, first, None), first)
        later = batch_of(1)
        with pytest.raises(TargetError, match="a mean over a mask or over some targets"):
            form.check(script.compute_loss(model, later, None), later)
    for loss in RIGHT - REFUSED_BY_STEPS | SUMS:
        for form in forms_of(LOSSES[loss], model, first):
            form.check(Script(LOSSES[loss]).compute_loss(model, later, None), later)
