"""A pipeline's script that holds where a test wants it to, and notes every sample it trained on.

Arguments: folder, epochs, then the steps to hold at until ``go-STEP`` is there. Being asked to
hand over leaves ``asked-PID``.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf

folder, epochs, holds = Path(sys.argv[1]), int(sys.argv[2]), {int(arg) for arg in sys.argv[3:]}
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
job.register(scheduler)
hand_over = signal.getsignal(signal.SIGUSR1)


def asked(number: int, frame: object) -> None:
    hand_over(number, frame)
    (folder / f"asked-{os.getpid()}").touch()


signal.signal(signal.SIGUSR1, asked)
data = TensorDataset(torch.arange(40), torch.randn(40, 6), torch.randint(3, (40,)))
notes = (folder / f"steps-{os.getpid()}").open("a")

for _ in range(epochs):
    for batch in job.batches(DataLoader(data, batch_size=8, shuffle=True)):
        seen: list[int] = []

        def loss_of(index, x, y, seen=seen):
            seen.extend(index.tolist())
            return nn.functional.cross_entropy(model(x), y)

        job.backward(loss_of, batch)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(job.num_steps, job.rank, job.world_size, *sorted(seen), file=notes, flush=True)
        while job.num_steps in holds and not (folder / f"go-{job.num_steps}").exists():
            time.sleep(0.01)
job.finish()
if job.is_main:
    torch.save(dict(model.state_dict()), folder / "end.pt")
