"""Timing passes inside this process: what is one, what counts, what is refused."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hetflow.profilers.bench import Bench, move
from hetflow.profilers.targets import Workload
from hetflow.profilers.timing import RepeatPolicy
from hetflow.schema.errors import TargetError
from hetflow.schema.optimizer import NAMES, named_optimizer

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
