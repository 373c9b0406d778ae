"""A training whose model, data and disk are given. A script for the launcher, not a test.

Usage: bad_input.py WIDTH NUM_SAMPLES STOP_AFTER FILE_BYTES (0 for no limit).
"""

import resource
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf


def main(width, num_samples, stop_after, file_bytes):
    """Train two epochs; save and leave after so many steps."""
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = hf.prepare(model, optimizer)
    loader = DataLoader(TensorDataset(torch.randn(num_samples, 5)), batch_size=16, shuffle=True)
    for _ in range(2):
        for batch in job.batches(loader):
            job.backward(lambda x: model(x).square().mean(), batch)
            optimizer.step()
            optimizer.zero_grad()
            if job.num_steps == stop_after:
                job.checkpoint()
                sys.exit(0)
    job.print("steps", job.num_steps)


if __name__ == "__main__":
    main(*(int(value) for value in sys.argv[1:]))
