"""What users list as blocks of shared states, and which of it counts."""

import logging
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import wrap

from hetflow.runtime.repeated_layers import agreed_blocks, layers_of, listed_blocks, repeated_layers
from hetflow.schema.errors import TargetError


class Tower(nn.Sequential):
    """Two layers that no number names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)


class Towers(nn.Module):
    """Three towers of unlike widths, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.right_b = Tower(64), Tower(32), Tower(16)
        self.tail = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)


MODEL = Towers()
ALL = ("left", "right", "right_b")


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ((), ()),
        (Tower, ALL),
        ("Tower", ALL),
        (["right_b", MODEL.left], ("left", "right_b")),
        ([MODEL.tail, "head"], ("tail.0", "tail.1", "head")),
        ("tail", ("tail.0", "tail.1")),
        (wrap.ModuleWrapPolicy({Tower}), ALL),
        (wrap.CustomPolicy(lambda module: module in (MODEL.left, MODEL)), ("left",)),
        (partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Tower}), ALL),
        # The left tower's first layer has 576 numbers, its second 520; the right tower has 552.
        (partial(wrap.size_based_auto_wrap_policy, min_num_params=550), ("left.up", "right")),
        (partial(wrap.size_based_auto_wrap_policy, min_num_params=9999), ()),
        # Towers within each other: the outer ones, without which all second layers stay whole.
        ([Tower, "left.up", "right.up", "right_b.up"], ALL),
        # The two largest of the inner ones are fewer than the outer one.
        (["left", "left.up", "left.down", MODEL.right, MODEL.right.up, MODEL.right.down],
         ("left.up", "left.down", "right.up", "right.down")),
        (nn.Tanh(), ()),
    ],
)  # fmt: skip
def test_blocks_are_listed_in_several_ways(listed: Any, names: tuple[str, ...]) -> None:
    assert listed_blocks(MODEL, listed) == names


def test_a_parameter_is_of_the_block_that_holds_it() -> None:
    homes = layers_of(MODEL, ALL)
    assert homes[id(MODEL.right_b.up.weight)] == "right_b"
    assert homes[id(MODEL.tail[0].weight)] == ""
    assert repeated_layers(MODEL, ALL) == {name: MODEL.get_submodule(name) for name in ALL}
    assert list(repeated_layers(MODEL)) == ["tail.0", "tail.1"]
    tied = nn.ModuleDict({"a": MODEL.head, "b": MODEL.head})
    assert set(layers_of(tied, ("a",)).values()) == {""}


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (nn.Conv2d, "the model has no Conv2d"),
        ("rigth", "no module and no class 'rigth'"),
        (3, "blocks: 3 is none"),
    ],
)
def test_what_is_no_block_is_refused(listed: Any, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        listed_blocks(MODEL, listed)


def test_the_plans_blocks_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    own = ("left", "right")
    with caplog.at_level(logging.WARNING, "hetflow"):
        assert agreed_blocks(MODEL, own, (), speaks=True) == own
        assert agreed_blocks(MODEL, own, own, speaks=True) == own
        assert agreed_blocks(MODEL, ("tail.0", "tail.1"), ("net.tail.0",), speaks=True) == ()
        assert agreed_blocks(MODEL, (), ALL, speaks=True) == ALL
        assert caplog.messages == []
        assert agreed_blocks(MODEL, ("left",), ALL, speaks=True) == ALL
    assert agreed_blocks(nn.Tanh(), own, ALL, speaks=True, is_only=False) == own
    (said,) = caplog.messages
    assert "script's blocks (left) are not those that the plan's memory counts" in said
    assert "left, right and 1 more" in said
    with pytest.raises(TargetError, match="counts blocks as a block"):
        agreed_blocks(MODEL, (), ("blocks",), speaks=True)
