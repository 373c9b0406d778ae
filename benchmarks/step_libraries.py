"""A step under DDP, FSDP2, accelerate and hetflow: counts, hidden sums, seconds side by side.

Counts: two workers on the software CUDA device (testing/) train twelve layers of 1024 x 1024.
Kernels, collectives and host synchronisations are those of worker 0 in a steady step that tests no
loss. Step and hidden share are the virtual clock's, of two V100 on NVLink.

Seconds: two workers on the CPU (gloo) hold all libraries in one process each, and take a block of
steps of each in turn, so that a busy machine disturbs all alike. Ratios are of neighbouring blocks;
medians and quartiles are printed. "tiny" is three layers of 16, so nearly all of it is the host's.

    python benchmarks/step_libraries.py --modes eager,compiled --only counts
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from step_counters import WORKERS, can_count, config_of, counted_steps, meeting, run_workers

from hetflow.schema import files
from hetflow.testing import gpus

SIZE = 32  # samples of a worker
# Width and number of layers; steps of a block and rounds of seconds.
MODELS = {"tiny": (16, 3, 20, 80), "wide": (1024, 12, 1, 16)}
SKIPPED, COUNTED = 8, 6  # steps 1, 2, 4, 8 and 16 test the loss
LIBRARIES = ("ddp", "fsdp2", "accelerate", "hetflow")
MODES = ("eager", "compiled", "passes", "bf16", "fp16")  # "passes": two of them a step
COLUMNS = ("kernel", "nccl", "host_sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="eager steps only")
    parser.add_argument("--modes", default=",".join(MODES), help="which of the modes")
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help="which of the libraries")
    parser.add_argument("--only", choices=("counts", "seconds"), help="one half of the tables")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        time_steps(*arguments.worker)
        return
    modes = ["eager"] if arguments.quick else arguments.modes.split(",")
    libraries = arguments.libraries.split(",")
    document: dict[str, Any] = {"benchmark": "step_libraries", "workers": WORKERS}
    if "FAKECUDA" in os.environ:
        document["counts"] = counts(modes, libraries)
    elif arguments.only != "seconds":
        document |= counted(sys.argv[1:])
    if arguments.only != "counts":
        document["seconds"] = seconds(modes, libraries)
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def counted(arguments: list[str]) -> dict[str, Any]:
    """What this script counts in a process of the software device; it prints too."""
    if not can_count():
        return {}
    with tempfile.TemporaryDirectory() as text:
        path = Path(text, "counted.json")
        command = [sys.executable, __file__, *arguments, "--only", "counts", "--json", str(path)]
        environment = {**machine_in(Path(text)).environment, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True)
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def machine_in(folder: Path) -> Any:
    """Two software V100 that write into a folder of this one."""
    own = folder / "machine"
    own.mkdir()
    return gpus(",".join(["V100"] * WORKERS), own)


def counts(modes: Iterable[str], libraries: Iterable[str]) -> list[dict[str, Any]]:
    """Count and print."""
    # Workers are forked from this process, which has imported what takes them seconds.
    import accelerate  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    from hetflow import runtime  # noqa: F401

    results = []
    columns = ("kernels", "sums", "waits", "hidden", "step ms")
    print(f"{'mode':<10}{'library':<12}" + "".join(f"{name:>9}" for name in columns))
    for mode in modes:
        for library in libraries:
            found = measured(library, mode)
            results.append({"mode": mode, "library": library, **found})
            print(
                f"{mode:<10}{library:<12}{found['kernel']:>9.1f}{found['nccl']:>9.1f}"
                f"{found['host_sync']:>9.1f}{found['hidden_share']:>9.2f}"
                f"{1e3 * found['step_seconds']:>9.2f}",
                flush=True,
            )
    return results


def seconds(modes: Iterable[str], libraries: Iterable[str]) -> list[dict[str, Any]]:
    """Time and print all libraries side by side, wall and CPU seconds of a step on worker 0."""
    results = []
    print(f"{'model':<7}{'mode':<10}{'library':<12}{'ms, over DDP (quartiles): wall; CPU':>40}")
    for size in MODELS:
        for mode in modes:
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                config = config_of("mlp", *cut(mode), device_type="cpu")
                files.write(folder / "config.json", config)
                run_workers(
                    [__file__, "--worker", ",".join(libraries), mode, size, text],
                    {**os.environ, "HETFLOW_PLAN": str(folder / "config.json")},
                )
                found = json.loads((folder / "timed.json").read_text())
            for library, blocks in found.items():
                row = {"size": size, "mode": mode, "library": library}
                texts = []
                for number, name in enumerate(("wall", "cpu")):
                    own = [block[number] for block in blocks]
                    base = [block[number] for block in next(iter(found.values()))]
                    ratios = [a / b for a, b in zip(own, base, strict=True)]
                    low, middle, high = statistics.quantiles(ratios, n=4)
                    row |= {f"{name}_seconds": statistics.median(own), f"{name}_ratio": middle}
                    row[f"{name}_quartiles"] = [low, high]
                    middle_ms = 1e3 * statistics.median(own)
                    texts.append(f"{middle_ms:.2f}, {middle:.2f} ({low:.2f} to {high:.2f})")
                results.append(row)
                print(f"{size:<7}{mode:<10}{library:<12}{'; '.join(texts):>40}", flush=True)
    return results


def measured(library: str, mode: str) -> dict[str, float]:
    """Counts a step of worker 0, the step and the share of sums that is hidden."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        machine = machine_in(folder)
        files.write(folder / "config.json", config_of("mlp", *cut(mode)))
        shared = {**machine.environment, "HETFLOW_PLAN": str(folder / "config.json"), **meeting()}
        workers = []
        for rank in map(str, range(WORKERS)):
            if not (pid := os.fork()):
                os.environ |= {**shared, "RANK": rank, "LOCAL_RANK": rank, "HETFLOW_SLOT": rank}
                try:
                    count(library, mode, folder / "counted.json")
                    os._exit(0)
                finally:
                    traceback.print_exc()
                    os._exit(1)
            workers.append(pid)
        if any([os.waitpid(pid, 0)[1] for pid in workers]):
            raise SystemExit(f"{library}, {mode}: a worker has failed")
        # FSDP2 frees gradients to another stream than the optimizer's, which counts as a race here.
        if library == "hetflow" and machine.faults:
            raise SystemExit(f"{library}, {mode}: {machine.faults}")
        found: dict[str, float] = json.loads((folder / "counted.json").read_text())
        timeline = machine.timeline()
        found["step_seconds"] = timeline.step_seconds
        found["hidden_share"] = timeline.hidden_share
        return found


def cut(mode: str) -> tuple[int, int]:
    """The samples of a pass, and the passes of a worker's step."""
    passes = 2 if mode == "passes" else 1
    return SIZE // passes, passes


def count(library: str, mode: str, path: Path) -> None:
    """One worker on the software device: steps, of which the last are counted."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    step, batches = stepper(library, mode, "wide")
    row = counted_steps(step, batches(), SKIPPED, COUNTED, COLUMNS)
    if rank == 0:
        path.write_text(json.dumps(row))
    torch.cuda.synchronize()


def time_steps(libraries: str, mode: str, size: str, folder: str) -> None:
    """One worker on the CPU: blocks of steps of all libraries in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[tuple[float, float]]] = {}
    steps: dict[str, tuple[Callable[[Any], object], Iterator[Any]]] = {}
    # hetflow comes last: it is told of the others' optimizers.
    for library in sorted(libraries.split(","), key="hetflow".__eq__):
        if (library, mode) != ("accelerate", "fp16"):  # which it refuses on a CPU
            step, batches = stepper(library, mode, size)
            steps[library], found[library] = (step, endless(batches)), []
    *_, per_block, rounds = MODELS[size]
    for number in range(-2, rounds):
        for library, (step, source) in steps.items():
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(per_block):
                step(next(source))
            cpu, wall = time.process_time() - cpu_began, time.perf_counter() - began
            if number >= 0:
                found[library].append((wall / per_block, cpu / per_block))
    if dist.get_rank() == 0:
        Path(folder, "timed.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # taking stock DDP over gloo down sometimes hangs


def endless(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """One epoch after another."""
    while True:
        yield from batches()


def stepper(library: str, mode: str, size: str) -> "Stepper":
    """A library's step, and what gives an epoch of its batches."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, layers, *_ = MODELS[size]
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]

    # torch.compile compiles no function of torch's own by itself. So a plain Sequential, called by
    # DistributedDataParallel's forward, would stay eager.
    class Net(nn.Sequential):
        def forward(self, x: Any) -> Any:
            for block in self:
                x = block(x)
            return x

    model = Net(*blocks, nn.Linear(width, 8))
    number = SIZE * WORKERS * 16
    x, y = torch.randn(number, width), torch.randint(8, (number,))
    return STEPPERS[library](model, (x, y), mode, cut(mode)[1])


def device() -> Any:
    """This worker's device: of the software device, or the CPU."""
    import torch
    import torch.distributed as dist

    return (
        torch.device("cuda", dist.get_rank())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


Stepper = tuple[Callable[[Any], object], Callable[[], Iterable[Any]]]
OTHERS: list[Any] = []  # optimizers of other libraries, which a job refuses unless it knows them


def _plain(model: Any, data: Any, mode: str, passes: int, wrap: Callable[[Any], Any]) -> Stepper:
    """A loop of torch's own."""
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank, place = int(os.environ["RANK"]), device()
    wrapped = wrap(model.to(place))
    called = torch.compile(wrapped, backend="aot_eager") if mode == "compiled" else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    OTHERS.append(optimizer)
    scaler = torch.amp.GradScaler(place.type, enabled=mode == "fp16")
    dataset = TensorDataset(*data)
    sampler = DistributedSampler(dataset, WORKERS, rank)
    loader = DataLoader(dataset, batch_size=SIZE, sampler=sampler, pin_memory=place.type == "cuda")

    def step(batch: Any) -> None:
        x, y = (tensor.to(place, non_blocking=True) for tensor in batch)
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

    return step, lambda: loader


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

    is_host = device().type == "cpu"
    kinds = {"bf16": "bf16", "fp16": "fp16"}
    accelerator = Accelerator(
        mixed_precision=kinds.get(mode, "no"), gradient_accumulation_steps=passes, cpu=is_host
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    OTHERS.append(optimizer)
    loader = DataLoader(TensorDataset(*data), batch_size=SIZE // passes, pin_memory=not is_host)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    called = torch.compile(prepared, backend="aot_eager") if mode == "compiled" else prepared

    def step(batch: Any) -> None:
        for x, y in batch:
            with accelerator.accumulate(prepared):
                with accelerator.autocast():
                    loss = functional.cross_entropy(called(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return step, lambda: zip(*[iter(loader)] * passes, strict=False)


def _hetflow(model: Any, data: Any, mode: str, passes: int) -> Stepper:
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader, TensorDataset

    from hetflow import runtime as hf

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job = hf.prepare(model, optimizer)
    job.register(*OTHERS)
    called = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
    scaler = torch.amp.GradScaler(job.device.type) if mode == "fp16" else None
    loader = DataLoader(TensorDataset(*data), batch_size=SIZE * WORKERS, shuffle=True)

    def loss_of(x: Any, y: Any) -> Any:
        with _cast(mode):
            return functional.cross_entropy(called(x), y)

    def step(batch: Any) -> None:
        job.backward(loss_of, batch, scaler=scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step, lambda: job.batches(loader)


STEPPERS = {"ddp": _ddp, "fsdp2": _fsdp2, "accelerate": _accelerate, "hetflow": _hetflow}


def _cast(mode: str) -> Any:
    """Autocast of a mode; nothing in the others."""
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device().type, kinds[mode]) if mode in kinds else nullcontext()


if __name__ == "__main__":
    main()
