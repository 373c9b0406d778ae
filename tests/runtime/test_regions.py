"""Dropout between a column and a row layer: the masks of one process, or a refusal."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hetflow.profilers.zoo.models import GPT
from hetflow.runtime import tensor_parallel
from hetflow.runtime.pipeline.cut import cut, holdings_of
from hetflow.runtime.pipeline.trace import layers_of
from hetflow.runtime.tensor.operators import TensorGroup
from hetflow.runtime.tensor.regions import check_attention
from hetflow.runtime.tensor.roles import sharing_of
from hetflow.runtime.tensor.sharded import ShardedModel
from hetflow.schema.errors import TargetError

HEADS, SIZE, TOKENS = 4, 6, 5
Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class Between(nn.Module):
    """A column layer, something, and a row layer."""

    def __init__(self, core: Callable[[Tensor], Tensor], parts: int = 1) -> None:
        super().__init__()
        self.core = core
        self.column = nn.Linear(8, parts * HEADS * SIZE)
        self.row = nn.Linear(HEADS * SIZE, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.row(self.core(self.column(x)))


def attention(weigh: Core) -> Callable[[Tensor], Tensor]:
    def core(made: Tensor) -> Tensor:
        q, k, v = made.view(*made.shape[:2], 3, -1, SIZE).permute(2, 0, 3, 1, 4)
        return weigh(q, k, v).transpose(1, 2).flatten(2)

    return core


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.3) @ v


def kernel(**settings: object) -> Core:
    return lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, dropout_p=0.4, **settings
    )


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (value.view(value.size(0), -1, 2, TOKENS, SIZE)[:, :, 0] for value in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.4, enable_gqa=True)


MASK = torch.rand(TOKENS, TOKENS, dtype=torch.float64)
CORES = {
    "hidden": (lambda x: functional.dropout(functional.gelu(x), 0.4), 1),
    "hidden, in place": (lambda x: functional.dropout(x + 1, 0.4, inplace=True), 1),
    "hidden, torch.dropout": (lambda x: torch.dropout(x, 0.4, train=True), 1),
    "twice": (lambda x: functional.dropout(functional.dropout(x, 0.4).sin(), 0.2), 1),
    "transposed": (lambda x: functional.dropout(x.mT.contiguous().mT, 0.4), 1),
    "eager": (attention(eager), 3),
    "kernel": (attention(kernel()), 3),
    "causal": (attention(kernel(is_causal=True, scale=0.7)), 3),
    "biased": (attention(kernel(attn_mask=MASK)), 3),
    "masked": (attention(kernel(attn_mask=MASK.round().bool() | torch.eye(TOKENS).bool())), 3),
    "grouped": (attention(grouped), 3),
}


def on_lane(
    model: nn.Module, lane: int, degree: int, parts: int = 1, within: str = ""
) -> nn.Module:
    """A copy that computes one worker's share; without a process group, nothing is summed."""
    own = copy.deepcopy(model)
    style = "column" if parts == 1 else f"column:{parts}"
    tensor_parallel(own, {f"{within}column": style, f"{within}row": "row"})
    sharing = sharing_of(own)
    sharded = ShardedModel(own, sharing, TensorGroup(degree, lane, tuple(range(degree))))
    for name, parameter in own.named_parameters():
        if name in sharing.cuts:
            parameter.data = sharing.cuts[name].own(parameter.data, lane, degree)
    sharded.install()
    own.passing = sharded.passing
    return own


def before_row(model: nn.Module, x: Tensor) -> Tensor:
    """What reaches the row layer, and the random stream's next number."""
    found: list[Tensor] = []
    model.row.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].detach()))
    torch.manual_seed(3)
    model(x)
    return found[0], torch.rand(1)


@pytest.mark.parametrize("name", CORES)
def test_masks_do_not_depend_on_the_degree(name: str) -> None:
    core, parts = CORES[name]
    model, x = Between(core, parts), torch.randn(3, TOKENS, 8, dtype=torch.float64)
    expected, next_number = before_row(copy.deepcopy(model), x)
    assert (expected == 0).any() or parts > 1
    for degree in (1, 2) if name == "grouped" else (1, 2, 4):
        lanes = [on_lane(model, lane, degree, parts) for lane in range(degree)]
        found = [before_row(own, x) for own in lanes]
        torch.testing.assert_close(torch.cat([part for part, _ in found], -1), expected)
        assert all(torch.equal(following, next_number) for _, following in found)


def outside(x: Tensor) -> Tensor:
    return checkpoint(lambda y: functional.dropout(y, 0.5), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("core", "said"),
    [
        (lambda x: x * torch.rand_like(x), "behind column, which .* rand_like draws random"),
        (lambda x: x.bernoulli_(0.5), "bernoulli_ draws"),
        (lambda x: functional.alpha_dropout(x, 0.5, training=True), "alpha_dropout draws"),
        (lambda x: functional.dropout(x[:, 0], 0.5), r"dropout of a tensor of shape \[3, 12\]"),
        (outside, "a checkpoint recomputes dropout"),
    ],
)
def test_what_would_depend_on_the_degree_is_refused(core, said: str) -> None:
    x = torch.randn(3, TOKENS, 8, dtype=torch.float64)
    own = on_lane(Between(core), 0, 2)
    with pytest.raises(TargetError, match=said), own.passing():
        own(x)
    assert _get_current_function_mode() is None
    own.core = torch.sin
    own(x)


def test_what_draws_nothing_is_left_alone() -> None:
    x = torch.randn(3, TOKENS, 8, dtype=torch.float64)
    for core in (
        lambda x: functional.dropout(x[:, 0], 0.5, training=False),
        lambda x: functional.alpha_dropout(x, 0.5, training=False),
        lambda x: functional.dropout(x.flatten(), 0.0).view_as(x),
    ):
        on_lane(Between(core), 1, 2)(x)
    assert _get_current_function_mode() is None


def test_a_checkpoint_of_the_whole_draws_the_same_again() -> None:
    core, parts = CORES["eager"]
    own, x = on_lane(Between(core, parts), 1, 2, parts), torch.randn(3, TOKENS, 8).double()
    grads = []
    for run in (own, lambda value: checkpoint(own, value, use_reentrant=False)):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        run(leaf).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


class Half(Between):
    """A checkpoint of the script's ends between the two layers, and begins before dropout."""

    recomputes = True

    def forward(self, x: Tensor) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return self.core(self.column(functional.dropout(x, 0.2)))

        return self.row(checkpoint(first, x, use_reentrant=False) if self.recomputes else first(x))


@pytest.mark.parametrize("stops_early", [True, False])
def test_a_region_ends_with_the_recomputation_of_a_checkpoint_that_ends_inside(
    stops_early: bool,
) -> None:
    core = CORES["hidden"][0]
    own = on_lane(nn.Sequential(Half(core), Half(core)), 1, 2, within="*.")
    x, grads = torch.randn(3, TOKENS, 8).double(), []
    for recomputes in (False, True):
        for half in own:
            half.recomputes = recomputes
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        with set_checkpoint_early_stop(stops_early):
            with own.passing():
                made = own(leaf)
            with own.passing():
                made.sum().backward()
        assert _get_current_function_mode() is None
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("kind", "device", "is_refused"),
    [
        ("eager", "cuda", False),
        ("sdpa", "cpu", False),
        ("sdpa", "cuda", True),
        ("flash_attention_2", "cpu", True),
    ],
)
def test_kernels_that_draw_masks_inside_are_refused(kind: str, device: str, is_refused) -> None:
    model = nn.Linear(1, 1)
    for p in (0.0, 0.1):
        model.config = SimpleNamespace(_attn_implementation=kind, attn_pdrop=p)
        if p and is_refused:
            with pytest.raises(TargetError, match=rf"drops weights \(attn_pdrop\) .* \({kind}\)"):
                check_attention(model, torch.device(device))
        else:
            check_attention(model, torch.device(device))


def test_a_stage_that_begins_at_dropout_between_the_two_is_refused() -> None:
    model = GPT(vocabulary=8, max_tokens=4, depth=1, num_heads=2, channels=8)
    up, activation, down = model.blocks[0].feed_forward
    dropout = nn.Dropout(0.1)
    model.blocks[0].feed_forward = nn.Sequential(up, nn.Sequential(activation, dropout), down)
    layered = layers_of(model)
    names = [layer.id for layer in layered.layers]
    at = names.index("blocks.0.feed_forward.1.0")
    for first, is_refused in ((at - 1, False), (at, True), (at + 2, False)):
        parts = cut(layered, [names[:first], names[first:]])
        if is_refused:
            with pytest.raises(TargetError, match="stage 1 begins between a column and a row"):
                holdings_of(parts, sharing_of(model))
            dropout.p = 0.0
        holdings_of(parts, sharing_of(model))
        dropout.p = 0.1
