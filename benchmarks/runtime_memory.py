"""Peak memory against the number of virtual nodes on a device: it should not grow.

Each number runs in a process of its own: the same model and virtual node size, V passes a step
into one gradient buffer. On CPU the peak is the process's resident memory (VmHWM, libraries
included), on CUDA the allocator's peak.

    python benchmarks/runtime_memory.py --quick
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.profilers.zoo import factory_of
from hetflow.runtime.measurements import peak_memory_bytes
from hetflow.schema import files
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot

STEPS = 4
NUM_SAMPLES = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, V of 1, 4 and 16")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        model, size, nodes = arguments.measure
        print(measure(model, int(size), int(nodes)))
        return
    model, size = ("mlp", 16) if arguments.quick else ("resnet18", 4)
    counts = [1, 4, 16] if arguments.quick else [1, 2, 4, 8, 16]
    peaks = {nodes: in_own_process(model, size, nodes, RETURN_FREED_PAGES) for nodes in counts}
    kept = {nodes: in_own_process(model, size, nodes, {}) for nodes in counts}
    document = {
        "benchmark": "runtime_memory",
        "torch": torch.__version__,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "model": model,
        "virtual_node_batch_size": size,
        "results": [
            {
                "virtual_nodes": n,
                "peak_memory_bytes": peak,
                "over_one": peak / peaks[1],
                "peak_memory_bytes_malloc_defaults": kept[n],
            }
            for n, peak in peaks.items()
        ],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{model}, {size} samples a virtual node, {document['device']}")
    for row in document["results"]:
        peak = row["peak_memory_bytes"] / (1 << 20)
        default = row["peak_memory_bytes_malloc_defaults"] / (1 << 20)
        print(
            f"V = {row['virtual_nodes']:2}: {peak:8.1f} MiB  {row['over_one']:.3f} of V = 1"
            f"   (malloc's defaults: {default:.1f} MiB)"
        )


# On a CPU the peak is of resident pages, and glibc keeps freed ones: with its defaults the heap
# ends up to 20 % larger after many passes, by fragments and not by what is in use. The document
# has both figures.
RETURN_FREED_PAGES = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0"}


def in_own_process(model: str, size: int, nodes: int, settings: dict[str, str]) -> int:
    command = [sys.executable, __file__, "--measure", model, str(size), str(nodes)]
    environment = {**os.environ, **settings}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def measure(name: str, size: int, nodes: int) -> int:
    """Peak bytes after a few steps of V virtual nodes."""
    torch.set_num_threads(1)
    config = LaunchConfig(
        model=name,
        global_batch_size=size * nodes,
        workers=(
            WorkerSlot(
                rank=0,
                device_type="gpu" if torch.cuda.is_available() else "cpu",
                virtual_nodes=tuple(VirtualNode(index=k, batch_size=size) for k in range(nodes)),
            ),
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        files.write(Path(folder) / "launch.json", config)
        os.environ["HETFLOW_PLAN"] = str(Path(folder) / "launch.json")
        model, make_batch, loss = factory_of(name)()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        job = hf.prepare(model, optimizer)
    dataset = TensorDataset(*make_batch(NUM_SAMPLES))
    loader = DataLoader(dataset, batch_size=size * nodes, drop_last=True)
    for batch in list_of(job.batches(loader)):
        job.backward(lambda *inputs: loss(model, inputs), batch)
        optimizer.step()
        optimizer.zero_grad()
    return peak_memory_bytes(job.device) or 0


def list_of(batches):
    for number, batch in enumerate(batches):
        if number == STEPS:
            return
        yield batch


if __name__ == "__main__":
    main()
