"""What a training step asks of a GPU: hetflow against plain DistributedDataParallel, in counts.

Two workers on the software CUDA device (testing/) count kernels, copies, collectives and host
synchronisations of a step in the steady state, the host's CPU seconds, and the tensors' peak
memory. Kernels are the CPU's there, so seconds are of small models only, and no kernel's time is a
GPU's.

    python benchmarks/step_counters.py --quick
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetflow.schema import files
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.testing.fakecuda import build
from hetflow.tests.plan_parts import split_plan, whole_group
from hetflow.tests.testing.hosts import software_environment

WORKERS, SKIPPED = 2, 8  # steps 1, 2, 4, 8 and 16 test the loss
# Samples of a worker, and counted steps.
MODELS = {
    "mlp": (32, 7),
    "digits-cnn": (32, 7),
    "resnet18": (2, 3),
    "gpt-small": (2, 4),
    "resnet50": (2, 1),
}
# The level of determinism, then what is asked for beside it.
VARIANTS = {
    "ddp": ("none", ""),
    "hetflow": ("none", ""),
    "weighted": ("none", "weighted"),
    "checkpoint": ("none", "checkpoint"),
    "elastic": ("elastic", ""),
}
COLUMNS = ("kernel", "h2d", "d2h", "nccl", "host_sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small model")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--models", default=",".join(MODELS), help="which of the models")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    if not can_count():
        return
    names = ["mlp"] if arguments.quick else arguments.models.split(",")
    results = [
        {"model": name, "variant": variant, **measured(name, variant)}
        for name in names
        for variant in VARIANTS
    ]
    document = {"benchmark": "step_counters", "workers": WORKERS, "results": results}
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


def measured(name: str, variant: str) -> dict[str, float]:
    """Counts a step of worker 0, by column, ``cpu_seconds`` and ``peak_bytes``."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        environment = software_environment(",".join(["V100"] * WORKERS))
        script = [str(Path(__file__).resolve()), "--worker", name, variant, text]
        run_workers(script, environment) if variant == "ddp" else run_hetflow(
            script, name, variant, folder, environment
        )
        found: dict[str, float] = json.loads((folder / "counted.json").read_text())
        return found


def can_count() -> bool:
    """Whether the software device can be built here; else says why not."""
    try:
        build.library()
    except build.CannotBuild as error:
        print(f"nothing counted: {error}")
        return False
    return True


def config_of(
    name: str,
    size: int,
    nodes: int = 1,
    *,
    workers: int = WORKERS,
    device_type: str = "gpu",
    shard: Any = None,
) -> LaunchConfig:
    """A batch that is split evenly: virtual nodes of ``size`` samples, ``nodes`` a worker.

    With ``shard`` the workers share states, evenly too.
    """
    slots = tuple(
        WorkerSlot(
            rank=rank,
            device_type=device_type,
            virtual_nodes=tuple(
                VirtualNode(index=rank * nodes + k, batch_size=size) for k in range(nodes)
            ),
            state_share_bytes=None if shard is None else 1,
        )
        for rank in range(workers)
    )
    batch_size = size * nodes * workers
    return LaunchConfig(model=name, global_batch_size=batch_size, workers=slots, shard=shard)


def meeting() -> dict[str, str]:
    """Environment by which workers meet each other."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORKERS)}


def run_workers(script: list[str], environment: Mapping[str, str]) -> None:
    """Run a script's workers, which meet each other, to their end."""
    shared = {**environment, **meeting(), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, *script],
            env={**shared, **dict.fromkeys(("RANK", "LOCAL_RANK", "HETFLOW_SLOT"), str(rank))},
        )
        for rank in range(WORKERS)
    ]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit(f"{' '.join(script[1:-1])}: exit codes {codes}")


def counted_steps(
    step: Callable[[Any], object],
    batches: Iterable[Any],
    skipped: int,
    counted: int,
    columns: Sequence[str],
) -> dict[str, float]:
    """What the median step counts, its CPU seconds and the peak, after the skipped ones."""
    import torch

    device_counts, rows = sys.modules["_fakecuda"], []  # comes with torch
    began = time.process_time()
    for index, batch in enumerate(batches):
        if index == skipped + counted:
            break
        step(batch)
        seconds, found = time.process_time() - began, device_counts.counts()
        rows.append({"cpu_seconds": seconds, **{name: found.get(name, 0) for name in columns}})
        if index == skipped - 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        device_counts.reset_counts()  # the next step's begin with its batch
        began = time.process_time()
    row = {name: float(statistics.median(r[name] for r in rows[skipped:])) for name in rows[0]}
    row["peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return row


def run_hetflow(
    script: list[str], name: str, variant: str, folder: Path, environment: dict[str, str]
) -> None:
    level, extra = VARIANTS[variant]
    files.write(folder / "plan.json", plan_of(name, MODELS[name][0]))
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--determinism", level, "-q"]
    if extra == "checkpoint":
        command += ["--checkpoint", str(folder / "saved"), "--checkpoint-every", "1000"]
    command += ["-o", str(folder / "run"), str(folder / "plan.json"), *script]
    done = subprocess.run(
        command, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)


def plan_of(name: str, size: int) -> Plan:
    group = whole_group(
        device_type="V100",
        num_devices=WORKERS,
        device_batch_size=size,
        virtual_nodes=1,
        virtual_node_batch_size=size,
    )
    proof = Proof(termination="feasible", objective=1, lower_bound=None, gap=None, method="by hand")
    return split_plan(
        model=name,
        global_batch_size=size * WORKERS,
        groups=(group,),
        predicted=Prediction(step_seconds=1.0, samples_per_second=float(size * WORKERS)),
        proof=proof,
    )


def work(name: str, variant: str, folder: str) -> None:
    """One worker: steps, of which the last are counted."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from hetflow.profilers.zoo import factory_of

    size, counted = MODELS[name]
    number = SKIPPED + counted + 1
    torch.manual_seed(0)
    model, make_batch, loss = factory_of(name)()
    made = make_batch(number * size * WORKERS)
    dataset = TensorDataset(*(made if isinstance(made, tuple | list) else (made,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rank = int(os.environ["RANK"])

    def count(step: Callable[[Any], object], batches: Any) -> None:
        row = counted_steps(step, batches, SKIPPED, counted, COLUMNS)
        if rank == 0:
            Path(folder, "counted.json").write_text(json.dumps(row))

    if variant == "ddp":
        import torch.distributed as dist

        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=WORKERS)
        device = torch.device("cuda", rank)
        wrapped: nn.Module = DistributedDataParallel(model.to(device))
        sampler = DistributedSampler(dataset, WORKERS, rank)

        def step(batch: Any) -> None:
            moved = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
            loss(wrapped, moved if len(moved) > 1 else moved[0]).backward()
            optimizer.step()
            optimizer.zero_grad()

        count(step, DataLoader(dataset, batch_size=size, sampler=sampler))
        dist.destroy_process_group()
        return

    from hetflow import runtime as hf

    job = hf.prepare(model, optimizer)
    weighted = VARIANTS[variant][1] == "weighted"

    def loss_of(*batch: Any) -> Any:
        found = loss(model, batch if len(batch) > 1 else batch[0])
        return hf.Weighted(found, float(len(batch[0]))) if weighted else found

    def own_step(batch: Any) -> None:
        job.backward(loss_of, batch)
        optimizer.step()
        optimizer.zero_grad()

    loader = DataLoader(dataset, batch_size=size * WORKERS, shuffle=True)
    count(own_step, job.batches(loader))


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"{'model':<11} {'variant':<11} "
        + " ".join(f"{c:>9}" for c in COLUMNS)
        + "    CPU ms  peak MiB"
    ]
    for row in results:
        counts = " ".join(f"{row[column]:9.1f}" for column in COLUMNS)
        lines.append(
            f"{row['model']:<11} {row['variant']:<11} {counts} {row['cpu_seconds'] * 1e3:9.1f} "
            f"{row['peak_bytes'] / 2**20:9.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
