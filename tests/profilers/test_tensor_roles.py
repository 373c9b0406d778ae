"""Roles of a transformer's layers by their names and by what they read."""

from collections.abc import Sequence

import pytest
from torch import nn

from hetflow.profilers.operator_counts import (
    NoTensorRolesError,
    heads_divisor,
    shared_layers,
    tensor_roles,
)
from hetflow.runtime import tensor_parallel
from hetflow.schema.layers import TensorRole

GPT2 = (
    "wte", "drop", "h.0.ln_1", "h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.ln_2", "h.0.mlp.c_fc",
    "h.0.mlp.act", "h.0.mlp.c_proj", "ln_f", "lm_head",
)  # fmt: skip
LLAMA = (
    ("norm", "attn.q_proj"), ("norm", "attn.k_proj"), ("attn.q_proj", "attn.q_norm"),
    ("norm", "attn.v_proj"), ("attn.k_proj", "attn.v_proj"), ("attn.q_norm", "attn.v_proj"),
    ("attn.v_proj", "attn.o_proj"),
)  # fmt: skip

COLUMN = ("c_attn", "c_fc", "lm_head", "q_proj", "k_proj", "v_proj", "up_proj", "fc1")
ROW = ("c_proj", "o_proj", "fc2")


def shared(ids: Sequence[str]) -> dict[str, TensorRole]:
    """The roles of these layers if a model has them under such names."""
    found: dict[str, TensorRole] = {name: "column" for name in ids if name.endswith(COLUMN)}
    found |= {name: "row" for name in ids if name.endswith(ROW)}
    return found | {name: "vocabulary" for name in ids if name == "wte"}


def test_gpt2_in_a_line() -> None:
    edges = list(zip(GPT2, GPT2[1:], strict=False))
    roles = tensor_roles(GPT2, edges, shared(GPT2))
    assert [name for name in GPT2 if roles[name] == "column"] == [
        "h.0.attn.c_attn", "h.0.mlp.c_fc", "lm_head",
    ]  # fmt: skip
    assert [name for name in GPT2 if roles[name] == "row"] == ["h.0.attn.c_proj", "h.0.mlp.c_proj"]
    assert roles["wte"] == "vocabulary"
    assert roles["h.0.mlp.act"] == "sharded"
    assert {roles[name] for name in ("drop", "h.0.ln_1", "h.0.ln_2", "ln_f")} == {"replicated"}


def test_llamas_three_products_read_one_norm() -> None:
    ids = ("norm", "attn.q_proj", "attn.q_norm", "attn.k_proj", "attn.v_proj", "attn.o_proj")
    assert list(tensor_roles(ids, LLAMA, shared(ids)).values()) == [
        "replicated", "column", "sharded", "column", "column", "row",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (("conv", "relu", "fc"), "none of its layers is shared"),
        (("norm", "mlp.c_proj"), "mlp.c_proj reads what no column-parallel layer made"),
        (("mlp.fc1", "act", "mlp.up_proj"), "mlp.up_proj reads what a column-parallel layer made"),
    ],
)
def test_what_no_group_can_share(ids: tuple[str, ...], said: str) -> None:
    with pytest.raises(NoTensorRolesError, match=said):
        tensor_roles(ids, list(zip(ids, ids[1:], strict=False)), shared(ids))


def test_a_row_may_add_the_residual_that_it_reads() -> None:
    edges = [("norm", "fc1"), ("fc1", "fc2"), ("norm", "fc2")]
    ids = ("norm", "fc1", "fc2")
    assert tensor_roles(ids, edges, shared(ids))["fc2"] == "row"


def test_a_residual_that_joins_split_and_whole_is_not_understood() -> None:
    ids = ("a", "fc1", "add", "fc2")
    with pytest.raises(NoTensorRolesError, match="add reads what is split, and what is whole"):
        tensor_roles(ids, [("a", "fc1"), ("fc1", "add"), ("a", "add")], shared(ids))


def test_degrees_divide_every_number_of_heads() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(24, 12), nn.MultiheadAttention(24, 8)])
    assert heads_divisor(model) == 4
    with pytest.raises(NoTensorRolesError, match="no attention heads"):
        heads_divisor(nn.Linear(2, 2))


class Block(nn.Module):
    def __init__(self, up: str, down: str) -> None:
        super().__init__()
        self.add_module(up, nn.Linear(8, 16))
        self.add_module(down, nn.Linear(16, 8))


def test_only_what_a_launch_can_share_is_estimated() -> None:
    model = Block("up_proj", "down_proj")
    assert shared_layers(model) == {"up_proj": "column", "down_proj": "row"}
    unknown = Block("up", "down")
    with pytest.raises(NoTensorRolesError, match="no layers of Block are known"):
        shared_layers(unknown)
    tensor_parallel(unknown, {"up": "column", "down": "row"})
    assert shared_layers(unknown) == {"up": "column", "down": "row"}
    swapped = Block("down_proj", "up_proj")
    with pytest.raises(NoTensorRolesError, match="down_proj has the name of a layer that reads a"):
        shared_layers(swapped)
