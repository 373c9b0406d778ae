"""Go on from exported checkpoints with torch's own fully_shard. A script, not a test.

Usage: continued.py FOLDER KIND...: each worker loads FOLDER/KIND.dcp and trains on; the first one
writes the losses. No line of hetflow's runs here.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

BATCHES = torch.randint(0, 7, (8, 6), generator=torch.Generator().manual_seed(1))
HALF = len(BATCHES) // 2
KINDS = ("adamw", "flattened", "momentum", "sgd")


class Model(nn.Module):
    """Tied and frozen weights, batch norm, a 16-bit buffer, and one that is not saved."""

    scale: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.mix = nn.Embedding(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight
        self.mix.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.double().register_buffer("scale", torch.full((), 0.3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.mix(self.norm(self.words(x)))) * self.scale
        return found


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """What is trained: the word that comes next."""
    return nn.functional.cross_entropy(model(x), (x + 1) % 7)


def optimizer_of(kind: str, model: Model) -> torch.optim.Optimizer:
    """Groups of unlike settings, in another order than the model's."""
    rest = [p for p in model.parameters() if p is not model.mix.weight]
    groups: Any = [{"params": [model.mix.weight], "lr": 0.2}, {"params": rest}]
    if kind in ("adamw", "flattened"):
        return torch.optim.AdamW(groups, lr=0.05)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)


def main() -> None:
    """Load and train each kind."""
    folder, losses = Path(sys.argv[1]), {}
    dist.init_process_group("gloo")
    for kind in sys.argv[2:]:
        torch.manual_seed(2)  # whatever is not loaded is wrong
        model = Model()
        for part in (model.mix, model):
            fully_shard(part)
        optimizer = optimizer_of(kind, model)
        flat = StateDictOptions(flatten_optimizer_state_dict=kind == "flattened")
        own, held = get_state_dict(model, optimizer, options=flat)
        state = {"model": own, "optim": held, "step": 0}
        dcp.load(state, checkpoint_id=folder / f"{kind}.dcp")
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=held, options=flat)
        assert state["step"] == HALF
        losses[kind] = list[float]()
        for x in BATCHES[HALF:]:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may end Python's finalization by a fatal error
