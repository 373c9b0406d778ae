"""Column-parallel layers that read one value: their gradients of it are summed together, once."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from hetflow.runtime.tensor.operators import SharedInput, TensorGroup

from .test_sequence import CHANNELS, HEADS, Threads, passes

BLOCKS = 2
GROUP = TensorGroup(2, 0, (0, 1))  # without a process group nothing is summed


class Attention(nn.Module):
    """Queries, keys and values from three layers, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(CHANNELS, CHANNELS, bias=name == "q_proj"))

    def forward(self, x: Tensor) -> Tensor:
        made = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        split = [y.unflatten(-1, (-1, CHANNELS // HEADS)).transpose(1, 2) for y in made]
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(CHANNELS, 24), nn.Linear(CHANNELS, 24)
        self.down_proj = nn.Linear(24, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(CHANNELS), Attention()
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(CHANNELS), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def decoder() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential()
    model.add_module("embedding", nn.Embedding(9, CHANNELS))
    model.add_module("layers", nn.Sequential(*[Block() for _ in range(BLOCKS)]))
    model.add_module("norm", nn.LayerNorm(CHANNELS))
    model.add_module("head", nn.Linear(CHANNELS, 9))
    return model.double()


@pytest.mark.parametrize("spreads", [False, True])
def test_each_pair_of_layers_sums_once_in_each_pass(
    spreads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = passes(decoder(), TensorGroup(), spreads=False)
    world = Threads(2, monkeypatch)
    found = world.run(partial(passes, decoder(), spreads=spreads))
    sharing = found[0]["sharing"]
    for one in found:
        torch.testing.assert_close(one["answer"], expected["answer"], rtol=1e-10, atol=1e-10)
    for name, whole in expected["gradients"].items():
        parts = [one["gradients"][name] for one in found]
        if name in sharing.cuts:
            total = sharing.cuts[name].whole(parts)
        else:
            total = sum(parts) if name in sharing.inner else parts[-1]
        torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-10)
    pairs = 2 * BLOCKS
    if spreads:  # as many as with fused layers (test_sequence.py)
        assert world.calls == {"all_gather": 3 * pairs + 2, "all_to_all_single": 2 * pairs}
    else:
        assert world.calls == {"all_reduce": 2 * pairs}


def test_an_input_is_shared_only_while_it_is_the_same() -> None:
    shared, value = SharedInput(GROUP), torch.ones(3, requires_grad=True) * 2
    first = shared.copy(value)
    assert shared.copy(value) is first
    assert shared.copy(value * 1) is not first
    first = shared.copy(value)
    with torch.no_grad():
        assert shared.copy(value) is value
        value.add_(1)  # another value in the same tensor
    assert shared.copy(value) is not first
    first = shared.copy(value)
    with saved_tensors_hooks(lambda kept: kept, lambda kept: kept):  # as inside a checkpoint
        assert shared.copy(value) is not first
    first = shared.copy(value)
    shared.forget()
    assert shared.copy(value) is not first
