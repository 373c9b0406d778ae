"""Logits that stay cut: the loss of the whole ones, and what is refused."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hetflow.runtime import tensor_parallel
from hetflow.runtime.tensor.operators import TensorGroup
from hetflow.runtime.tensor.roles import sharing_of
from hetflow.runtime.tensor.sharded import CutLogits, ShardedModel
from hetflow.schema.errors import TargetError

from .test_sequence import BATCH, TOKENS, Threads
from .test_side_by_side import BLOCKS, decoder

ROWS, VOCABULARY = 6, 7
NEAR = {"rtol": 1e-10, "atol": 1e-10}


def logits() -> Tensor:
    generator = torch.Generator().manual_seed(5)  # its own: threads share torch's
    shape = (2, ROWS // 2, VOCABULARY)
    return torch.randn(shape, dtype=torch.float64, generator=generator) * 300


def on_lane(group: TensorGroup, loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of one worker's part, and the gradient of the part."""
    own = logits().tensor_split(group.degree, -1)[group.lane].clone().requires_grad_()
    loss = loss_of(CutLogits.of(own, group, VOCABULARY, "head"))
    (loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum().backward()
    return loss.detach(), own.grad


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_that_of_whole_logits(
    degree: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = torch.tensor([6, 0, -100, 3, 2, 5])

    def loss_of(given: Tensor) -> Tensor:
        assert given.shape == (2, ROWS // 2, VOCABULARY)
        assert (given.size(-1), given.dim(), len(given)) == (VOCABULARY, 3, 2)
        rows = given.double().contiguous().view(-1, given.shape[-1])
        return functional.cross_entropy(rows, targets, reduction=reduction)

    whole = logits().requires_grad_()
    expected = loss_of(whole)
    (expected * torch.arange(1, expected.numel() + 1).view(expected.shape)).sum().backward()
    world = Threads(degree, monkeypatch)
    found = world.run(partial(on_lane, loss_of=loss_of))
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), **NEAR)
    torch.testing.assert_close(torch.cat([own for _, own in found], -1), whole.grad, **NEAR)
    assert world.calls == {"all_reduce": 2}  # the largest of each row; the sum and the target's


def cut(dtype: torch.dtype = torch.float64) -> CutLogits:
    part = logits()[..., :4].to(dtype).requires_grad_()
    return CutLogits.of(part * 1, TensorGroup(2, 0, (0, 1)), VOCABULARY, "head")


def test_leading_dimensions_can_be_cut_and_joined() -> None:
    for change, shape in (
        (lambda x: x[..., :-1, :], (2, 2, 7)),
        (lambda x: x[:, 1:], (2, 2, 7)),
        (lambda x: x[0], (3, 7)),
        (lambda x: x[:, -1, :], (2, 7)),
        (lambda x: x.flatten(0, 1), (6, 7)),
        (lambda x: x.reshape(3, 2, -1), (3, 2, 7)),
    ):
        changed = change(cut())
        assert changed.shape == shape
        with torch._C.DisableTorchFunctionSubclass():
            part = changed.as_subclass(Tensor)
        assert torch.equal(part, change(logits())[..., :4]) or shape == (3, 2, 7)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x: x.argmax(-1), "argmax would need all of it"),
        (lambda x: x[..., :3], "__getitem__ would need all"),
        (lambda x: x[..., 1], "__getitem__ would need all"),
        (lambda x: x.flatten(), "flatten would need all"),
        (lambda x: torch.cat([torch.ones(1), x]), "head is cut over .* cat would need"),
        (
            lambda x: functional.cross_entropy(x[0], torch.zeros(3).long(), label_smoothing=0.1),
            "without weight or label_smoothing",
        ),
        (lambda x: functional.cross_entropy(x, torch.zeros(2, 7).long()), r"takes \[N, C\]"),
    ],
)
def test_what_needs_whole_logits_is_refused(use: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        use(cut())


def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        functional.cross_entropy(cut()[0], torch.tensor([0, 7, 1]))


def test_a_model_computes_its_loss_from_cut_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 9
    model, built = decoder(), decoder()
    expected = functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1).flatten())
    expected.backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}

    def run(group: TensorGroup) -> tuple[Any, ...]:
        own = deepcopy(built)
        tensor_parallel(own, {"head": "logits"}, known=True)
        sharing = sharing_of(own)
        sharded = ShardedModel(own, sharing, group)
        for name, parameter in own.named_parameters():
            if name in sharing.cuts:
                parameter.data = sharing.cuts[name].own(parameter.data, group.lane, group.degree)
        sharded.install()
        with sharded.passing():
            loss = functional.cross_entropy(own(ids).flatten(0, 1), ids.roll(-1).flatten())
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in own.named_parameters()}
        assert {"head.weight", "layers.0.mlp.up_proj.weight"} <= set(sharing.cuts)
        world.barrier.wait(20)
        calls = dict(world.calls)
        world.barrier.wait(20)
        with torch.no_grad(), sharded.passing():
            joined = own(ids)  # in evaluation they are whole
        return loss.detach(), gradients, joined, sharing, calls

    world = Threads(2, monkeypatch)
    found = world.run(run)
    for loss, _, joined, _, calls in found:
        torch.testing.assert_close(loss, expected.detach(), **NEAR)
        torch.testing.assert_close(joined, model(ids).detach(), **NEAR)
        # Each pair of layers twice, the input of the head, and the loss.
        assert calls == {"all_reduce": 4 * BLOCKS + 1 + 2}
    sharing = found[0][3]
    for name, expected in whole.items():
        parts = [gradients[name] for _, gradients, *_ in found]
        total = sharing.cuts[name].whole(parts) if name in sharing.cuts else parts[0]
        torch.testing.assert_close(total, expected, **NEAR)
