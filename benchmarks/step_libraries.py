"""A step under DDP, FSDP2, accelerate and hetflow: counts, hidden sums, the host's seconds.

Two workers on the software CUDA device (testing/) train twelve layers of 1024 x 1024. Kernels,
collectives and host synchronisations are those of worker 0 in a steady step that tests no loss.
Step and hidden share are the virtual clock's, of two V100 on NVLink. CPU seconds hold the kernels.

    python benchmarks/step_libraries.py --modes eager,compiled
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from step_counters import WORKERS, counted_steps, run_workers

from hetflow.schema import files
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from hetflow.testing import gpus
from hetflow.testing.fakecuda import build

WIDTH, LAYERS, SIZE = 1024, 12, 32
SKIPPED, COUNTED = 4, 6
LIBRARIES = ("ddp", "fsdp2", "accelerate", "hetflow")
MODES = ("eager", "compiled", "passes", "bf16", "fp16")  # "passes": two of them a step
COLUMNS = ("kernel", "nccl", "host_sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="eager steps only")
    parser.add_argument("--modes", default=",".join(MODES), help="which of the modes")
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help="which of the libraries")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    try:
        build.library()
    except build.CannotBuild as error:
        print(f"nothing counted: {error}")
        return
    results = []
    columns = ("kernels", "sums", "waits", "hidden", "step ms", "CPU ms")
    print(f"{'mode':<10}{'library':<12}" + "".join(f"{name:>9}" for name in columns))
    for mode in ("eager",) if arguments.quick else arguments.modes.split(","):
        for library in arguments.libraries.split(","):
            found = measured(library, mode)
            results.append({"mode": mode, "library": library, **found})
            print(
                f"{mode:<10}{library:<12}{found['kernel']:>9.1f}{found['nccl']:>9.1f}"
                f"{found['host_sync']:>9.1f}{found['hidden_share']:>9.2f}"
                f"{1e3 * found['step_seconds']:>9.2f}{1e3 * found['cpu_seconds']:>9.1f}",
                flush=True,
            )
    if arguments.json:
        document = {"benchmark": "step_libraries", "workers": WORKERS, "results": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def measured(library: str, mode: str) -> dict[str, float]:
    """Counts a step of worker 0, the share of sums that is hidden, and CPU seconds a step."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        machine = gpus(",".join(["V100"] * WORKERS), folder)
        files.write(folder / "config.json", config_of(1 + (mode == "passes")))
        run_workers(
            [__file__, "--worker", library, mode, text],
            {**machine.environment, "HETFLOW_PLAN": str(folder / "config.json")},
        )
        # FSDP2 frees gradients to another stream than the optimizer's, which counts as a race here.
        if library == "hetflow" and machine.faults:
            raise SystemExit(f"{library}, {mode}: {machine.faults}")
        found: dict[str, float] = json.loads((folder / "counted.json").read_text())
        timeline = machine.timeline()
        found["step_seconds"] = timeline.step_seconds
        found["hidden_share"] = timeline.hidden_share
        return found


def config_of(nodes: int) -> LaunchConfig:
    """A split of the batch over the workers, each with so many virtual nodes."""
    size = SIZE // nodes
    slots = tuple(
        WorkerSlot(
            rank=rank,
            device_type="gpu",
            virtual_nodes=tuple(
                VirtualNode(index=rank * nodes + k, batch_size=size) for k in range(nodes)
            ),
        )
        for rank in range(WORKERS)
    )
    return LaunchConfig(model="mlp", global_batch_size=SIZE * WORKERS, workers=slots)


def work(library: str, mode: str, folder: str) -> None:
    """One worker: steps, of which the last are counted."""
    import torch
    from torch import nn

    rank, passes = int(os.environ["RANK"]), 1 + (mode == "passes")
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 8))
    x, y = torch.randn(SIZE * WORKERS * 16, WIDTH), torch.randint(8, (SIZE * WORKERS * 16,))
    step, batches = STEPPERS[library](model, (x, y), mode, passes)
    row = counted_steps(step, batches, SKIPPED, COUNTED, COLUMNS)
    if rank == 0:
        Path(folder, "counted.json").write_text(json.dumps(row))


Stepper = tuple[Callable[[Any], object], Any]


def _plain(model: Any, data: Any, mode: str, passes: int, wrap: Callable[[Any], Any]) -> Stepper:
    """A loop of torch's own."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl")
    device = torch.device("cuda", rank)
    wrapped = wrap(model.to(device))
    called = torch.compile(wrapped, backend="aot_eager") if mode == "compiled" else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=mode == "fp16")
    dataset = TensorDataset(*data)
    sampler = DistributedSampler(dataset, WORKERS, rank)
    loader = DataLoader(dataset, batch_size=SIZE, sampler=sampler, pin_memory=True)

    def step(batch: Any) -> None:
        x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
        for number, (one, label) in enumerate(zip(x.chunk(passes), y.chunk(passes), strict=True)):
            is_last = number == passes - 1
            if hasattr(wrapped, "set_requires_gradient_sync"):
                wrapped.set_requires_gradient_sync(is_last)
            waits = hasattr(wrapped, "no_sync") and not is_last
            with wrapped.no_sync() if waits else nullcontext():
                with _cast(mode):
                    loss = functional.cross_entropy(called(one), label) / passes
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step, loader


def _ddp(model: Any, data: Any, mode: str, passes: int) -> Stepper:
    from torch.nn.parallel import DistributedDataParallel

    return _plain(model, data, mode, passes, DistributedDataParallel)


def _fsdp2(model: Any, data: Any, mode: str, passes: int) -> Stepper:
    from torch.distributed.fsdp import fully_shard

    def wrap(model: Any) -> Any:
        for block in model:
            fully_shard(block)
        return fully_shard(model)

    return _plain(model, data, mode, passes, wrap)


def _accelerate(model: Any, data: Any, mode: str, passes: int) -> Stepper:
    import torch
    from accelerate import Accelerator
    from torch.nn import functional
    from torch.utils.data import DataLoader, TensorDataset

    kinds = {"bf16": "bf16", "fp16": "fp16"}
    accelerator = Accelerator(
        mixed_precision=kinds.get(mode, "no"), gradient_accumulation_steps=passes
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*data), batch_size=SIZE // passes, pin_memory=True)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    called = torch.compile(prepared, backend="aot_eager") if mode == "compiled" else prepared

    waiting = iter(loader)

    def step(_: Any) -> None:
        for _ in range(passes):
            x, y = next(waiting)
            with accelerator.accumulate(prepared):
                with accelerator.autocast():
                    loss = functional.cross_entropy(called(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return step, range(SKIPPED + COUNTED + 1)


def _hetflow(model: Any, data: Any, mode: str, passes: int) -> Stepper:
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.utils.data import DataLoader, TensorDataset

    from hetflow import runtime as hf

    dist.init_process_group("nccl")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job = hf.prepare(model, optimizer)
    called = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
    scaler = torch.amp.GradScaler("cuda") if mode == "fp16" else None
    loader = DataLoader(TensorDataset(*data), batch_size=SIZE * WORKERS, shuffle=True)

    def loss_of(x: Any, y: Any) -> Any:
        with _cast(mode):
            return functional.cross_entropy(called(x), y)

    def step(batch: Any) -> None:
        job.backward(loss_of, batch, scaler=scaler, per_virtual_node=True)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step, job.batches(loader)


STEPPERS = {"ddp": _ddp, "fsdp2": _fsdp2, "accelerate": _accelerate, "hetflow": _hetflow}


def _cast(mode: str) -> Any:
    """Autocast of a mode; nothing in the others."""
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast("cuda", kinds[mode]) if mode in kinds else nullcontext()


if __name__ == "__main__":
    main()
