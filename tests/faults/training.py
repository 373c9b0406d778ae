"""What the fault campaign trains: batch-norm, dropout, a schedule, draws of its own.

``training.py FOLDER EPOCHS [pipeline]``: after each step it appends "STEP PID" to
``FOLDER/progress``, and it goes on only while ``FOLDER/limit`` is above it. It shuts its
connections down when ``FOLDER/cut-PID`` comes. Split runs predict after each epoch; while
``FOLDER/hold-predict`` is there, a worker in its part of that leaves ``predicting-PID`` and waits.
While ``FOLDER/hold-finish`` is there, a worker whose job is over leaves ``finished-PID`` and waits.
The first worker writes ``FOLDER/digest-all`` of all that training leaves, and
``FOLDER/digest-weights`` without the optimizer's state.
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.runtime.nested_tensors import digest_of
from hetflow.tests.launcher.saved_log import Log

HERE, EPOCHS = Path(sys.argv[1]), int(sys.argv[2])
NUM_SAMPLES, BATCH = 70, 16  # five steps an epoch, the last of six samples


def cut_when_asked() -> None:
    """Shut every connection of this process down, as a network does that breaks."""
    asked = HERE / f"cut-{os.getpid()}"
    while True:
        time.sleep(0.01)
        if asked.exists():
            asked.unlink()
            for number in map(int, os.listdir("/proc/self/fd")):
                try:
                    with socket.socket(fileno=os.dup(number)) as own:
                        if own.family in (socket.AF_INET, socket.AF_INET6):
                            own.getpeername()  # gloo aborts when a listening one is shut down
                            own.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


def hold(step: int) -> None:
    while step >= int((HERE / "limit").read_text()):
        time.sleep(0.01)


def predicted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    while (HERE / "hold-predict").exists():
        (HERE / f"predicting-{os.getpid()}").touch()
        time.sleep(0.01)
    return model(x).sum(1)


threading.Thread(target=cut_when_asked, daemon=True).start()
torch.manual_seed(3)
model = nn.Sequential(
    *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()),
    *(nn.Linear(6 * 16, 256), nn.ReLU(), nn.Linear(256, 4)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
job = hf.prepare(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.8)
log = Log()
job.register(scheduler, log)
pictures = torch.randn(NUM_SAMPLES, 3, 6, 6, generator=torch.Generator().manual_seed(4))
dataset = TensorDataset(pictures, torch.arange(NUM_SAMPLES) % 4)
loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
in_order = DataLoader(dataset, batch_size=BATCH)
is_pipeline = "pipeline" in sys.argv
with (HERE / "progress").open("a") as progress:
    for _ in range(EPOCHS):
        for batch in job.batches(loader):
            mix = 1 + 0.01 * np.random.random()  # noqa: NPY002

            def loss_of(x: torch.Tensor, y: torch.Tensor, mix: float = mix) -> torch.Tensor:
                return nn.functional.cross_entropy(model(x * mix), y)

            loss = job.backward(loss_of, batch)
            optimizer.step()
            optimizer.zero_grad()
            log.values.append(loss.item())
            progress.write(f"{job.num_steps} {os.getpid()}\n")
            progress.flush()
            hold(job.num_steps)
        scheduler.step()
        with job.evaluation():
            log.values.append(float(model(pictures[:1]).sum()))
        if not is_pipeline:
            parts = list(job.predict(in_order, predicted, on_all=True))
            log.values.append(float(torch.cat(parts).sum()) if parts else 0.0)
job.finish()
while (HERE / "hold-finish").exists():
    (HERE / f"finished-{os.getpid()}").touch()
    time.sleep(0.01)
tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
told = {"weights": digest_of(tensors)}  # of shared states an optimizer has a part
for index, state in optimizer.state_dict()["state"].items():
    tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
told["all"] = digest_of(tensors)
if job.is_main:
    for name, found in told.items():
        whole = [found, log.values, optimizer.param_groups[0]["lr"], job.num_steps]
        digest = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
        (HERE / f"digest-{name}").write_text(digest)
