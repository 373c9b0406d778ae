"""Train a small model with tied weights by hf.prepare, and save it. A script for launches.

Usage: sharded_run.py EPOCHS FILE [masters|policy|norms|parts...]. In float64, or in bfloat16 with
float32 masters, or in float64 that a policy runs in float32; with ``norms`` a model with BatchNorm;
with ``parts`` odd epochs loop over parts.
"""

import sys

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hetflow as hf

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


def main() -> None:
    """Train, evaluate, and save the whole model."""
    torch.manual_seed(0)
    masters = torch.float32 if "masters" in sys.argv else None
    made = NormModel() if "norms" in sys.argv else Model()
    model = made.to(torch.bfloat16 if masters else torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = MixedPrecisionPolicy(torch.float32) if "policy" in sys.argv else None
    job = hf.prepare(model, optimizer, masters=masters, mp_policy=policy)
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
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    with job.evaluation() as whole:
        assert not whole.training
        evaluated = float(loss_of(whole, ids, targets))
    job.finish()
    if job.is_main:
        torch.save({"loss": evaluated, "model": model.state_dict()}, sys.argv[2])


if __name__ == "__main__":
    main()
