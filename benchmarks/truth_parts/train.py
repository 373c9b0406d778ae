"""Train one of workloads.py under any plan: an ordinary script over a map-style dataset.

    hetflow launch PLAN benchmarks/truth_parts/train.py --target FILE:FACTORY --steps 40
        --batch-size 96

Samples are drawn once and read again and again, so that the data take little memory. They are read
as a profile reads them: torch's Subset would load a virtual node at once, and without it each
sample has random streams of its own.
"""

import argparse

import torch
from torch.utils.data import DataLoader

from hetflow import runtime as hf
from hetflow.profilers import targets


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    workload = targets.load(targets.parse(arguments.target))
    samples = workload.dataset.of_length(arguments.steps * arguments.batch_size)
    loader = DataLoader(samples, batch_size=arguments.batch_size, shuffle=True)
    model = workload.model
    optimizer = workload.make_optimizer(model.parameters())
    job = hf.prepare(model, optimizer)
    for batch in job.batches(loader):
        job.backward(lambda *tensors: workload.loss(model, tensors), batch)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
