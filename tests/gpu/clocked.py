"""A script whose steps the virtual clock times: ``clocked.py BACKEND FAULT``.

BACKEND is ``eager`` or one of torch.compile. FAULT ``waits`` waits for each sum where it begins,
and ``one-stream`` has no stream beside the one of computation. Four layers fill a bucket, which is
the least at which torch.compile cuts a graph.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.devices.cuda import CudaBackend
from hetflow.runtime import peers

WIDTH, NUM_LAYERS, NUM_STEPS = 256, 24, 5


def model_of() -> nn.Module:
    """Equal layers."""
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def workload() -> tuple[Any, ...]:
    """The same to be profiled."""
    return (
        model_of(),
        lambda size: torch.randn(size, WIDTH),
        lambda model, x: model(x).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )


def plant(fault: str) -> None:
    """Take away what hides exchanges."""
    if fault == "one-stream":
        CudaBackend.side_stream = lambda *_: None
    if fault == "waits":
        start = peers.all_reduce

        def all_reduce(*arguments: Any, **named: Any) -> Any:
            transfer = start(*arguments, **named)
            if transfer is not None:
                transfer.wait()
            return transfer

        peers.all_reduce = all_reduce


def main(backend: str, fault: str) -> None:
    CudaBackend.bucket_bytes = 1 << 20
    plant(fault)
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = hf.prepare(model, optimizer)
    called = model if backend == "eager" else torch.compile(model, backend=backend)
    data = TensorDataset(torch.randn(512 * NUM_STEPS, WIDTH))
    for batch in job.batches(DataLoader(data, batch_size=512)):
        job.backward(lambda x: called(x).square().mean(), batch)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
