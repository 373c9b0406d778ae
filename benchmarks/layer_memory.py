"""What the planner counts for a stage's passes against what the allocator sees.

Planner: what the layers stash, and the dearest layer's workspace with its gradients (set aside).
Measured: the highest allocation of a whole forward and backward pass over what was there before.
Beside them the layers' outputs alone, which profiles without stashes give the planner.

    python benchmarks/layer_memory.py        half a minute
"""

import argparse
import json
from pathlib import Path

import torch

from hetflow.planning.pipeline_problem import pipeline_problem
from hetflow.profilers import zoo
from hetflow.profilers.bench import Bench
from hetflow.profilers.layer_memory import footprint
from hetflow.profilers.layers import graph_of, measure_layers
from hetflow.profilers.targets import as_workload
from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.problem import Problem
from hetflow.schema.profile import BatchPoint, Profile

CASES = (("gpt-small", 8), ("vgg16-small", 8), ("digits-cnn", 64), ("mlp", 64), ("resnet18", 2))
DEVICE_BYTES = 10**12


def measure(name: str, size: int) -> dict[str, object]:
    """One model: bytes measured, planned, and by outputs alone."""
    bench = Bench(as_workload(zoo.factory_of(name)(), name), "cpu", "sgd")
    graph = graph_of(measure_layers(bench, size, 1))
    point = BatchPoint(batch_size=size, step_seconds=1.0, peak_memory_bytes=1)
    profile = Profile(
        model=name, device_type="cpu", device_memory_bytes=DEVICE_BYTES, update_seconds=0.0,
        weight_bytes=bench.weight_bytes, batch_curve=(point,), layers=graph,
    )  # fmt: skip
    problem = pipeline_problem(
        Problem([profile], Cluster.parse("1xcpu"), size, optimizer=named_optimizer("sgd"))
    )
    batch = bench.make_batch(size)
    bench.run_step(batch)
    bench.optimizer.zero_grad(set_to_none=False)
    peak = footprint(lambda: bench.run_pass(batch), "cpu")
    assert peak is not None
    aside = problem.pools[0].workspace_bytes
    return {
        "model": name,
        "samples": size,
        "peak_bytes": peak.peak_bytes,
        "planned_bytes": sum(layer.kept_bytes for layer in problem.layers) + aside,
        "outputs_bytes": sum(node.activation_bytes for node in graph.nodes),
    }


def main() -> None:
    """Measure every case and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two models")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, size in CASES[: 2 if arguments.quick else None]:
        row = measure(name, size)
        rows.append(row)
        megabytes = [
            f"{int(str(row[f'{key}_bytes'])) / 1e6:7.2f}" for key in ("peak", "planned", "outputs")
        ]
        print(
            f"{name:12} {size:3}  peak, planned, outputs alone: {' '.join(megabytes)} MB",
            flush=True,
        )
    if arguments.json:
        files.write_text(arguments.json, json.dumps({"rows": rows}, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
