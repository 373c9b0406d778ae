"""Activations kept, recomputed or offloaded on one GPU: a pass, its peak, and the same gradients.

A GPT of 0.9 billion parameters in bfloat16 goes forward and back on 1,024 tokens a sample. The
link to the host is timed by itself first. Each way is one line. The host needs
pinned memory for the activations.

    python benchmarks/activations.py
    python benchmarks/activations.py --batch-sizes 8,16
    python benchmarks/activations.py --quick            a small model, also on a CPU
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import get_args

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for equal bits

import torch
from torch.nn import functional

from hetflow.devices.backend import backend_of
from hetflow.profilers.zoo.models import GPT
from hetflow.runtime.activations import treated
from hetflow.schema.options import Activations

LARGE = {"vocabulary": 16384, "max_tokens": 1024, "depth": 18, "num_heads": 16, "channels": 2048}
SMALL = {"vocabulary": 128, "max_tokens": 32, "depth": 4, "num_heads": 4, "channels": 64}
STEPS = 7


def main() -> None:
    """Time the link, then each way at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--batch-sizes", default="8")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    document = {
        "benchmark": "activations",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "link_bytes_per_second": link_rates(device) if device.type == "cuda" else None,
        "results": [],
    }
    print(f"{document['device']}; to and from the host: {document['link_bytes_per_second']}")
    torch.manual_seed(0)
    model = GPT(**SMALL if arguments.quick else LARGE).to(device, torch.bfloat16)
    for size in map(int, arguments.batch_sizes.split(",")):
        words, length = model.tokens.num_embeddings, model.positions.num_embeddings
        ids = torch.randint(words, (size, length), device=device)
        usual: list[float] = []
        for how in get_args(Activations):
            with treated(model, how):
                row = {"batch_size": size, "activations": how, **measured(model, ids)}
            row["is_same"] = (usual := usual or row["gradients"]) == row.pop("gradients")
            document["results"].append(row)
            print({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()})
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def link_rates(device: torch.device) -> list[float]:
    """Bytes per second of copies of 1 GiB to the host and from it."""
    there = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    rates = []
    for to, of in ((there, here), (here, there)):
        to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(4 * 2**30 / (time.perf_counter() - began))
    return rates


def measured(model: GPT, ids: torch.Tensor) -> dict[str, object]:
    """Seconds of a pass, its peak, and the gradients' sums by deterministic kernels."""
    backend = backend_of(ids.device)

    def go_back() -> None:
        model.zero_grad()
        logits = model(ids)[:, :-1].flatten(0, 1).float()
        functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()

    torch.use_deterministic_algorithms(True, warn_only=True)
    go_back()
    sums = [float(parameter.grad.double().sum()) for parameter in model.parameters()]
    torch.use_deterministic_algorithms(False)
    backend.release_unused()
    seconds, queued = [], []
    for number in range(STEPS + 2):
        if number == 2:
            backend.reset_peak(ids.device)
        backend.synchronize(ids.device)
        began = time.perf_counter()
        go_back()
        queued.append(time.perf_counter() - began)
        backend.synchronize(ids.device)
        seconds.append(time.perf_counter() - began)
    return {
        "pass_seconds": statistics.median(seconds[2:]),
        "least_seconds": min(seconds[2:]),
        "most_seconds": max(seconds[2:]),
        "host_seconds": statistics.median(queued[2:]),  # the host runs ahead, if less
        "peak_bytes": backend.peak_bytes(ids.device),
        "gradients": sums,
    }


if __name__ == "__main__":
    main()
