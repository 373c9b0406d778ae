"""Recomputed layers train as others do, and leave statistics and draws as they are."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from hetflow.runtime.recompute import keep, recompute, recomputing, repeated_layers


class Block(nn.Module):
    """Layers with statistics and draws; counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        Block.calls += 1
        found: Tensor = x + scale * self.last(self.drop(self.norm(x)))
        return found


class Model(nn.Module):
    """Two repeated layers between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean()


def test_gradients_statistics_and_draws_are_the_same() -> None:
    torch.manual_seed(1)
    model = Model()
    other, x = deepcopy(model), torch.randn(6, 4)
    assert list(repeated_layers(other)) == ["blocks.0", "blocks.1"]
    recompute(repeated_layers(other).values())
    copied = deepcopy(other)
    for one in (model, other, copied):
        torch.manual_seed(2)
        Block.calls = 0
        one(x).backward()
        assert Block.calls == (2 if one is model else 4)
    assert isinstance(other.blocks[0], Block)
    for one in (other, copied):
        for mine, plain in zip(one.state_dict().values(), model.state_dict().values(), strict=True):
            assert torch.equal(mine, plain)
        for mine, plain in zip(one.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.grad, plain.grad)


def test_layers_keep_their_activations_again() -> None:
    model, x = Model(), torch.randn(6, 4)
    with recomputing(model):
        with torch.no_grad():
            Block.calls = 0
            model(x)
        assert Block.calls == 2
    assert type(model.blocks[0]) is Block
    keep(model.blocks)
    Block.calls = 0
    model(x).backward()
    assert Block.calls == 2
