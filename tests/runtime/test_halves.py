"""A backward pass in two halves: the same gradients, and no operator's twice."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hetflow.runtime.pipeline.stage import backward_input

WIDTH = 8


class Tied(nn.Module):
    """One weight in two places, one of them behind the other; and a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.tied(x).relu()
        return self.tied(self.other(first)) + x, first, self.other.weight.square()


def chain() -> nn.Module:
    """Layers one after another."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()
    )


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [chain, Tied])
@pytest.mark.parametrize("is_loss", [False, True])
def test_both_halves_give_what_a_whole_pass_gives(
    make: Callable[[], nn.Module], is_loss: bool
) -> None:
    torch.manual_seed(0)
    model = make()
    weights = list(model.parameters())
    leaf = torch.randn(4, WIDTH, requires_grad=True)

    def results() -> list[Tensor]:
        made = model(leaf)
        made = list(made) if isinstance(made, tuple) else [made]
        return [functional.mse_loss(made[0], torch.ones_like(leaf))] if is_loss else made

    whole = results()
    gradients = None if is_loss else [torch.randn_like(one) for one in whole]
    with Calls() as once:
        torch.autograd.backward(whole, gradients)
    expected = [leaf.grad, *(weight.grad for weight in weights)]
    leaf.grad = None
    model.zero_grad()

    roots = results() if is_loss else [get_gradient_edge(one) for one in results()]
    with Calls() as halved:
        (found,), half = backward_input(roots, gradients, [leaf], weights)
        assert half is not None
        assert leaf.grad is None
        assert all(weight.grad is None for weight in weights)
        half.run()
    assert all(map(torch.equal, [found, *(weight.grad for weight in weights)], expected))
    if make is chain:  # of other operators there are several that cost nothing, such as views
        for name in ("mm", "gelu_backward", "threshold_backward", "add"):
            assert halved.counts[f"{name}.default"] == once.counts[f"{name}.default"], name


def test_where_nothing_leads_to_an_input_the_second_half_is_the_whole_pass() -> None:
    weight = torch.ones(3, requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    found, half = backward_input([weight.square().sum()], None, [unused], [weight])
    assert found == (None,)
    assert half is None
