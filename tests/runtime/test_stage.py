"""One stage alone: what it holds of a microbatch, and inputs that it must not write on."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hetflow.runtime.pipeline.cut import cut
from hetflow.runtime.pipeline.stage import StageRunner
from hetflow.runtime.pipeline.trace import layers_of


def first_of_two(model: nn.Module, first: int) -> StageRunner:
    layered = layers_of(model)
    names = [layer.id for layer in layered.layers]
    part = cut(layered, [names[:first], names[first:]])[0]
    return StageRunner(part, recompute=False, device=torch.device("cpu"))


def test_an_output_that_was_sent_is_not_held_until_the_backward_pass() -> None:
    stage = first_of_two(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 1)
    (output,) = stage.forward(0, {"input": torch.randn(2, 4)}, ((), ()), None)
    stage.keep(0, (output,))
    sent, shape = weakref.ref(output), output.shape
    del output
    assert sent() is None
    stage.backward(0, (torch.ones(shape),))
    assert stage.parameters["0.bias"].grad is not None
    assert torch.equal(stage.parameters["0.bias"].grad, torch.full((4,), 2.0))


class Writes(nn.Module):
    """Writes on what an earlier stage made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.last = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(nn.functional.relu(self.same(self.first(x)), inplace=True))
        return out


def test_functions_may_write_on_received_inputs() -> None:
    part = cut(layers_of(Writes()), [["first"], ["same", "last"]])[1]
    stage = StageRunner(part, recompute=False, device=torch.device("cpu"))
    received = torch.randn(2, 4)
    before = received.clone()
    loss = stage.forward(0, {}, ((received,), (True,)), None).sum()
    stage.keep(0, (loss,))
    (gradient,) = stage.backward(0, None)
    assert gradient.shape == received.shape
    assert torch.equal(received, before)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_only_inputs_that_layers_may_write_on_are_copied(first: int) -> None:
    """Behind the linear layer the ReLU writes on its output, or through an Identity on it."""
    layers = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity(), nn.ReLU(inplace=True)
    part = cut(layers_of(nn.Sequential(*layers)), [list("0123")[:first], list("0123")[first:]])[1]
    stage = StageRunner(part, recompute=False, device=torch.device("cpu"))
    received = torch.randn(2, 4)
    before, read = received.clone(), []
    part.module.get_submodule(str(first)).register_forward_pre_hook(
        lambda _, values: read.append(values[0].data_ptr())
    )
    loss = stage.forward(0, {}, ((received,), (True,)), None).sum()
    assert torch.equal(received, before)
    assert (read == [received.data_ptr()]) == (first == 1)
    stage.keep(0, (loss,))
    message = weakref.ref(received.untyped_storage())
    del received
    assert (message() is None) == (first > 1)  # the copy takes its place
    (gradient,) = stage.backward(0, None)
    assert gradient.shape == before.shape


class Unpacks(nn.Module):
    """Unpacks a tensor into its parts, as attention does with queries, keys and values."""

    def __init__(self, is_written: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.ReLU(inplace=is_written)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x).view(-1, 3, 4).transpose(0, 1)
        out: torch.Tensor = self.last(q) * k + v
        return out


@pytest.mark.parametrize("is_written", [False, True])
def test_a_tensor_is_unpacked_at_once_unless_a_part_is_written_on(is_written: bool) -> None:
    model = Unpacks(is_written)
    part = cut(layers_of(model), [["first", "last"]])[0]
    stage = StageRunner(part, recompute=False, device=torch.device("cpu"))
    x = torch.randn(2, 4)
    output = stage.forward(0, {"x": x}, ((), ()), None)
    stage.keep(0, (output.sum(),))
    with torch.profiler.profile() as profile:
        stage.backward(0, None)
    names = {event.key for event in profile.key_averages()}
    assert ("UnbindBackward0" in names) != is_written
    got = model.first.weight.grad
    q, k, v = model.first(x).view(-1, 3, 4).transpose(0, 1)
    (expected,) = torch.autograd.grad((q.relu() * k + v).sum(), [model.first.weight])
    assert got is not None
    assert torch.equal(got, expected)


def test_every_backward_pass_is_in_its_context() -> None:
    """What it recomputes for a checkpoint of the script's may open a region of column layers."""
    events: list[str] = []

    @contextmanager
    def passing() -> Iterator[None]:
        events.append("begins")
        yield
        events.append("ends")

    part = cut(layers_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), [["0"], ["1"]])[1]
    stage = StageRunner(part, recompute=False, device=torch.device("cpu"), passing=passing)
    gradients = (torch.ones(2, 4),)
    for is_whole in (True, False):
        output = stage.forward(0, {}, ((torch.randn(2, 4),), (True,)), None)
        output.register_hook(lambda _: events.append("runs"))
        stage.keep(0, (output,))
        del output
        if is_whole:
            stage.backward(0, gradients)
        else:
            stage.backward_input(0, gradients)
            stage.backward_weight(0)
    once = ["begins", "runs", "ends"]
    forward = ["begins", "ends"]
    assert events == [*forward, *once, *forward, *once, *once]
