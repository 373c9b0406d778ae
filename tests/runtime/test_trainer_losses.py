"""Trainer's trial of a loss: every form of the batch's loss is right, or it is refused."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetflow.runtime.adapters import losses
from hetflow.runtime.adapters.transformers import LossForm, form_of
from hetflow.schema.errors import TargetError
from hetflow.tests.runtime.script_campaign import LOSSES, RIGHT

SHARES = ([(0, 18)], [(18, 24)])
SUMS = {"sum", "sum / 16", "variational"}
DIVIDED = {"masked", "mostly full mask", "ignoring", "class weights"}


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch note what keeps a divisor from being nothing, in this test only."""
    for kind in (torch, Tensor):
        for name in ("clamp", "clamp_min", "clip"):
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, getattr(kind, name))
    losses.adapt()


class Worker:
    """A worker's training, whose exchanges go over the workers' threads."""

    has_samples = True

    def __init__(
        self,
        rank: int,
        parts: list[tuple[int, int]],
        sums: "Sums",
        some_run_parts: bool = False,
    ) -> None:
        self._rank, self._parts, self._sums = rank, parts, sums
        self.world_size, self.some_run_parts = len(SHARES), some_run_parts
        self.place = SimpleNamespace(device=torch.device("cpu"))
        self.piece = SimpleNamespace(own_samples=parts[-1][1] - parts[0][0], num_samples=24)

    def parts_of(self, _: Any) -> list[tuple[int, int]]:
        return self._parts

    def sum_of(self, own: Tensor) -> Tensor:
        return torch.stack(self._sums.gathered(self._rank, own)).sum(0)

    def exchanged(self, own: Any) -> list[Any]:
        return self._sums.gathered(self._rank, own)


class Sums:
    """What threads that all call it as often give each other."""

    def __init__(self, number: int) -> None:
        self._given: list[Any] = [None] * number
        self._barrier = threading.Barrier(number, timeout=30)

    def gathered(self, rank: int, own: Any) -> list[Any]:
        self._given[rank] = own
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


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


def on_workers(function: Callable[[Worker, dict[str, Tensor]], Any], batch, parts=False) -> list:
    """What a function gives on each worker, of its share of a batch."""
    sums = Sums(len(SHARES))

    def found(rank: int) -> Any:
        start, end = SHARES[rank][0][0], SHARES[rank][-1][1]
        share = {name: value[start:end] for name, value in batch.items()}
        return function(Worker(rank, SHARES[rank], sums, parts), share)

    with ThreadPoolExecutor(len(SHARES)) as workers:
        return [done.result() for done in [workers.submit(found, rank) for rank in range(2)]]


def forms_of(
    text: str, model: nn.Module, batch: dict[str, Tensor], *, parts: bool = False
) -> list[LossForm]:
    """The form that each worker finds of the loss of its share."""
    return on_workers(lambda w, share: form_of(Script(text), model, share, None, w), batch, parts)


def batch_loss_of(form: LossForm, text: str, model: nn.Module, batch: dict[str, Tensor]) -> float:
    """The loss of a batch, put together from those of its shares."""

    def weighted(worker: Worker, share: dict[str, Tensor]) -> float:
        loss = Script(text).compute_loss(model, share, None)
        (weight,) = form.weights([(share, worker.piece.own_samples)], worker.piece, worker)
        if form.kind.startswith("divisor"):
            weight = form.weight_of(loss, worker)
        return float(loss.detach()) * weight / worker.world_size if weight else 0.0

    return sum(on_workers(weighted, batch))


def with_full_masks(batch: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    """A batch whose mask hides nothing in the first rows of a share."""
    x = batch["x"].clone()
    x[start : start + 4, 0] = 4.0
    return {**batch, "x": x}


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_loss_has_a_known_form_or_is_refused(loss: str) -> None:
    text = LOSSES[loss]
    for seed in range(8):
        batch, model = with_full_masks(with_full_masks(batch_of(seed), 0), 18), model_of(seed)
        if loss not in SUMS | RIGHT | {"masked by item"}:
            with pytest.raises(TargetError, match="is not known"):
                forms_of(text, model, batch)
            continue
        try:
            form, other = forms_of(text, model, batch)
        except TargetError:
            assert loss == "masked by item"  # where a part of the trial is hidden
            continue
        assert form == other
        assert (form.kind == "sum") == (loss in SUMS)
        later = batch_of(seed + 8)
        later["x"][18:, 0] = 0.0 if seed % 2 else later["x"][18:, 0]  # a mask hides a whole share
        for given in (batch, later):
            share = {name: value[18:] for name, value in given.items()}
            if loss == "masked by item" and not (share["x"][:, 0] > 3).any():
                found = Script(text).compute_loss(model, share, None)
                with pytest.raises(TargetError, match="the loss of a share is 0"):
                    form.weight_of(found, Worker(1, SHARES[1], Sums(1)))
                continue
            expected = float(Script(text).compute_loss(model, given, None).detach())
            assert batch_loss_of(form, text, model, given) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", sorted(DIVIDED))
def test_what_divides_a_loss_is_not_known_ahead_for_several_virtual_nodes(loss: str) -> None:
    """Also where a mask is seen only by the gradients: all losses of samples are equal."""
    for last_weights in (1.0, 0.0):
        with pytest.raises(TargetError, match="is not known"):
            forms_of(LOSSES[loss], model_of(0, last_weights), batch_of(0), parts=True)


def test_a_mask_that_hides_nothing_is_seen() -> None:
    each = 'each = F.cross_entropy(out, y, reduction="none")\n'
    batch = {**batch_of(0), "mask": torch.ones(24, dtype=torch.float64)}
    text = f"{each}loss = (each * mask).sum() / mask.sum()"
    with pytest.raises(TargetError, match="is not known"):
        forms_of(text, model_of(0), batch, parts=True)
    forms = forms_of(f"{each}loss = (each * mask).mean()", model_of(0), batch)
    assert {form.kind for form in forms} == {"samples"}


def test_ones_that_are_no_mask_are_left_alone_where_the_loss_needs_them() -> None:
    batch = {**batch_of(0), "sizes": torch.ones(24, dtype=torch.int64)}
    text = "if not sizes.all(): raise ValueError\nloss = F.cross_entropy(out, y)"
    assert {form.kind for form in forms_of(text, model_of(0), batch, parts=True)} == {"samples"}


def test_labels_that_begin_to_count_nothing_are_refused() -> None:
    drawn = batch_of(0)
    batch = {"x": drawn["x"], "labels": drawn["y"]}
    form = forms_of("loss = F.cross_entropy(out, labels)", model_of(0), batch, parts=True)[0]
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
    first, later, model = batch_of(0), batch_of(1), model_of(0)
    first["x"][:, 0] = 4.0
    for loss in ("masked", "ignoring"):
        form = forms_of(LOSSES[loss], model, first, parts=True)[1]
        script = Script(LOSSES[loss])
        form.check(script.compute_loss(model, first, None), first)
        with pytest.raises(TargetError, match="a mean over a mask or over some targets"):
            form.check(script.compute_loss(model, later, None), later)
    for loss in RIGHT - DIVIDED | SUMS:
        for form in forms_of(LOSSES[loss], model, first, parts=True):
            form.check(Script(LOSSES[loss]).compute_loss(model, later, None), later)


def test_a_loss_that_is_divided_in_another_way_later_is_refused() -> None:
    batch, model = batch_of(0), model_of(0)
    form = forms_of(LOSSES["masked"], model, batch)[0]
    text = LOSSES["masked"] + "\nloss = loss / torch.tensor(1.0)"
    with pytest.raises(TargetError, match="divided in another way"):
        form.weight_of(Script(text).compute_loss(model, batch, None), Worker(0, SHARES[0], Sums(1)))


def test_a_loss_that_is_nothing_tells_no_form_and_later_batches_do() -> None:
    """A student that is still its teacher, say: a sum, and any mean, are 0 there."""
    batch, model = batch_of(0), model_of(1)
    text = "loss = F.cross_entropy(out, y)"
    first = forms_of(f"{text} * 0", model, batch)[0]
    assert not first.is_told
    later = on_workers(
        lambda w, share: form_of(Script(text), model, share, None, w, first), batch_of(2)
    )[0]
    assert later.is_told
    assert later.kind != "sum"
    with pytest.raises(TargetError, match="in another way than in earlier batches"):
        on_workers(
            lambda w, share: form_of(
                Script(text.replace("y)", "y, reduction='sum')")), model, share, None, w, later
            ),
            batch,
        )
