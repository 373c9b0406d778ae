"""Timing passes inside this process: what is one, what counts, what is refused."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hetflow.profilers.bench import OPTIMIZERS, Bench, move
from hetflow.profilers.targets import Workload
from hetflow.profilers.timing import RepeatPolicy
from hetflow.schema.errors import TargetError

Loss = Callable[[nn.Module, Any], Any]
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_by_name(name: str) -> None:
    bench = Bench(workload(), "cpu", name)
    assert type(bench.optimizer).__name__.lower() == name
    assert bench.measure_update(2, POLICY).repeats == 3


def test_the_workloads_own_optimizer_wins() -> None:
    own = workload(make_optimizer=lambda parameters: torch.optim.RMSprop(parameters))
    assert isinstance(Bench(own, "cpu", "adam").optimizer, torch.optim.RMSprop)


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
