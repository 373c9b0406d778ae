"""Inference that several worlds run and must agree on. A script for the launcher, not a test.

Usage: predicting.py OUTPUT_FOLDER.
"""

import os
import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hetflow import runtime as hf

BATCH = 16
NUM_SAMPLES = 2 * BATCH + 5  # the last batch leaves some virtual nodes without samples


class Noisy(Dataset):
    """Points with random noise, and their own number."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.full((6,), float(index)) / 7 + torch.rand(6) + random.random(), index


class Largest:
    """The most samples that were in the model at once."""

    samples = 0


def main(folder, rank):
    """Train a little, so that virtual nodes have unlike batch-norm statistics; then predict."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = hf.prepare(model, optimizer)
    for batch in job.batches(DataLoader(Noisy(), batch_size=BATCH, shuffle=True, drop_last=True)):
        job.backward(lambda x, index: model(x).square().mean(), batch)
        optimizer.step()
        optimizer.zero_grad()
    loader = DataLoader(Noisy(), batch_size=BATCH, drop_last=True)

    def rich(x, index):
        Largest.samples = max(Largest.samples, len(x))
        y = model(x)
        # Dropout without a switch, as for Monte Carlo estimates.
        drawn = nn.functional.dropout(y, 0.5, training=True)
        return {"index": index, "y": y, "parts": (drawn, y > 0, "text", len(index))}

    def merged(items):
        return {
            "index": torch.cat([item["index"] for item in items]),
            "y": torch.cat([item["y"] for item in items]),
            "drawn": torch.cat([item["parts"][0] for item in items]),
            "positive": torch.cat([item["parts"][1] for item in items]),
            "lengths": [item["parts"][3] for item in items],
            "grad": any(item["y"].requires_grad for item in items),
        }

    main_only = [*job.predict(loader, rich)]
    everywhere = [*job.predict(loader, rich, on_all=True)]
    with job.evaluation():
        whole = model(torch.stack([torch.full((6,), float(i)) for i in range(4)]))
    few = []
    for y in job.predict(loader, lambda x, index: model(x)):  # left early
        few.append(y)
        if len(few) == 3:
            break
    after = [torch.rand(1) for _ in job.predict(loader, lambda x, index: x.sum(), on_all=True)]
    results = {
        "num_main": len(main_only),
        "main": merged(main_only) if main_only else None,
        "all": merged(everywhere),
        "training": model.training,
        "whole": whole,
        "few": few,
        "drawn_after": torch.cat(after),
        "largest": Largest.samples,
    }
    job.finish()
    torch.save(results, folder / f"results{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ.get("HETFLOW_SLOT", "0")))
