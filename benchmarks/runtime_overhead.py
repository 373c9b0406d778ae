"""Cost of hetflow's runtime: one virtual node against DistributedDataParallel, V against V x 1.

Two workers (gloo on CPU; NCCL where each has a CUDA device), or one where there is one GPU, run
blocks of steps of each variant in turn, so that a busy machine disturbs all alike. Ratios are of
neighbouring blocks; the median and the quartiles over all rounds are printed.

    python benchmarks/runtime_overhead.py --quick
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import step_counters
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hetflow import runtime as hf
from hetflow.profilers.zoo import factory_of
from hetflow.runtime.job import Job
from hetflow.schema import files
from hetflow.schema.launch import LaunchConfig

WORKERS = 1 if torch.cuda.device_count() == 1 else 2
VIRTUAL_NODES = 8
JOBS: list[Job] = []
OTHERS: list[torch.optim.Optimizer] = []  # of DistributedDataParallel
# Samples of a virtual node; steps of a block; the rounds are fewer for the long one.
MODELS = {"mlp": (32, 4, 16), "digits-cnn": (32, 4, 16), "resnet18": (2, 2, 6)}
if torch.cuda.is_available():
    MODELS = {"mlp": (32, 20, 24), "resnet50": (32, 4, 12), "gpt2": (4, 4, 12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small model")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--models", default=",".join(MODELS), help="which of the models")
    arguments = parser.parse_args()
    models = ["mlp"] if arguments.quick else arguments.models.split(",")
    results = []
    for model in models:  # in processes of its own: a job refuses optimizers that it does not know
        with tempfile.TemporaryDirectory() as folder:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            mp.spawn(worker, args=(folder, port, model), nprocs=WORKERS)
            results.append(json.loads((Path(folder) / "result.json").read_text()))
    document = {
        "benchmark": "runtime_overhead",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "workers": WORKERS,
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


def worker(rank: int, folder: str, port: int, model: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HETFLOW_SLOT": str(rank)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORKERS), "LOCAL_RANK": str(rank)}
    distinct = torch.cuda.device_count() >= WORKERS
    if distinct:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if distinct else "gloo")
    result = measure(model, Path(folder), rank)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    for job in JOBS:
        job.finish()
    dist.destroy_process_group()


def measure(name: str, folder: Path, rank: int) -> dict[str, object]:
    """Seconds a step of DDP, of one virtual node, and of V virtual nodes."""
    size, steps, rounds = MODELS[name]
    variants = {
        "ddp": ddp_stepper(name, size, rank),
        "one": job_stepper(name, size, 1, folder, rank),
        "many": job_stepper(name, size, VIRTUAL_NODES, folder, rank),
    }
    blocks: dict[str, list[float]] = {variant: [] for variant in variants}
    cpu: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds + 2):
        for variant, step in variants.items():
            # V virtual nodes do V times the work of a step.
            repeats = 1 if variant == "many" else steps
            seconds, cpu_seconds = timed(step, repeats)
            if number >= 2:
                blocks[variant].append(seconds)
                cpu[variant].append(cpu_seconds)
    return {
        "model": name,
        "virtual_node_batch_size": size,
        "rounds": rounds,
        "ddp_step_seconds": statistics.median(blocks["ddp"]),
        "one_virtual_node_step_seconds": statistics.median(blocks["one"]),
        "one_over_ddp": ratio(blocks["one"], blocks["ddp"], 1),
        "one_over_ddp_cpu": ratio(cpu["one"], cpu["ddp"], 1),
        "virtual_nodes": VIRTUAL_NODES,
        "many_step_seconds": statistics.median(blocks["many"]),
        "many_over_v_times_one": ratio(blocks["many"], blocks["one"], VIRTUAL_NODES),
        "many_over_v_times_one_cpu": ratio(cpu["many"], cpu["one"], VIRTUAL_NODES),
    }


def timed(step: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Seconds and this process's CPU seconds of one step."""
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    cpu_seconds = time.process_time() - cpu_began
    return (time.perf_counter() - began) / repeats, cpu_seconds / repeats


def ratio(above: list[float], below: list[float], times: int) -> dict[str, float]:
    values = [a / (b * times) for a, b in zip(above, below, strict=True)]
    first, middle, third = statistics.quantiles(values, n=4)
    return {"median": middle, "first_quartile": first, "third_quartile": third}


def parts(name: str) -> tuple[nn.Module, TensorDataset, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model, make_batch, loss = factory_of(name)()
    return model, TensorDataset(*make_batch(512)), loss


def ddp_stepper(name: str, size: int, rank: int) -> Callable[[], None]:
    model, dataset, loss = parts(name)
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    wrapped = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    OTHERS.append(optimizer)
    sampler = DistributedSampler(dataset, shuffle=True)

    def batches():
        while True:
            yield from DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=True)

    source = batches()

    def step() -> None:
        batch = tuple(tensor.to(device) for tensor in next(source))
        loss(wrapped, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def job_stepper(name: str, size: int, nodes: int, folder: Path, rank: int) -> Callable[[], None]:
    path = folder / f"{name}-{nodes}-{rank}.json"
    files.write(path, config_of(name, size, nodes))
    os.environ["HETFLOW_PLAN"] = str(path)
    model, dataset, loss = parts(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job = hf.prepare(model, optimizer)
    JOBS.append(job)
    job.register(*OTHERS)  # else a job refuses their steps beside its own
    loader = DataLoader(dataset, batch_size=size * nodes * WORKERS, shuffle=True, drop_last=True)

    def batches():
        while True:
            yield from job.batches(loader)

    source = batches()

    def step() -> None:
        job.backward(lambda *batch: loss(model, batch), next(source))
        optimizer.step()
        optimizer.zero_grad()

    return step


def config_of(name: str, size: int, nodes: int) -> LaunchConfig:
    kind = "gpu" if torch.cuda.device_count() >= WORKERS else "cpu"
    return step_counters.config_of(name, size, nodes, workers=WORKERS, device_type=kind)


def table(results: list[dict[str, object]]) -> str:
    lines = [
        "ratio: median (quartiles) of wall time; CPU time",
        f"{'model':<11} {'DDP ms':>8} {'hetflow ms':>11}   {'one virtual node / DDP':<34} "
        f"{VIRTUAL_NODES} virtual nodes / {VIRTUAL_NODES} x one",
    ]
    for row in results:
        shown = [
            f"{r['median']:.3f} ({r['first_quartile']:.3f}-{r['third_quartile']:.3f}); "
            f"{c['median']:.3f}"
            for r, c in (
                (row["one_over_ddp"], row["one_over_ddp_cpu"]),
                (row["many_over_v_times_one"], row["many_over_v_times_one_cpu"]),
            )
        ]
        lines.append(
            f"{row['model']:<11} {row['ddp_step_seconds'] * 1e3:8.1f} "
            f"{row['one_virtual_node_step_seconds'] * 1e3:11.1f}   {shown[0]:<34} {shown[1]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
