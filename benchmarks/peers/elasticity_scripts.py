"""The same training under hetflow, torchrun and torchft (benchmarks/elasticity.py).

Each worker appends (time, step, process) to a file of its own after every step.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

BATCH, SAMPLES, WIDTH = 32, 3200, 256
SNAPSHOT_STEPS = 10  # of the torchrun script, which must write its state to go on from it


def main() -> None:
    kind, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    {"hetflow": hetflow, "torchrun": torchrun, "torchft": torchft}[kind](
        model, optimizer, folder, steps
    )


def note(folder: Path, step: int) -> None:
    with (folder / f"steps-{os.getpid()}").open("a") as stream:
        stream.write(f"{time.time()} {step}\n")


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 64, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(10, (SAMPLES,), generator=generator))


def hetflow(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, steps: int) -> None:
    from hetflow import runtime as hf

    job = hf.prepare(model, optimizer)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=BATCH, shuffle=True)
    while job.num_steps < steps:
        for batch in job.batches(loader):
            job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
            optimizer.step()
            optimizer.zero_grad()
            note(folder, job.num_steps)
            if job.num_steps >= steps:
                break


def torchrun(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, steps: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    snapshot, step = folder / "snapshot.pt", 0
    if snapshot.exists():
        state = torch.load(snapshot)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    parallel = nn.parallel.DistributedDataParallel(model)
    data, share = dataset(), BATCH // size
    while step < steps:
        start = step * BATCH % SAMPLES + rank * share
        x, y = data[start : start + share]
        nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note(folder, step)
        if rank == 0 and step % SNAPSHOT_STEPS == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, folder / "snapshot.new")
            (folder / "snapshot.new").rename(snapshot)
    dist.destroy_process_group()


def torchft(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, steps: int) -> None:
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{os.environ['REPLICA']}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    stepper = Optimizer(manager, optimizer)
    data = dataset()
    while manager.current_step() < steps:
        size = max(manager.num_participants(), 1) if manager.current_step() else 2
        start = manager.current_step() * BATCH % (SAMPLES - BATCH)
        x, y = data[start : start + BATCH // size]
        stepper.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        # Its DistributedDataParallel (0.2, under torch 2.13) ends the process when a peer dies.
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        manager.allreduce(flat).wait()
        torch._foreach_copy_(
            gradients,
            [
                part.view_as(gradient)
                for part, gradient in zip(
                    flat.split([gradient.numel() for gradient in gradients]), gradients, strict=True
                )
            ],
        )
        stepper.step()
        note(folder, manager.current_step())
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
