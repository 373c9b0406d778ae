"""Cost of every level of determinism, by model: against level none, and against stock DDP.

Each variant is a real launch of two workers (`hetflow launch --determinism LEVEL`), one virtual
node each, in processes and a network of its own; stock DistributedDataParallel is launched in the
same way. The variants take turns, a block of steps each, while the others stand still, so that a
busy machine disturbs all alike. Ratios are of neighbouring blocks: wall time until the slowest
worker is done, and CPU time of both workers. Bytes are counted by the kernel (headers included).

    python benchmarks/determinism_cost.py --quick
    python benchmarks/determinism_cost.py --models digits-cnn:2,mlp:4  # steps of a few ms
    python benchmarks/determinism_cost.py --variants elastic  # beside ddp and none
"""

import argparse
import fcntl
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hetflow import runtime as hf
from hetflow.profilers.zoo import factory_of
from hetflow.schema import files
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.tests.plan_parts import split_plan, whole_group

WORKERS = 2
LEVELS = ("none", "static", "elastic", "heterogeneous")
# What a launch is given beside its level; a launch goes on without a worker unless told to stop.
VARIANTS = {
    "ddp": ("none",),
    "none, stop": ("none", "--on-failure", "stop"),
    **{level: (level,) for level in LEVELS},
}
# Samples of a worker, steps of a block, rounds.
MODELS = {
    "mlp": (32, 6, 48),
    "digits-cnn": (32, 6, 96),
    "gpt-small": (1, 2, 48),
    "resnet18": (2, 1, 12),
}
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small model, few rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument(
        "--models", default=",".join(MODELS), help="which of the models; name:samples for others"
    )
    parser.add_argument(
        "--variants", default="/".join(VARIANTS), help="which of them, with / between"
    )
    arguments = parser.parse_args()
    variants = ["ddp", "none", *(v for v in arguments.variants.split("/") if v in VARIANTS)]
    names = ["mlp"] if arguments.quick else arguments.models.split(",")
    rounds = 4 if arguments.quick else None
    results = [row for name in names for row in measure(name, rounds, dict.fromkeys(variants))]
    document = {
        "benchmark": "determinism_cost",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "workers": WORKERS,
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


def measure(
    name: str, rounds: int | None, variants: Iterable[str] = VARIANTS
) -> list[dict[str, object]]:
    """A row for each variant."""
    size, steps, usual = case_of(name)
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        launches = {
            variant: stack.enter_context(launched(name, variant, Path(folder) / str(number)))
            for number, variant in enumerate(variants)
        }
        for number in range((rounds or usual) + WARM_UP):
            order = list(launches) if number % 2 else list(reversed(launches))
            for variant in order:
                block = run_block(launches[variant], steps)
                if number >= WARM_UP:
                    found[variant].append(block)
    return [
        {
            "model": name,
            "variant": variant,
            "worker_batch_size": size,
            "rounds": len(blocks),
            "step_seconds": statistics.median(block["seconds"] for block in blocks),
            "cpu_seconds": statistics.median(block["cpu_seconds"] for block in blocks),
            "wire_bytes": statistics.median(block["wire_bytes"] for block in blocks),
            **{
                f"{what}_over_{base}": ratio(blocks, found[base], key)
                for base in ("ddp", "none")
                for what, key in (("wall", "seconds"), ("cpu", "cpu_seconds"))
            },
        }
        for variant, blocks in found.items()
    ]


def case_of(name: str) -> tuple[int, int, int]:
    """Samples of a worker, steps of a block, rounds; of a name with its own samples or without."""
    model, _, samples = name.partition(":")
    size, steps, rounds = MODELS[model]
    return int(samples or size), steps * (4 if samples else 1), rounds


def ratio(above: list[dict], below: list[dict], key: str) -> dict[str, float]:
    values = [a[key] / b[key] for a, b in zip(above, below, strict=True)]
    first, middle, third = statistics.quantiles(values, n=4)
    return {"median": middle, "first_quartile": first, "third_quartile": third}


@contextmanager
def launched(name: str, variant: str, folder: Path) -> Iterator[list[socket.socket]]:
    """One variant's workers, at rest between blocks."""
    folder.mkdir()
    files.write(folder / "plan.json", plan_of(case_of(name)[0]))
    alone = ["unshare", "--map-root-user", "--net"] if has_networks() else []
    level, *options = VARIANTS[variant]
    command = [*alone, sys.executable, __file__, "launch", "--determinism", level, *options]
    command += ["-o", str(folder / "run"), str(folder / "plan.json"), __file__]
    with socket.socket(socket.AF_UNIX) as listener, (folder / "log").open("w") as log:
        listener.bind(str(folder / "line"))
        listener.listen(WORKERS)
        listener.settimeout(120)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, variant, name, str(folder / "line")],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            lines = [listener.accept()[0] for _ in range(WORKERS)]
            yield lines
            for line in lines:
                line.close()
            process.wait(60)
        except TimeoutError:
            raise RuntimeError((folder / "log").read_text()) from None
        finally:
            process.kill()


def has_networks() -> bool:
    """Whether this user may make networks; else bytes are those of the whole machine."""
    found = shutil.which("unshare")
    command = [found or "false", "--map-root-user", "--net", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_block(lines: list[socket.socket], steps: int) -> dict[str, float]:
    """Let one variant take some steps; means over the steps."""
    for line in lines:
        line.sendall(struct.pack("i", steps))
    answers = [json.loads(line.makefile().readline()) for line in lines]
    return {
        "seconds": max(answer["seconds"] for answer in answers) / steps,
        "cpu_seconds": sum(answer["cpu_seconds"] for answer in answers) / steps,
        "wire_bytes": statistics.mean(answer["wire_bytes"] for answer in answers) / steps,
    }


def plan_of(size: int) -> Plan:
    group = whole_group(
        device_type="cpu",
        num_devices=WORKERS,
        device_batch_size=size,
        virtual_nodes=1,
        virtual_node_batch_size=size,
    )
    return split_plan(
        model="determinism_cost",
        global_batch_size=size * WORKERS,
        groups=(group,),
        predicted=Prediction(step_seconds=1.0, samples_per_second=1.0),
        proof=Proof(
            termination="feasible", objective=1.0, lower_bound=None, gap=None, method="by hand"
        ),
    )


def launch() -> None:
    """`hetflow launch`, in a network whose loopback device is up."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags_up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, flags_up)  # SIOCSIFFLAGS
    sys.argv[0] = "hetflow"
    from hetflow.cli.main import main as hetflow

    sys.exit(hetflow())


def work(variant: str, name: str, path: str) -> None:
    """One worker: steps when it is told to."""
    torch.set_num_threads(1)
    step = ddp_stepper(name) if variant == "ddp" else job_stepper(name)
    step()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        while told := line.recv(4):
            (steps,) = struct.unpack("i", told)
            wire, cpu, began = wire_bytes(), time.process_time(), time.perf_counter()
            for _ in range(steps):
                step()
            answer = {
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - cpu,
                "wire_bytes": wire_bytes() - wire,
            }
            line.sendall(json.dumps(answer).encode() + b"\n")
    if variant == "ddp":
        os._exit(0)  # taking stock DDP over gloo down sometimes hangs


def wire_bytes() -> int:
    """Bytes that went over the loopback device."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, counts = line.partition(":")
        if device.strip() == "lo":
            return int(counts.split()[0])
    return 0


def parts(name: str) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset, Callable]:
    torch.manual_seed(0)
    model, make_batch, loss = factory_of(name.partition(":")[0])()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, TensorDataset(*make_batch(case_of(name)[0] * WORKERS * 8)), loss


def ddp_stepper(name: str) -> Callable[[], None]:
    model, optimizer, dataset, loss = parts(name)
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=case_of(name)[0], sampler=sampler)
    source = (batch for _ in iter(int, 1) for batch in loader)

    def step() -> None:
        loss(wrapped, next(source)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def job_stepper(name: str) -> Callable[[], None]:
    model, optimizer, dataset, loss = parts(name)
    job = hf.prepare(model, optimizer)
    loader = DataLoader(dataset, batch_size=case_of(name)[0] * WORKERS, shuffle=True)
    source = (batch for _ in iter(int, 1) for batch in job.batches(loader))

    def step() -> None:
        job.backward(lambda *batch: loss(model, batch), next(source))
        optimizer.step()
        optimizer.zero_grad()

    return step


def table(results: list[dict]) -> str:
    lines = ["ratios: median (quartiles) of wall time; of CPU time"]
    lines += ["| model | variant | step ms | CPU ms | MB sent | / DDP | / none |", "|---" * 7 + "|"]
    for row in results:
        shown = []
        for base in ("ddp", "none"):
            texts = [
                f"{found['median']:.3f} ({found['first_quartile']:.2f} to "
                f"{found['third_quartile']:.2f})"
                for found in (row[f"wall_over_{base}"], row[f"cpu_over_{base}"])
            ]
            shown.append("; ".join(texts))
        lines.append(
            f"| {row['model']} | {row['variant']} | {row['step_seconds'] * 1e3:.1f} | "
            f"{row['cpu_seconds'] * 1e3:.1f} | {row['wire_bytes'] / 1e6:.2f} | "
            f"{shown[0]} | {shown[1]} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["launch"]:
        launch()
    elif sys.argv[1:2] and sys.argv[1] in VARIANTS:
        work(*sys.argv[1:])
    else:
        main()
