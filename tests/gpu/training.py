"""A script that trains on GPUs: ``training.py FOLDER EPOCHS SECONDS HOW``.

Convolution, batch-norm, dropout and AdaptiveAvgPool2d(1), as a small ResNet. Each worker appends a
line a step to ``steps-PID``; the main one writes ``told.json`` with the digest of all that training
leaves. HOW is empty, ``weighted``, ``die=STEP`` (rank 1 is killed after
that step, once), ``late=STEP`` (the same, when the others wait for it in the next step),
``raise=STEP`` or ``stall=STEP`` (it hangs there).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.runtime.nested_tensors import digest_of

folder, epochs, seconds, how = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
torch.manual_seed(3)
model = nn.Sequential(
    *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    *(nn.Dropout(0.2), nn.Linear(6, 4)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(48, 3, 6, 6), torch.arange(48) % 4)
loader = DataLoader(data, batch_size=16, shuffle=True)
progress, losses = folder / f"steps-{os.getpid()}", []


def loss_of(x: torch.Tensor, y: torch.Tensor) -> object:
    loss = nn.functional.cross_entropy(model(x), y)
    return hf.Weighted(loss, (y >= 0).sum()) if how == "weighted" else loss


for _ in range(epochs):
    for batch in job.batches(loader):
        losses.append(job.backward(loss_of, batch))
        optimizer.step()
        optimizer.zero_grad()
        with progress.open("a") as stream:
            stream.write(f"{job.num_steps} {job.rank} {job.world_size}\n")
        time.sleep(seconds)
        if job.rank == 1 and how == f"stall={job.num_steps}":
            time.sleep(1000)
        once = folder / "died"
        if job.rank == 1 and how in (
            f"{word}={job.num_steps}" for word in ("die", "late", "raise")
        ):
            if not once.exists():
                once.touch()
                if how.startswith("late"):
                    time.sleep(0.7)
                if how.startswith("raise"):
                    raise ValueError("no such picture")
                os.kill(os.getpid(), signal.SIGKILL)
backend = dist.get_backend() if dist.is_initialized() else None
job.finish()
tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
for index, state in optimizer.state_dict()["state"].items():
    tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
if job.is_main:
    told = {
        "digest": digest_of(tensors),
        "losses": [loss.item() for loss in losses],
        "device": str(next(model.parameters()).device),
        "name": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "backend": backend,
    }
    (folder / "told.json").write_text(json.dumps(told))
