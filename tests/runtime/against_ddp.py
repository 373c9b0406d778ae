"""The same training by hetflow and by plain DistributedDataParallel. A script, not a test.

Usage: against_ddp.py hetflow|ddp OUTPUT_FILE.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf

BATCH, STEPS = 24, 6  # 2, 3 and 4 divide the batch


def parts():
    """A small float32 network with a batch-norm, its optimizer, and the data."""
    torch.manual_seed(2)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    model = nn.Sequential(*layers)
    x, y = torch.randn(BATCH * STEPS, 3, 6, 6), torch.randint(4, (BATCH * STEPS,))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), TensorDataset(x, y)


def by_hetflow():
    """Virtual nodes, in order of the samples."""
    model, optimizer, data = parts()
    job = hf.prepare(model, optimizer)
    for batch in job.batches(DataLoader(data, batch_size=BATCH)):
        job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    return model


def by_ddp():
    """A rank takes the slice that its virtual node would have."""
    model, optimizer, data = parts()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), BATCH // dist.get_world_size()
    wrapped = nn.parallel.DistributedDataParallel(model)
    for x, y in DataLoader(data, batch_size=BATCH):
        own = slice(rank * size, (rank + 1) * size)
        nn.functional.cross_entropy(wrapped(x[own]), y[own]).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return model


def main(which, output):
    """Train, and leave the parameters: JSON keeps the bits of a float32."""
    model = by_ddp() if which == "ddp" else by_hetflow()
    if os.environ["RANK"] == "0":
        flat = torch.cat([value.detach().flatten() for value in model.parameters()])
        output.write_text(json.dumps(flat.tolist()))
    if which == "ddp":
        os._exit(0)  # taking stock DDP over gloo down sometimes hangs; what it computed is done


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
