"""Hooks that a script puts on parameters act once a step, on the gradient of the whole batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.schema import files
from hetflow.schema.errors import TargetError
from hetflow.schema.plan import Plan

GLOBAL_BATCH_SIZE, NUM_STEPS = 8, 3
Put = Callable[[nn.Module, torch.optim.Optimizer], Any]


@pytest.fixture(autouse=True)
def four_virtual_nodes(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(tmp_path / "plan.json", plan_of([(4, 2)]))
    monkeypatch.setenv("HETFLOW_PLAN", str(tmp_path / "plan.json"))
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(GLOBAL_BATCH_SIZE * NUM_STEPS, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: (model(x) - y).pow(2).mean()


def clamp(model: nn.Module, _: object) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


def clip(model: nn.Module, _: object) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: nn.utils.clip_grad_norm_([p], 0.03) and None
        )


def in_place(model: nn.Module, _: object) -> None:
    def sign(gradient: Tensor) -> None:
        gradient.sign_()

    model[0].weight.register_hook(sign)  # type: ignore[index]


def mask_and_undo(model: nn.Module, _: object) -> None:
    weight = model[0].weight  # type: ignore[index]
    weight.register_hook(torch.relu)
    weight.register_hook(lambda gradient: gradient * 0).remove()


def step_at_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Update each parameter when its gradient is there, and free the gradient."""
    group = optimizer.param_groups[0]

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(group["lr"] * parameter.grad.sign())  # type: ignore[union-attr]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


HOOKS: dict[str, Put] = {
    hook.__name__: hook for hook in (clamp, clip, in_place, mask_and_undo, step_at_once)
}


def trained(put: Put | None) -> dict[str, Tensor]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = hf.prepare(model, optimizer)
    if put:
        put(model, optimizer)
    for batch in job.batches(DataLoader(data(), batch_size=GLOBAL_BATCH_SIZE)):
        job.backward(loss_of(model), batch)
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    return model.state_dict()


def plainly(put: Put | None) -> dict[str, Tensor]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if put:
        put(model, optimizer)
    for x, y in DataLoader(data(), batch_size=GLOBAL_BATCH_SIZE):
        loss_of(model)(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_acts_on_the_gradient_of_the_whole_batch(kind: str) -> None:
    ours, theirs = trained(HOOKS[kind]), plainly(HOOKS[kind])
    untouched = plainly(None)
    assert any(not torch.equal(theirs[name], untouched[name]) for name in theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-12)


def test_a_hook_is_called_once_a_step_and_can_be_removed() -> None:
    model = model_of()
    job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[float] = []
    weight = model[0].weight  # type: ignore[index]
    handle = weight.register_hook(lambda gradient: seen.append(float(gradient.sum())))
    for batch in job.batches(DataLoader(data(), batch_size=GLOBAL_BATCH_SIZE)):
        job.backward(loss_of(model), batch)
        assert len(seen) == 2 or seen == [float(weight.grad.sum())]
        if len(seen) == 2:
            handle.remove()
        model.zero_grad()
    assert len(seen) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["sgd", "momentum", "adagrad"],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_train_as_in_plain_pytorch(make: Callable[..., Any]) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        x, y = torch.randint(0, 20, (24, 2)), torch.randn(24, 1, dtype=torch.float64)
        made = make(model.double().parameters())
        return model, made, DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH_SIZE)

    ours, optimizer, loader = parts()
    job = hf.prepare(ours, optimizer)
    for batch in job.batches(loader):
        job.backward(loss_of(ours), batch)
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    theirs, optimizer, loader = parts()
    for x, y in loader:
        loss_of(theirs)(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-10, atol=1e-12)


def refused(put: Callable[[nn.Module], Callable[..., Tensor]], num_steps: int) -> str:
    model = model_of()
    job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    function = put(model)
    batches = iter(job.batches(DataLoader(data(), batch_size=GLOBAL_BATCH_SIZE)))
    for _ in range(num_steps - 1):
        job.backward(function, next(batches))
    with pytest.raises(TargetError) as caught:
        job.backward(function, next(batches))
    assert caught.value.hint
    job.abandon()
    return str(caught.value)


def test_hooks_that_need_the_backward_pass_around_them_are_refused() -> None:
    def over_many(model: nn.Module) -> Callable[..., Tensor]:
        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)
        return loss_of(model)

    def in_function(model: nn.Module) -> Callable[..., Tensor]:
        def function(x: Tensor, y: Tensor) -> Tensor:
            clamp(model, None)
            return loss_of(model)(x, y)

        return function

    def accumulating(model: nn.Module) -> Callable[..., Tensor]:
        clamp(model, None)
        return loss_of(model)

    assert "0.weight has a hook of register_multi_grad_hook" in refused(over_many, 1)
    assert "the loss function puts the hook clamp.<locals>.<lambda> on 0.weight" in refused(
        in_function, 1
    )
    said = refused(accumulating, 2)
    assert "0.weight has the hook clamp" in said
    assert "gradients of an earlier step are still there" in said
