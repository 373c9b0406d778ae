"""Recomputed and offloaded layers train as others do, and leave buffers and draws as they are."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from hetflow.runtime import offload
from hetflow.runtime.activations import repeated_layers, treat, treated
from hetflow.schema.errors import TargetError
from hetflow.schema.options import Activations
from hetflow.tests.runtime.host_lane import HostLane, install


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> HostLane:
    """The lane of the host's own devices."""
    monkeypatch.setattr(offload, "LANES", {})
    monkeypatch.setattr(offload, "_LEAST_BYTES", 0)
    return install()


class Block(nn.Module):
    """A layer that counts its calls, also in a buffer that it reads, and draws."""

    calls = 0
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        Block.calls += 1
        self.seen.add_(1)
        first, second = self.last(self.drop(self.norm(x))).chunk(2, -1)
        found: Tensor = x + scale * first * second.sigmoid() * self.seen.clone()
        return found


class Model(nn.Module):
    """Two repeated layers behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean()


@pytest.mark.parametrize(("how", "calls"), [("recomputed", 8), ("offloaded", 4)])
def test_gradients_buffers_and_draws_are_the_same(
    lane: HostLane, how: Activations, calls: int
) -> None:
    torch.manual_seed(1)
    model = Model()
    other, x = deepcopy(model), torch.randn(6, 4)
    assert list(repeated_layers(other)) == ["blocks.0", "blocks.1"]
    treat(repeated_layers(other).values(), how)
    copied = deepcopy(other)
    for one in (model, other, copied):
        torch.manual_seed(2)
        Block.calls = 0
        loss = one(x)
        loss.backward(retain_graph=True)
        (loss + one(x)).backward()  # twice, and layers of two passes
        assert Block.calls == (4 if one is model else calls + 2 * (how == "recomputed"))
    assert isinstance(other.blocks[0], Block)
    assert (lane.num_put > 0) == (how == "offloaded")
    for one in (other, copied):
        for mine, plain in zip(one.state_dict().values(), model.state_dict().values(), strict=True):
            assert torch.equal(mine, plain)
        for mine, plain in zip(one.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.grad, plain.grad)


@pytest.mark.slow  # imports torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler reads
@pytest.mark.parametrize("how", ["recomputed", "offloaded"])
def test_compiled_layers_are_treated_alike(lane: HostLane, how: Activations) -> None:
    torch.manual_seed(1)
    model, x = Model(), torch.randn(6, 4)
    for block in model.blocks:
        block.drop.p = 0.0
    other, graphs = deepcopy(model), list[torch.fx.GraphModule]()

    def compiled(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    treat(other.blocks, how)
    for block in other.blocks:
        block.compile(backend=compiled)
    for one in (model, other):
        one(x).backward()
    assert graphs or how == "recomputed"  # the compiler leaves a counter that runs twice alone
    assert (lane.num_put > 0) == (how == "offloaded")
    for mine, plain in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, plain.grad)


def test_layers_keep_their_activations_again() -> None:
    model, x = Model(), torch.randn(6, 4)
    with treated(model, "recomputed"):
        with torch.no_grad():
            Block.calls = 0
            model(x)
        assert Block.calls == 2
    assert type(model.blocks[0]) is Block
    treat(model.blocks, "kept")
    Block.calls = 0
    model(x).backward()
    assert Block.calls == 2


def test_batch_norm_is_never_run_again() -> None:
    """Its statistics may be of all workers, and a second pass would meet nobody."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)))
    with (
        pytest.raises(TargetError, match="those with batch norm cannot"),
        treated(model, "recomputed"),
    ):
        pass
    with treated(model, "offloaded"):
        model(torch.randn(3, 2)).sum().backward()
    assert model[0][1].num_batches_tracked == 1
