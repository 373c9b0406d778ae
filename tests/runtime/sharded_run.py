"""Train a small model with tied weights by hf.prepare, and save it. A script for launches.

Usage: sharded_run.py EPOCHS FILE [masters|policy|norms|parts|hand...]. In float64, or in bfloat16
with float32 masters, or in float64 that a policy runs in float32; with ``norms`` a model with
BatchNorm; with ``parts`` odd epochs loop over parts; with ``hand`` it clips, averages and perturbs
by its own code.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import hetflow as hf
from hetflow.runtime.sharding import states
from hetflow.schema.errors import TargetError

WIDTH, WORDS, SAMPLES = 24, 11, 32


class Block(nn.Module):
    """A layer that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return found


class Model(nn.Module):
    """An embedding, blocks, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


class NormBlock(nn.Module):
    """A layer that repeats, whose statistics a pass updates."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.outside(self.mix(F.relu(self.inside(x.mT).mT)).mT).mT
        return found


class NormModel(Model):
    """The same with BatchNorm in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormBlock() for _ in range(3))


def data_of() -> tuple[Tensor, Tensor]:
    """Words of all samples, and what is to be found."""
    ids = torch.randint(0, WORDS, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))
    return ids, ids.flip(1)


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of the words."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


class ByHand:
    """What a script does to parameters and gradients by its own code."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.said = model, ""
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.seen: list[Any] = []

    def begin(self) -> None:
        """Begin to average, when workers have slices."""
        self.mean = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.seen.append(sum(p.numel() for p in self.model.parameters()))

    def clip(self) -> None:
        """Add noise to gradients, and clip them by their norm."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        for grad in grads:
            grad += 1e-3 * torch.randn_like(grad)
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(0.5 / norm)
        self.seen.append(float(norm))

    @torch.no_grad()
    def average(self) -> None:
        """Average the weights, of which each update leaves the small ones out."""
        for name, parameter in self.model.named_parameters():
            parameter.data[parameter.abs() < 1e-4] = 0.0
            self.mean[name].mul_(0.9).add_(parameter, alpha=0.1)
        self.ema.update_parameters(self.model)

    def end(self, *, is_main: bool) -> None:
        """Read a gradient on one worker alone, and train on from the average."""
        states._READ_SECONDS = 0.2
        if is_main:
            try:
                float(next(self.model.parameters()).norm())
            except TargetError as error:
                self.said = str(error)
        self.model.load_state_dict(self.mean, strict=False)


def main() -> None:
    """Train, evaluate, and save the whole model."""
    torch.manual_seed(0)
    masters = torch.float32 if "masters" in sys.argv else None
    made = NormModel() if "norms" in sys.argv else Model()
    model = made.to(torch.bfloat16 if masters else torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = MixedPrecisionPolicy(torch.float32) if "policy" in sys.argv else None
    hand = ByHand(model) if "hand" in sys.argv else None
    job = hf.prepare(model, optimizer, masters=masters, mp_policy=policy)
    if hand:
        hand.begin()
    ids, targets = data_of()
    data = TensorDataset(ids, targets)
    for epoch in range(int(sys.argv[1])):
        for batch in job.batches(DataLoader(data, batch_size=8)):
            optimizer.zero_grad()
            if "parts" in sys.argv and epoch % 2:
                for x, y in job.parts(batch):
                    job.backward(loss_of(model, x, y))
            else:
                job.backward(lambda x, y: loss_of(model, x, y), batch)
            if hand:
                hand.clip()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if hand:
                hand.average()
    if hand:
        hand.end(is_main=job.is_main and job.world_size > 1)
    with job.evaluation() as whole:
        assert not whole.training
        evaluated = float(loss_of(whole, ids, targets))
    job.finish()
    if job.is_main:
        saved = {"loss": evaluated, "model": model.state_dict()}
        if hand:
            saved |= {"ema": hand.ema.state_dict(), "seen": hand.seen, "said": hand.said}
        torch.save(saved, sys.argv[2])


if __name__ == "__main__":
    main()
