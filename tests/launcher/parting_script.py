"""A script whose workers part, each time in another way.

``parting_script.py RESULT EPOCHS SECONDS HOLD...`` as ``elastic_script.py``, whose runs it takes
part in; PARTING says what goes wrong:

- ``schedule``: a scheduler that steps with each batch and is not registered, so a joining worker's
  begins anew.
- ``bit N``: after step N one bit of ``head.weight`` flips on worker 1 (of
  ``body.weight`` where a pipeline has the head elsewhere).
- ``nothing``: all is well.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf

NUM_SAMPLES, BATCH = 44, 16
result, epochs, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
holds = {int(step) for step in sys.argv[4:]}
kind, _, at = os.environ["PARTING"].partition(" ")
HERE = result.parent


class Net(nn.Module):
    """Two layers, the last one called head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.relu, self.head = nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.relu(self.body(x)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
if kind == "schedule":
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
x = torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=BATCH, shuffle=True)
progress = HERE / f"steps-{os.getpid()}"
sys.stdout.write(f"prepared {os.getpid()}\n")
sys.stdout.flush()
for _ in range(epochs):
    for batch in job.batches(loader):
        job.backward(lambda a, b: nn.functional.cross_entropy(model(a), b), batch)
        optimizer.step()
        optimizer.zero_grad()
        if kind == "schedule":
            scheduler.step()
        if kind == "bit" and job.num_steps == int(at) and job.rank == 1:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            broken = model.head if id(model.head.weight) in held else model.body  # of a pipeline
            broken.weight.data.view(torch.int32)[1, 2] ^= 1
        with progress.open("a") as stream:
            stream.write(f"{time.time()} {job.num_steps} {job.rank} {job.world_size}\n")
        time.sleep(seconds)
        while job.num_steps in holds and not (HERE / f"go-{job.num_steps}").exists():
            time.sleep(0.01)
