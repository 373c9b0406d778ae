"""Cost of running virtual nodes in turn on one device: against plain gradient accumulation.

EasyScale's context switch (3.2, figure 11: at most 1.9 %). The plain variant runs as many
microbatches of the same size into ``param.grad`` and knows no virtual nodes: no streams of their
own, no batch-norm statistics of their own. Both read a DataLoader. Steps of the variants take
turns; ratios are of neighbouring steps. Forward and backward are the same work in both, and noise
on a busy machine: ``beside`` is what hetflow does outside of them, less what plain does, over
plain's step (CPU time), and the hooks that backward calls are timed apart. Of ``beside``,
``switch`` is the change from one virtual node to the next alone (streams and buffers), which is
what EasyScale switches on and off, and ``loading`` what the DataLoader takes longer. Both are
timed within the steps: in a loop of its own a switch finds its code in the caches and costs a
fifth of that.

    python benchmarks/context_switch.py --quick
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hetflow import runtime as hf
from hetflow.profilers.zoo import factory_of
from hetflow.runtime.buffers import VirtualNodeBuffers
from hetflow.runtime.determinism import seed_streams
from hetflow.runtime.job import Job
from hetflow.schema import files
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot

VIRTUAL_NODES = 8
# Samples of a virtual node, and rounds.
MODELS = {"mlp": (32, 60), "digits-cnn": (32, 40), "gpt": (1, 12), "resnet18": (2, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small model, few rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--models", default=",".join(MODELS), help="which of the models")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.Tensor.backward = inside(torch.Tensor.backward)
    _BaseDataLoaderIter.__next__ = inside(_BaseDataLoaderIter.__next__, "loading")
    hf.job.seed_streams = hf.epoch.seed_streams = inside(seed_streams, "switch")
    for name in ("load", "save"):
        setattr(VirtualNodeBuffers, name, inside(getattr(VirtualNodeBuffers, name), "switch"))
    names = ["mlp"] if arguments.quick else arguments.models.split(",")
    results = [measure(name, 10 if arguments.quick else MODELS[name][1]) for name in names]
    document = {
        "benchmark": "context_switch",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "virtual_nodes": VIRTUAL_NODES,
        "results": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


def measure(name: str, rounds: int) -> dict[str, object]:
    """Step times of the variants in turn, and the switch alone."""
    job, hetflow = job_stepper(name)
    variants = {"plain": plain_stepper(name), "hetflow": hetflow}
    cpu: dict[str, list[float]] = {variant: [] for variant in variants}
    spent: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for number in range(rounds + 2):
        for variant in list(variants) if number % 2 else reversed(list(variants)):
            Inside.seconds.clear()
            began = time.thread_time()
            variants[variant]()
            taken = time.thread_time() - began
            if number >= 2:
                cpu[variant].append(taken)
                spent[variant].append({**Inside.seconds, "beside": taken - Inside.seconds["work"]})
    step = statistics.median(cpu["plain"])
    hooks = VIRTUAL_NODES * hooks_seconds(job)
    job.finish()
    return {
        "model": name,
        "virtual_node_batch_size": MODELS[name][0],
        "rounds": rounds,
        "plain_step_seconds": step,
        "over_plain": ratio(cpu["hetflow"], cpu["plain"]),
        "hooks_over_plain": hooks / step,
        **{
            f"{part}_over_plain": statistics.median(
                own.get(part, 0.0) - plain.get(part, 0.0)
                for own, plain in zip(spent["hetflow"], spent["plain"], strict=True)
            )
            / step
            for part in ("beside", "switch", "loading")
        },
    }


class Inside:
    """CPU seconds of the running step by part; ``work`` is forward and backward."""

    seconds: defaultdict[str, float] = defaultdict(float)


def inside(work: Callable, part: str = "work") -> Callable:
    """``work``, its CPU time counted as a part's. Backward runs in this thread."""

    def timed(*arguments, **options):
        began = time.thread_time()
        try:
            return work(*arguments, **options)
        finally:
            Inside.seconds[part] += time.thread_time() - began

    return timed


def hooks_seconds(job: Job, repeats: int = 300) -> float:
    """Seconds that backward spends in the hooks of one pass."""
    hooks = [
        (hook, parameter)
        for parameter in job._session.parameters.values()
        for hook in (parameter._post_accumulate_grad_hooks or {}).values()
    ]
    began = time.thread_time()
    for _ in range(repeats):
        for hook, parameter in hooks:
            hook(parameter)
    return (time.thread_time() - began) / repeats


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    first, middle, third = statistics.quantiles(
        [a / b for a, b in zip(above, below, strict=True)], n=4
    )
    return {"median": middle, "first_quartile": first, "third_quartile": third}


def parts(name: str) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset, Callable]:
    torch.manual_seed(0)
    model, make_batch, loss = factory_of(name)()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dataset = TensorDataset(*make_batch(MODELS[name][0] * VIRTUAL_NODES * 4))
    return model, optimizer, dataset, inside(loss)


def plain_stepper(name: str) -> Callable[[], None]:
    """Gradient accumulation as people write it."""
    model, optimizer, dataset, loss = parts(name)

    def batches():
        while True:
            yield from DataLoader(dataset, batch_size=MODELS[name][0], shuffle=True)

    source = batches()

    def step() -> None:
        total = 0.0
        for batch in islice(source, VIRTUAL_NODES):
            value = loss(model, batch) / VIRTUAL_NODES
            value.backward()
            total += value.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def job_stepper(name: str) -> tuple[Job, Callable[[], None]]:
    """As many virtual nodes."""
    size = MODELS[name][0]
    nodes = tuple(VirtualNode(index=k, batch_size=size) for k in range(VIRTUAL_NODES))
    slot = WorkerSlot(rank=0, device_type="cpu", virtual_nodes=nodes)
    config = LaunchConfig(model=name, global_batch_size=size * VIRTUAL_NODES, workers=(slot,))
    model, optimizer, dataset, loss = parts(name)
    with tempfile.TemporaryDirectory() as folder:
        files.write(Path(folder) / "launch.json", config)
        os.environ["HETFLOW_PLAN"] = str(Path(folder) / "launch.json")
        job = hf.prepare(model, optimizer)
    loader = DataLoader(dataset, batch_size=size * VIRTUAL_NODES, shuffle=True)

    def batches():
        while True:
            yield from job.batches(loader)

    source = batches()

    def step() -> None:
        job.backward(lambda *batch: loss(model, batch), next(source)).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return job, step


def table(results: list[dict]) -> str:
    lines = ["| model | plain step | hetflow / plain | beside | hooks | switch | loading |"]
    lines += ["|---" * 7 + "|"]
    for row in results:
        r = row["over_plain"]
        lines.append(
            f"| {row['model']} | {row['plain_step_seconds'] * 1e3:.1f} ms | {r['median']:.3f} "
            f"({r['first_quartile']:.3f} to {r['third_quartile']:.3f}) | "
            f"{row['beside_over_plain']:.2%} | {row['hooks_over_plain']:.2%} | "
            f"{row['switch_over_plain']:.2%} | {row['loading_over_plain']:.2%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
