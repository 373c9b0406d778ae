"""One stage alone: what it holds of a microbatch, and inputs that it must not write on."""

import weakref

import torch
from torch import nn

from hetflow.runtime.pipeline.cut import cut
from hetflow.runtime.pipeline.stage import Stage
from hetflow.runtime.pipeline.trace import layers_of


def first_of_two(model: nn.Module, first: int) -> Stage:
    layered = layers_of(model)
    names = [layer.id for layer in layered.layers]
    part = cut(layered, [names[:first], names[first:]])[0]
    return Stage(part, recompute=False, device=torch.device("cpu"))


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
    stage = Stage(part, recompute=False, device=torch.device("cpu"))
    received = torch.randn(2, 4)
    before = received.clone()
    loss = stage.forward(0, {}, ((received,), (True,)), None).sum()
    stage.keep(0, (loss,))
    (gradient,) = stage.backward(0, None)
    assert gradient.shape == received.shape
    assert torch.equal(received, before)
