"""What a step computes on parts of a batch gives the batch's number, or is refused."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hetflow.runtime.adapters.numbers import (
    LOSS,
    CountedPart,
    ScriptStep,
    TriedStep,
    joined,
    slope_of,
)
from hetflow.runtime.adapters.training import BatchPart
from hetflow.runtime.data import rows_of
from hetflow.schema.errors import TargetError

Rows = dict[str, Tensor]
Function = Callable[[nn.Module, Rows], Tensor]


class OneWorker:
    """A training of one worker, which has the whole batch."""

    is_between_steps = True
    world_size = 1
    sharing = None

    def __init__(self, num_samples: int) -> None:
        self.piece = BatchPart(num_samples, 0, num_samples, num_samples, ((0, num_samples),))

    def numbers_of_all(self, own: list[float]) -> list[list[float]]:
        return [own]

    def are_all_true(self, own: bool) -> bool:
        return own

    def exchanged(self, own: object) -> list[object]:
        return [own]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 5).double()


def batch_of(model: nn.Module) -> Rows:
    drawn = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (9, 7), generator=drawn)
    labels[torch.arange(7) >= torch.randint(2, 8, (9, 1), generator=drawn)] = -100
    return {"x": torch.randn(9, 7, 6, generator=drawn, dtype=torch.float64), "labels": labels}


def tokens(model: nn.Module, rows: Rows) -> Tensor:
    return cross_entropy(model(rows["x"]).flatten(0, 1), rows["labels"].flatten())


def following(model: nn.Module, rows: Rows) -> Tensor:
    return cross_entropy(model(rows["x"][:, :-1]).flatten(0, 1), rows["labels"][:, 1:].flatten())


def squares(model: nn.Module, rows: Rows) -> Tensor:
    return model(rows["x"]).square().flatten(1).mean(1)


def numbers_of(function: Function, model: nn.Module) -> tuple[float, float, list[float]]:
    """(the whole batch's number, what its parts give, the weights of their losses)."""
    batch = batch_of(model)
    step = ScriptStep("training_step", OneWorker(9), model)  # type: ignore[arg-type]

    def call(rows: Rows) -> TriedStep:
        loss = function(model, rows)
        slope = slope_of(LOSS, loss, model.parameters())
        return TriedStep({LOSS: float(loss), **slope.numbers}, slope.scales)

    step.try_if_due(call, batch)
    shares = [rows_of(batch, 9, *ends) for ends in ((0, 2), (2, 9))]
    parts = [CountedPart.of(rows, len(rows["x"])) for rows in shares]
    weights = step.weights(call, batch, parts)
    numbers = [{LOSS: float(function(model, rows))} for rows in shares]
    found = step.of_batch(numbers, parts, call, batch)
    return float(function(model, batch)), found[LOSS], weights


@pytest.mark.parametrize(
    "function",
    [
        tokens,
        following,
        lambda model, rows: squares(model, rows).mean(),
        lambda model, rows: squares(model, rows).sum(),
        lambda model, rows: following(model, rows) + torch.rand(len(rows["x"])).mean() * 0,
    ],
    ids=["labels", "following labels", "mean", "sum", "draws"],
)
def test_losses_of_parts_make_the_batchs_value_and_gradient(
    function: Function, model: nn.Module
) -> None:
    whole, found, weights = numbers_of(function, model)
    assert found == pytest.approx(whole, rel=1e-12)
    batch = batch_of(model)
    shares = [rows_of(batch, 9, *ends) for ends in ((0, 2), (2, 9))]
    losses = [function(model, rows) * w for rows, w in zip(shares, weights, strict=True)]
    parameters = list(model.parameters())
    expected = torch.autograd.grad(function(model, batch), parameters)
    for one, other in zip(expected, torch.autograd.grad(sum(losses), parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", [tokens, following])
def test_equal_losses_before_training_are_told_apart_by_their_gradients(
    function: Function, model: nn.Module
) -> None:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # then every label costs log 5
    _, _, weights = numbers_of(function, model)
    labels = batch_of(model)["labels"][:, 1 if function is following else 0 :]
    counts = [int(rows.ne(-100).sum()) for rows in (labels[:2], labels[2:])]
    assert weights == pytest.approx([count / sum(counts) for count in counts], rel=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda model, rows: squares(model, rows).mean().exp(),
        lambda model, rows: squares(model, rows).max(),
        lambda model, rows: squares(model, rows).mean() / squares(model, rows).mean().detach(),
        lambda model, rows: squares(model, rows).softmax(0).square().sum(),
    ],
    ids=["exponential", "largest", "normalised", "softmax over samples"],
)
def test_losses_that_do_not_follow_from_their_parts_are_refused(
    function: Function, model: nn.Module
) -> None:
    with pytest.raises(TargetError, match="the loss of a batch does not follow"):
        numbers_of(function, model)


def test_logged_values_are_put_together_by_what_they_are(model: nn.Module) -> None:
    step = ScriptStep("validation_step", OneWorker(9), model)  # type: ignore[arg-type]
    batch = batch_of(model)

    def numbers(rows: Rows) -> dict[str, float]:
        each = squares(model, rows)
        right = each.gt(0.3)
        values = [each.mean(), each.max(), each.min(), right.sum(), right.double().mean()]
        names = ("mean", "largest", "smallest", "count", "share")
        found = {name: float(value) for name, value in zip(names, values, strict=True)}
        return {**found, "rows": float(len(each)), "rate": 0.1}

    shares = [rows_of(batch, 9, *ends) for ends in ((0, 2), (2, 9))]
    parts = [CountedPart.of(rows, len(rows["x"])) for rows in shares]
    found = step.of_batch(
        [numbers(rows) for rows in shares], parts, lambda rows: TriedStep(numbers(rows), {}), batch
    )
    assert found == pytest.approx(numbers(batch), rel=1e-12)


def test_a_trial_changes_nothing_that_the_step_can_reach(model: nn.Module) -> None:
    norm = nn.BatchNorm1d(7).double()
    seen: list[float] = []
    before = norm.running_mean.clone()
    drawn = torch.get_rng_state()

    def call(rows: Rows) -> TriedStep:
        seen.append(0.0)
        return TriedStep({LOSS: float(norm(rows["x"]).square().mean() + torch.rand(1) * 0)}, {})

    step = ScriptStep("training_step", OneWorker(9), norm)  # type: ignore[arg-type]
    step.try_if_due(call, batch_of(model))
    assert not seen
    assert torch.equal(norm.running_mean, before)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_batches_of_many_structures_are_cut_and_joined() -> None:
    x = torch.arange(6)
    batch = {"x": x, "pair": (x[:, None], ["a", "b", "c", "d", "e", "f"]), "rate": 0.5, "all": None}
    parts = [rows_of(batch, 6, 0, 2), rows_of(batch, 6, 2, 6)]
    assert parts[0]["pair"][1] == ["a", "b"]
    whole = joined(parts, [2, 4], "here")
    assert torch.equal(whole["x"], x)
    assert whole["pair"][1] == batch["pair"][1]
    assert whole["rate"] == 0.5
    images = [torch.zeros(3, 4), torch.zeros(3, 5)]  # of unlike shapes, one for each sample
    assert len(rows_of(images, 2, 1, 2)) == 1
    with pytest.raises(TargetError, match="without an entry for each of its 6 samples"):
        rows_of({"x": torch.zeros(4)}, 6, 0, 2)
    with pytest.raises(TargetError, match="cannot be put together"):
        joined([torch.zeros(2, 3), torch.zeros(4, 5)], [2, 4], "predict_step returns")
    assert math.isnan(joined([math.nan], [6], "here"))
