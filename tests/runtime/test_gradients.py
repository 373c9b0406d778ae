"""The reducer by itself, as profilers use it, on a group of one."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hetflow.runtime import gradients as reducers
from hetflow.runtime.gradients import GradientReducer
from hetflow.schema.errors import TargetError


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_buckets_cover_the_buffer_and_sums_are_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    reducer = GradientReducer(dict(model.named_parameters()), bucket_bytes=64)
    x = torch.randn(4, 8)
    reducer.begin()
    model(x[:2]).sum().backward()
    reducer.arm(defer_last=True)
    model(x[2:]).sum().backward()
    reducer.finish()
    assert sum(f.nbytes for f in reducer.flats) == sum(p.numel() * 4 for p in model.parameters())
    assert reducer.unused() == []
    found = [p.grad.clone() for p in model.parameters()]
    reducer.close()
    model.zero_grad()
    model(x).sum().backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_memory_formats_types_and_complex_numbers_are_kept() -> None:
    image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    half = nn.Linear(3, 3).half()
    parameters = [*image.parameters(), wave, *half.parameters()]
    reducer = GradientReducer(parameters)
    reducer.begin()
    reducer.arm()
    loss = image(torch.randn(1, 3, 5, 5)).sum() + (wave.abs() ** 2).sum()
    (loss + half(torch.ones(1, 3, dtype=torch.float16)).sum().float()).backward()
    reducer.finish()
    assert len(reducer.flats) == 3
    assert image.weight.grad.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(wave.grad, 2 * wave.detach())
    assert half.weight.grad.dtype == torch.float16
    reducer.close()


def test_a_gradient_that_comes_twice_is_refused() -> None:
    """Reentrant checkpoints that share a weight fire its hook once each."""
    layer = nn.Linear(4, 4)
    reducer = GradientReducer({"layer.weight": layer.weight, "layer.bias": layer.bias})
    reducer.begin()
    reducer.arm()
    x = torch.randn(2, 4, requires_grad=True)
    out = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(TargetError, match="got its gradient twice in one backward"):
        out.sum().backward()
    reducer.launch_rest()
    reducer.wait()
    reducer.close()


def test_a_large_parameter_is_reduced_in_parts() -> None:
    """The room for others' gradients is of a few buckets, whatever the parameter."""
    weight, bias = nn.Parameter(torch.ones(1003)), nn.Parameter(torch.ones(3))
    reducer = GradientReducer([bias, weight], bucket_bytes=400)
    reducer.begin()
    reducer.arm()
    (2 * weight.sum() + bias.sum()).backward()
    assert reducer.num_launched == 11  # ten of the weight; what is cut off goes with the bias
    reducer.finish()
    assert weight.grad.tolist() == [2.0] * 1003
    assert bias.grad.tolist() == [1.0] * 3
    reducer.close()


@pytest.mark.parametrize("bucket_bytes", [8, 40, 1 << 20])
def test_sums_travel_when_all_gradients_are_complete(bucket_bytes: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    parameters = dict(model.named_parameters())
    reducer = GradientReducer(parameters, bucket_bytes=bucket_bytes, num_sums=7)
    seen: list[list[int]] = []

    def write(sums: torch.Tensor) -> None:
        seen.append(reducer.unused())
        sums.copy_(torch.arange(7.0))

    for overlap in (True, False):
        reducer.begin(write)
        if overlap:
            reducer.arm()
        model[1](model[0](torch.ones(4, 3)) if overlap else torch.ones(4, 5)).sum().backward()
        reducer.finish()
        assert reducer.sums is not None
        assert reducer.sums.tolist() == list(range(7))
        assert model[1].bias.grad is not None
        assert model[1].bias.grad.tolist() == [4.0, 4.0]
        model.zero_grad()
    assert seen == [[], [0, 1]]
    reducer.close()


def test_no_room_for_sums_among_numbers_of_another_type() -> None:
    model = nn.Linear(3, 5, dtype=torch.float64)
    reducer = GradientReducer(dict(model.named_parameters()), num_sums=7)
    reducer.begin()
    assert reducer.sums is None
    reducer.close()


def pretend(backend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every device for one of this kind."""
    monkeypatch.setattr(reducers, "backend_of", lambda _: backend)


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("bucket_bytes", [24, 1 << 20])
def test_first_gradients_replace_what_the_buffer_held(
    is_host: bool, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(is_host=is_host, bucket_bytes=bucket_bytes)
    pretend(backend, monkeypatch)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    plain, passes = copy.deepcopy(model), [torch.randn(4, 3), torch.randn(2, 3)]
    reducer = GradientReducer(dict(model.named_parameters()))
    for skips in (False, True, False):  # the first layer, in one step
        reducer.begin()
        for number, x in enumerate(passes):
            if number:
                reducer.arm()
            for layers in (model, plain):
                (layers[1](torch.ones(2, 5)) if skips else layers(x)).square().sum().backward()
        reducer.finish()
        assert reducer.unused() == ([0, 1] if skips else [])
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            expected = torch.zeros_like(mine) if other.grad is None else other.grad
            assert mine.grad is not None
            assert torch.equal(mine.grad, expected)
            assert any(_lies_in(mine.grad, flat) for flat in reducer.flats)
        model.zero_grad()
        plain.zero_grad()
    reducer.close()


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_gradient_of_minus_zero_counts_as_zero() -> None:
    """As where it was added to a cleared buffer: bits do not depend on who made the first pass."""
    weight = nn.Parameter(torch.ones(3))
    reducer = GradientReducer([weight])
    reducer.begin()
    (weight * -0.0).sum().backward()
    reducer.finish()
    assert weight.grad is not None
    assert not torch.signbit(weight.grad).any()
    reducer.close()


def num_hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def armed_step(
    reducer: GradientReducer, back: Callable[[], object], *, num_passes: int = 1
) -> list[int]:
    """One step whose last pass is armed; returns how many buckets were sent during it, and all."""
    reducer.begin(num_passes=num_passes)
    for number in range(num_passes):
        if number == num_passes - 1:
            reducer.arm()
        back()
    during = reducer.num_launched
    reducer.finish()
    return [during, reducer.num_launched]


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("large", [1 << 30, 1])
def test_few_hooks_send_the_same_buckets(
    is_host: bool, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(is_host=is_host, bucket_bytes=100)
    pretend(backend, monkeypatch)
    monkeypatch.setattr(reducers, "LARGE_BYTES", large)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    plain, inputs = copy.deepcopy(model), iter(torch.randn(40, 3, 4))
    reducer = GradientReducer(dict(model.named_parameters()))

    def compared(skips: bool, num_passes: int = 1) -> list[int]:
        xs = [next(inputs) for _ in range(num_passes)]
        own, other = iter(xs), iter(xs)

        def back(layers: nn.Module, x: torch.Tensor) -> None:
            (layers[3:](x) if skips else layers(x)).square().sum().backward()

        sent = armed_step(reducer, lambda: back(model, next(own)), num_passes=num_passes)
        for x in other:
            back(plain, x)
        assert reducer.unused() == (list(range(6)) if skips else [])
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, torch.zeros_like(mine) if skips and theirs.grad is None
                               else theirs.grad)  # fmt: skip
            assert any(_lies_in(mine.grad, flat) for flat in reducer.flats)
        model.zero_grad()
        plain.zero_grad()
        return sent

    sent = compared(False)
    assert sent[0] == sent[1] >= 3
    assert num_hooks(model) == 12
    for _ in range(2):  # learned
        assert compared(False) == sent
        few = num_hooks(model)
        assert few == 12 if is_host and large == 1 else few <= sent[1]
    assert compared(True)[1] == sent[1]  # a step without some gradients is right, and unlearns
    assert compared(False) == sent
    assert num_hooks(model) == 12
    assert compared(False) == sent
    assert num_hooks(model) == few
    assert compared(False, num_passes=2) == sent  # and so does one of several passes
    assert num_hooks(model) == 12
    reducer.close()


def learned(layers: nn.Module, back: Callable[[], object]) -> GradientReducer:
    """A reducer of which few parameters have hooks."""
    reducer = GradientReducer(dict(layers.named_parameters()), bucket_bytes=40)
    for _ in range(2):
        armed_step(reducer, back)
        layers.zero_grad()
    assert num_hooks(layers) < len(list(layers.parameters()))
    return reducer


def test_few_hooks_see_a_gradient_that_comes_after_its_bucket_was_sent() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    reducer = learned(layers, lambda: layers(x).sum().backward())

    def twice() -> None:
        end = checkpoint(layers[1], layers[0](x), use_reentrant=True)
        checkpoint(layers[1], checkpoint(layers[0], end, use_reentrant=True),
                   use_reentrant=True).sum().backward()  # fmt: skip

    with pytest.raises(TargetError, match="got its gradient twice in one backward"):
        armed_step(reducer, twice)
    reducer.close()


def test_few_hooks_wait_for_a_script_that_goes_back_by_itself() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    reducer = learned(layers, lambda: layers(x).sum().backward())
    layers(x).sum().backward()
    expected = [2 * p.grad for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    reducer.begin(num_passes=1)
    layers(x).sum().backward()
    reducer.arm()
    layers(x).sum().backward()
    reducer.finish()
    assert all(
        torch.equal(parameter.grad, other)
        for parameter, other in zip(layers.parameters(), expected, strict=True)
    )
    reducer.close()


class CountOperations(TorchDispatchMode):
    """How many operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_first", [True, False])
def test_gradients_that_are_zeros_cost_no_operator_each(is_first: bool) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    skipped = list(model[:10].parameters())
    reducer = GradientReducer(
        dict(model.named_parameters()), distributed=False, is_first=is_first, num_sums=2
    )
    reducer.begin()
    model(torch.ones(1, 3)).sum().backward()
    reducer.finish()
    for parameter in model[10:].parameters():
        parameter.grad.fill_(2.0)
    for parameter in skipped:
        parameter.grad = None
    with CountOperations() as count:
        reducer.begin()
    assert count.number <= len(reducer.flats)
    assert all(p.grad is not None and not p.grad.any() for p in skipped)
    kept = 2.0 if is_first else 0.0
    assert all((p.grad == kept).all() for p in model[10:].parameters())
    assert not reducer.sums.any()
