"""Small trainings in this process: what ``hetflow.runtime.prepare`` makes of a script.

Each answers with its losses and a digest of everything the model holds at the end. Levels of
determinism change the whole process, so ``all_in_a_child`` trains in one of its own, under the
settings of the strictest level: their bits do not depend on the processor.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hetflow import runtime as hf
from hetflow.runtime.protocol.environment import pins
from hetflow.tests import programs

BATCH, SAMPLES, EPOCHS = 24, 68, 2  # the last batch is short


class Points(Dataset):
    """Fixed points; noisy ones draw from the three global streams."""

    def __init__(self, noisy: bool, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(11)
        self.x = torch.randn(SAMPLES, 6, generator=draw, dtype=dtype)
        self.y = torch.randint(3, (SAMPLES,), generator=draw)
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if self.noisy:
            noise = random.random() + np.random.rand()  # noqa: NPY002
            x = x + 0.1 * noise + 0.1 * torch.randn(6, dtype=x.dtype)
        return x, self.y[index]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cell(x.view(len(x), 3, 2))[0][:, -1])


class Tied(nn.Module):
    """One weight twice, and a parameter that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.last, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def _noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4),
                         nn.Linear(8, 3))  # fmt: skip


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(),
                         nn.Flatten(), nn.Linear(16, 3))  # fmt: skip


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear, "noisy": _noisy, "convolution": _convolution, "recurrent": Recurrent,
    "tied": Tied,
}  # fmt: skip
# name -> model, optimizer, dtype, virtual nodes (None: no plan, so first), level of determinism
TRAININGS: dict[str, tuple[str, Any, torch.dtype, int | None, str]] = {
    "plain": ("linear", _sgd, torch.float64, None, "none"),
    "plain-adamw": ("linear", _adamw, torch.float32, None, "none"),
    "plain-noisy": ("noisy", _sgd, torch.float64, None, "none"),
    "nodes": ("linear", _sgd, torch.float32, 3, "none"),
    "nodes-noisy": ("noisy", _adamw, torch.float64, 3, "none"),
    "nodes-tied": ("tied", _sgd, torch.float64, 4, "none"),
    "nodes-convolution": ("convolution", _sgd, torch.float32, 2, "none"),
    "elastic": ("noisy", _sgd, torch.float32, 4, "elastic"),
    "elastic-recurrent": ("recurrent", _adamw, torch.float32, 2, "elastic"),
    "static": ("convolution", _adamw, torch.float32, 3, "static"),
    "heterogeneous": ("noisy", _adamw, torch.float64, 6, "heterogeneous"),
}


_REMOVED = ("HETFLOW_", "RANK", "WORLD_SIZE", "SLURM_PROCID")  # what a launch sets


def all_in_a_child(folder: Path) -> dict[str, dict[str, Any]]:
    """Train all of them in a process of their own, which writes its plans to ``folder``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_REMOVED)}
    child = programs.run(
        [sys.executable, "-m", "tests.golden.trainings", str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        env=environment | pins("heterogeneous"),
        timeout=600.0,
    )
    if child.returncode != 0:
        raise RuntimeError(child.stderr)
    answers: dict[str, dict[str, Any]] = json.loads(child.stdout)
    return answers


def train(name: str, folder: Path) -> dict[str, Any]:
    """Train one in this process."""
    kind, optimizer_of, dtype, nodes, level = TRAININGS[name]
    if nodes is not None:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(_plan(nodes)), encoding="utf-8")
        os.environ |= {"HETFLOW_PLAN": str(path), "HETFLOW_DETERMINISM": level}
    torch.manual_seed(5)
    model = MODELS[kind]().to(dtype)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    job = hf.prepare(model, optimizer, seed=7)
    loader = DataLoader(Points(kind == "noisy", dtype), batch_size=BATCH, shuffle=True)
    losses, norms = [], []
    for epoch in range(EPOCHS):
        for batch in job.batches(loader, epoch=epoch):
            loss = job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
            losses.append(float(loss))
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    job.finish()
    return {"losses": losses, "norms": norms, "digest": _digest(model.state_dict())}


def _plan(nodes: int) -> dict[str, Any]:
    group = {"device_type": "cpu", "num_devices": 1, "device_batch_size": BATCH,
             "virtual_nodes": nodes, "virtual_node_batch_size": BATCH // nodes}  # fmt: skip
    return {
        "schema": "hetflow.plan/1",
        "kind": "split",
        "model": "golden",
        "global_batch_size": BATCH,
        "groups": [group],
        "predicted": {"step_seconds": 0.01, "samples_per_second": 1200.0},
        "proof": {"termination": "feasible", "objective": 0.01, "lower_bound": None, "gap": None,
                  "method": "by hand"},
    }  # fmt: skip


def _digest(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    json.dump({name: train(name, Path(sys.argv[1])) for name in TRAININGS}, sys.stdout)
