"""Trainings by a loop of the script's own. Their loop is the same under a plan and without hetflow.

A script for the launcher: looping.py OUTPUT_FOLDER FORM. Every worker writes its results.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.runtime.determinism import generator_of

GLOBAL_BATCH_SIZE, EPOCHS = 32, 2
NUM_SAMPLES = 65  # 32 + 32 + 1: the last batch has no sample for most workers
SCALARS: dict[str, float] = {}  # of the classifier's job
Result = tuple[list[float], dict[str, torch.Tensor]]


class OneProcess:
    """What the trainings use of a job, in plain PyTorch."""

    def __init__(self, model: nn.Module, optimizers: Any) -> None:
        self.epoch = 0

    def batches(self, loader: DataLoader) -> Iterator[Any]:
        order = torch.randperm(NUM_SAMPLES, generator=generator_of(0, "order", self.epoch))
        self.epoch += 1
        for index in order.split(GLOBAL_BATCH_SIZE):
            yield loader.dataset[index]

    def parts(self, batch: Any) -> list[Any]:
        return [batch]

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> torch.Tensor:
        loss.backward()
        return loss.detach()

    def finish(self) -> None:
        pass


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021), as its usual implementation is."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator))


def net(*, noisy: bool = False) -> nn.Module:
    torch.manual_seed(2)
    middle = [nn.BatchNorm1d(6), nn.Dropout(0.3)] if noisy else []
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 3)).double()


def loader() -> DataLoader:
    return DataLoader(data(), batch_size=GLOBAL_BATCH_SIZE, shuffle=True)


def classifier(make: Callable[..., Any]) -> Result:
    """Clipping, momentum, a schedule."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    job, losses = make(model, optimizer), []
    for _ in range(EPOCHS):
        for batch in job.batches(loader()):
            for x, y in job.parts(batch):
                loss = job.backward(cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    if isinstance(job, hf.Job):
        SCALARS.update(job.scalars())
    job.finish()
    return losses, model.state_dict()


def whole(make: Callable[..., Any]) -> Result:
    """As the classifier, without a loop over parts: a batch is unpacked."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    job, losses = make(model, optimizer), []
    for _ in range(EPOCHS):
        for x, y in job.batches(loader()):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()  # behind the forward pass, as many scripts do
            loss = job.backward(loss)
            optimizer.step()
            losses.append(float(loss))
    job.finish()
    return losses, model.state_dict()


def tokens(make: Callable[..., Any]) -> Result:
    """Targets that are ignored, and gradients of two batches for each update but the last."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    job, losses = make(model, optimizer), []
    for _ in range(EPOCHS):
        for batch in job.batches(loader()):
            for number, (x, y) in enumerate(job.parts(batch)):
                y = torch.where(x[:, 1] < -1.2, -100, y)  # noqa: PLW2901
                count = int((y != -100).sum())
                total = cross_entropy(model(x), y, reduction="sum")
                if number == 0:
                    model.zero_grad()
                loss = job.backward(total / max(count, 1), weight=count)
            optimizer.step()
            losses.append(float(loss))
    job.finish()
    return losses, model.state_dict()


def accumulating(make: Callable[..., Any]) -> Result:
    """Gradients of two batches for each update."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    job, losses = make(model, optimizer), []
    for _ in range(EPOCHS):
        for number, batch in enumerate(job.batches(loader())):
            for x, y in job.parts(batch):
                loss = job.backward(cross_entropy(model(x), y) / 2)
            losses.append(float(loss))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    job.finish()
    return losses, model.state_dict()


def in_turns(make: Callable[..., Any]) -> Result:
    """Two optimizers, of which one steps on the gradients of two batches."""
    model = net()
    first = torch.optim.AdamW(model[0].parameters(), lr=0.02)
    last = torch.optim.SGD(model[-1].parameters(), lr=0.2)
    job, losses = make(model, [first, last]), []
    for _ in range(EPOCHS):
        for batch in job.batches(loader()):
            for x, y in job.parts(batch):
                loss = job.backward(cross_entropy(model(x), y))
            losses.append(float(loss))
            for optimizer in (first, last) if len(losses) % 2 == 0 else (last,):
                optimizer.step()
                optimizer.zero_grad()
    job.finish()
    return losses, model.state_dict()


def gan(make: Callable[..., Any]) -> Result:
    """Two models in one, two optimizers, three backward passes on a batch."""
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic}).double()
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    job, losses = make(model, [of_generator, of_critic]), []
    for _ in range(EPOCHS):
        for batch in job.batches(loader()):
            of_critic.zero_grad()
            for x, _y in job.parts(batch):
                guess = critic(x[:, :2])
                job.backward(bce(guess, torch.ones_like(guess)))
            for x, _y in job.parts(batch):
                guess = critic(generator(x[:, 2:]).detach())
                loss = job.backward(bce(guess, torch.zeros_like(guess)))
            of_critic.step()
            of_generator.zero_grad()
            for x, _y in job.parts(batch):
                guess = critic(generator(x[:, 2:]))
                of_loss = job.backward(bce(guess, torch.ones_like(guess)))
            of_generator.step()
            losses += [float(loss), float(of_loss)]
    job.finish()
    return losses, model.state_dict()


def sam(make: Callable[..., Any]) -> Result:
    """Two passes over a batch, the second at other weights."""
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    job, losses = make(model, [optimizer, optimizer.base_optimizer]), []
    for _ in range(EPOCHS):
        for batch in job.batches(loader()):
            for x, y in job.parts(batch):
                loss = job.backward(cross_entropy(model(x), y))
            optimizer.first_step()
            for x, y in job.parts(batch):
                job.backward(cross_entropy(model(x), y))
            optimizer.second_step()
            losses.append(float(loss))
    job.finish()
    return losses, model.state_dict()


def lbfgs(make: Callable[..., Any]) -> Result:
    """Any number of passes over a batch, as the line search asks for them."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    job, losses = make(model, optimizer), []
    for _ in range(EPOCHS):
        for batch in job.batches(loader()):

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                for x, y in job.parts(batch):
                    loss = job.backward(cross_entropy(model(x), y))
                return loss

            losses.append(float(optimizer.step(closure)))
    job.finish()
    return losses, model.state_dict()


def clearing(make: Callable[..., Any]) -> None:
    """Clears gradients between two parts: refused."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = make(model, optimizer)
    for batch in job.batches(loader()):
        for x, y in job.parts(batch):
            job.backward(cross_entropy(model(x), y))
            optimizer.zero_grad(set_to_none=False)


def noisy(make: Callable[..., Any]) -> Result:
    """Dropout and batch-norm in two passes over a batch: fixed by virtual node."""
    model = net(noisy=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job, losses = make(model, optimizer), []
    full = DataLoader(data(), batch_size=GLOBAL_BATCH_SIZE, shuffle=True, drop_last=True)
    for _ in range(EPOCHS):
        for batch in job.batches(full):
            for _ in range(2):
                for x, y in job.parts(batch):
                    loss = job.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss))
    job.finish()
    return losses, model.state_dict()


EXACT = {f.__name__: f for f in (classifier, tokens, accumulating, in_turns, gan, sam, lbfgs)}


def main() -> None:
    folder, form = Path(sys.argv[1]), sys.argv[2]
    trainings = {**EXACT, **({"whole": whole} if form == "whole" else {"noisy": noisy})}
    found: dict[str, Any] = {name: train(hf.prepare) for name, train in trainings.items()}
    import os

    found["scalars"] = SCALARS
    torch.save(found, folder / f"results{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
