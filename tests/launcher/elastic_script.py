"""A script whose workers change: batch-norm, dropout, augmentation, a schedule, draws of its own.

``elastic_script.py RESULT EPOCHS SECONDS HOLD...``: sleeps SECONDS a step until the file ``hurry``
is there; after each step in HOLD it waits until the file ``go-STEP`` is there. Writes the digest of
all that training leaves. With AWKWARD set the script does all that is awkward for a change: data
workers, a sampler of its own, weighted losses, gradients kept over two steps, a buffer that is no
batch-norm's, predictions. With IN_PARTS set its own loop goes over the parts of each batch; with
STREAM set the pictures come as a stream.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from hetflow import runtime as hf
from hetflow.runtime.nested_tensors import digest_of
from hetflow.tests.launcher.saved_log import Log

NUM_SAMPLES, BATCH = 44, 16
result, epochs, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
holds = {int(step) for step in sys.argv[4:]}
awkward, in_parts = bool(os.environ.get("AWKWARD")), bool(os.environ.get("IN_PARTS"))
HERE = result.parent


class Pictures(Dataset):
    """Small pictures with noise that is drawn anew each time."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = torch.full((3, 6, 6), index / NUM_SAMPLES)
        return picture + 0.1 * torch.randn(3, 6, 6), index % 4


class Streamed(IterableDataset):
    """The same pictures, without an index."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        pictures = Pictures()
        return (pictures[number] for number in range(NUM_SAMPLES))


class Scale(nn.Module):
    """Divides by a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        return x / self.mean


torch.manual_seed(3)
model = nn.Sequential(
    *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()),
    *([Scale()] if awkward else []),
    nn.Linear(6 * 16, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = hf.prepare(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
log = Log()
job.register(scheduler, log)
loader = DataLoader(Pictures(), batch_size=BATCH, shuffle=True)
if awkward:
    weights = torch.arange(1.0, NUM_SAMPLES + 1)
    sampler = WeightedRandomSampler(weights, NUM_SAMPLES, replacement=True)
    loader = DataLoader(Pictures(), batch_size=BATCH, sampler=sampler, num_workers=1)
if os.environ.get("STREAM"):
    loader = DataLoader(Streamed(), batch_size=BATCH, num_workers=int(awkward))
in_order = DataLoader(Pictures(), batch_size=BATCH)
progress = HERE / f"steps-{os.getpid()}"
sys.stdout.write(f"prepared {os.getpid()}\n")
sys.stdout.flush()
for _ in range(epochs):
    for batch in job.batches(loader):
        mix = 1 + 0.01 * np.random.random()  # noqa: NPY002

        def loss_of(x: torch.Tensor, y: torch.Tensor, mix: float = mix) -> torch.Tensor:
            return nn.functional.cross_entropy(model(x * mix), y)

        def weighted(x: torch.Tensor, y: torch.Tensor, mix: float = mix) -> hf.Weighted:
            return hf.Weighted(loss_of(x, y, mix), float(1 + y.sum()))

        # Kept gradients and weights do not go together, so they take turns.
        keeps = awkward and batch.epoch % 2 == 0
        # The weights are any numbers, so that the mean is one of this training's own.
        function = weighted if awkward and not keeps else loss_of
        if in_parts:
            for part in job.parts(batch):
                loss = job.backward(function(*part), per_virtual_node=True)
        else:
            loss = job.backward(function, batch, per_virtual_node=True)
        if not keeps or batch.step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        log.values.append(loss.item())
        with progress.open("a") as stream:
            stream.write(f"{time.time()} {job.num_steps} {job.rank} {job.world_size}\n")
        if seconds and not (HERE / "hurry").exists():
            time.sleep(seconds)
        while job.num_steps in holds and not (HERE / f"go-{job.num_steps}").exists():
            time.sleep(0.01)
    scheduler.step()
    with job.evaluation():
        log.values.append(float(model(torch.ones(1, 3, 6, 6)).sum()))
    optimizer.zero_grad()
    if awkward:
        outputs = list(job.predict(in_order, lambda x, y: model(x).sum(), on_all=True))
        log.values.append(float(sum(outputs)))
job.finish()
tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
for index, parameter in enumerate(model.parameters()):  # no state_dict: workers may share it
    state = optimizer.state[parameter]
    tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
told = [digest_of(tensors), log.values, optimizer.param_groups[0]["lr"], job.num_steps]
if job.is_main:
    result.write_text(hashlib.sha256(json.dumps(told).encode()).hexdigest())
