"""Timing passes inside this process: what is one, what counts, what is refused."""

from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hetflow import runtime as hf
from hetflow.profilers.bench import Bench, move
from hetflow.profilers.layers import measure_layers
from hetflow.profilers.targets import Workload
from hetflow.profilers.timing import RepeatPolicy
from hetflow.schema.errors import TargetError
from hetflow.schema.optimizer import NAMES, named_optimizer

Loss = Callable[[nn.Module, Any], Any]


class Recurrent(nn.Module):
    """Parameters, buffers, a tensor that is neither, and a module that torch lays out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.scale = torch.rand(6)
        self.head = nn.Linear(6, 4)
        self.head.weight.data.mul_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.cells(x.unsqueeze(1))
        last: torch.Tensor = self.head(self.norm(states[:, 0]) * self.scale)
        return last


POLICY = RepeatPolicy(max_repeats=3, min_repeats=3)


def workload(loss: Loss = lambda model, x: model(x).sum(), **extra: Any) -> Workload:
    return Workload(
        model=nn.Linear(4, 4), make_batch=lambda n: torch.randn(n, 4), loss=loss, **extra
    )


def test_a_step_trains_and_timed_passes_do_not() -> None:
    bench = Bench(workload(), "cpu", "sgd")
    before = bench.model.weight.clone()
    batch = bench.make_batch(2)
    bench.time_pass(batch)
    assert torch.equal(bench.model.weight, before)
    bench.run_step(batch)
    assert not torch.equal(bench.model.weight, before)


def test_each_timed_pass_starts_from_cleared_gradients_in_the_same_memory() -> None:
    bench = Bench(workload(), "cpu", "sgd")
    batch = bench.make_batch(2)
    bench.run_step(batch)
    memory, gradient = bench.model.weight.grad.data_ptr(), bench.model.weight.grad.clone()
    bench.time_pass(batch)
    bench.time_pass(batch)
    assert bench.model.weight.grad.data_ptr() == memory
    assert torch.allclose(bench.model.weight.grad, gradient)


def test_sleeping_is_not_the_models_time_on_a_cpu() -> None:
    import time

    def sleepy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return model(batch).sum()

    result = Bench(workload(sleepy), "cpu", "sgd").measure(2, POLICY)
    assert result.wall_seconds >= 0.2
    assert result.timing.median_seconds < result.wall_seconds


def test_bytes_are_those_of_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    given = Workload(model=model, make_batch=len, loss=len)
    assert Bench(given, "cpu", "sgd").weight_bytes == (16 + 4) * 8


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_by_name_keep_what_their_names_say(name: str) -> None:
    model = nn.Linear(64, 64)
    loss = lambda model, x: model(x).sum()  # noqa: E731
    wide = Workload(model=model, make_batch=lambda n: torch.randn(n, 64), loss=loss)
    bench = Bench(wide, "cpu", name)
    kept = bench.optimizer_state(2)
    assert name.startswith(kept["name"].lower())
    # Beside tensors of the weights' shape there are counters of a few bytes.
    counted = kept["state_bytes"] / bench.weight_bytes
    stated = named_optimizer(name).state_bytes_per_weight_byte
    assert stated <= counted < stated + 0.01


def test_the_workloads_own_optimizer_wins() -> None:
    own = workload(make_optimizer=lambda parameters: torch.optim.RMSprop(parameters))
    bench = Bench(own, "cpu", "adam")
    assert isinstance(bench.optimizer, torch.optim.RMSprop)
    kept = bench.optimizer_state(2)
    assert (kept["name"], kept["is_own"]) == ("RMSprop", True)


def test_a_deferred_model_is_profiled_like_one_built_the_usual_way() -> None:
    benches = []
    for block in (nullcontext, hf.deferred):
        torch.manual_seed(1)
        with block():
            model = Recurrent()
        given = Workload(
            model=model,
            make_batch=lambda n: torch.randn(n, 4),
            loss=lambda model, x: model(x).square().mean(),
        )
        benches.append(Bench(given, "cpu", "adam"))
        benches[-1].run_step(benches[-1].make_batch(3))
    usual, filled = benches
    assert usual.weight_bytes == filled.weight_bytes
    # The same bits after a step: parameters, buffers, random batches and the optimizer's state.
    trained = [bench.model.state_dict() for bench in benches]
    assert list(trained[0]) == list(trained[1])
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    assert usual.optimizer_state(3)["state_bytes"] == filled.optimizer_state(3)["state_bytes"]
    rows = [measure_layers(bench, 2, 1)["nodes"] for bench in benches]
    counted = ("id", "op", "weight_bytes", "activation_bytes", "stashed_bytes", "workspace_bytes")
    assert [[row[key] for key in counted] for row in rows[0]] == [
        [row[key] for key in counted] for row in rows[1]
    ]


def test_a_model_without_values_is_refused() -> None:
    given = Workload(model=nn.Linear(4, 4, device="meta"), make_batch=len, loss=len)
    with pytest.raises(TargetError, match="weight is on the meta device, so it has no value"):
        Bench(given, "cpu", "sgd")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, x: model(x), r"got a tensor of shape \[2, 4\]"),
        (lambda model, x: None, "got NoneType"),
        (lambda model, x: model(x).sum().detach(), "loss.backward raised RuntimeError"),
        (lambda model, x: 1 / 0, "loss raised ZeroDivisionError"),
    ],
)
def test_a_loss_that_cannot_train_is_one_line(loss: Loss, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        Bench(workload(loss), "cpu", "sgd").measure(2, POLICY)


def test_batches_of_every_shape_are_moved() -> None:
    pair = namedtuple("pair", "x y")
    given = {"a": [torch.zeros(1)], "b": pair(torch.zeros(2), "text"), "c": 3}
    moved = move(given, "meta")
    assert moved["a"][0].device.type == "meta"
    assert isinstance(moved["b"], pair)
    assert moved["b"].x.device.type == "meta"
    assert moved["b"].y == "text"
    assert moved["c"] == 3
