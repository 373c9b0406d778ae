"""What the golden cases read: files of every format, drawn with ``random.Random`` alone.

Plain dictionaries, not hetflow's records: a move of a class must not change what is asked.
"""

import json
import random
from pathlib import Path
from typing import Any

MODELS = ("conv", "rnn", "gan", "bert", "rec")
SLOWNESS = {"V100": 1.0, "P100": 2.7, "K80": 6.1}
FLAT, LAYERED, BRANCHED, BLOCKS = "flat", "layered", "branched", "blocks"


def write_inputs(folder: Path) -> None:
    """Write all of them under ``folder``."""
    for kind in (FLAT, LAYERED, BRANCHED, BLOCKS):
        (folder / kind).mkdir()
        for name, slowness in SLOWNESS.items():
            _write(folder / kind / f"{name.lower()}.json", _profile(kind, name, slowness))
    _write(folder / "throughputs.json", _throughputs())
    _write(folder / "jobs.json", _jobs(20, arrives=False))
    _write(folder / "arriving.json", _jobs(30, arrives=True))
    _write(folder / "singles.json", _jobs(16, arrives=True, largest=1))
    _write(folder / "cluster.json", _cluster())
    (folder / "small.graph.txt").write_text(_pipedream_graph(), encoding="utf-8")


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def _profile(kind: str, device_type: str, slowness: float) -> dict[str, Any]:
    draw = random.Random(f"profile {device_type}")
    seconds = {size: slowness * (0.003 + 0.0011 * size * draw.uniform(0.95, 1.05))
               for size in (1, 2, 4, 8, 16, 32, 64)}  # fmt: skip
    document = {
        "schema": "hetflow.profile/1",
        "model": kind,
        "device_type": device_type,
        "device_memory_bytes": 16 << 30,
        "weight_bytes": 100 << 20,
        "update_seconds": 0.004 * slowness,
        "batch_curve": [
            {
                "batch_size": size,
                "step_seconds": step,
                "peak_memory_bytes": (1 << 30) + size * (50 << 20),
            }
            for size, step in seconds.items()
        ],
        "sync": {"num_devices": 2, "sync_seconds": 0.02},
        "optimizer": {"name": "adam", "state_bytes_per_weight_byte": 2.0},
    }
    if kind != FLAT:
        document["layers"] = _layers(kind, slowness)
    return document


def _layers(kind: str, slowness: float) -> dict[str, Any]:
    draw = random.Random(f"layers {kind}")
    count = 8
    alike = kind == BLOCKS
    nodes = []
    for number in range(count):
        forward = 0.01 if alike else draw.uniform(0.004, 0.02)
        nodes.append(
            {
                "id": f"layer{number}",
                "op": "Linear",
                "forward_seconds": forward * slowness,
                "backward_seconds": 2.1 * forward * slowness,
                "activation_bytes": 1 << 20 if alike else draw.randrange(1 << 10, 1 << 22),
                "weight_bytes": 8 << 20 if alike else draw.randrange(1 << 20, 32 << 20),
            }
        )
    edges = [[f"layer{i}", f"layer{i + 1}"] for i in range(count - 1)]
    if kind == BRANCHED:
        joined = ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6), (6, 7))
        edges = [[f"layer{i}", f"layer{j}"] for i, j in joined]
    return {"microbatch_size": 8, "nodes": nodes, "edges": edges}


def _throughputs() -> dict[str, Any]:
    draw = random.Random("throughputs")
    models, pairs = [], []
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for model in MODELS:
        base = 10 ** draw.uniform(0, 1.5)
        kept = {name: draw.uniform(0.7, 1.4) / slow for name, slow in SLOWNESS.items()}
        for scale in (1, 2, 4):
            rates[model, scale] = {name: base * part * scale**0.9 for name, part in kept.items()}
            models.append(
                {
                    "model": model,
                    "scale_factor": scale,
                    "steps_per_second": rates[model, scale],
                    "unconsolidated_steps_per_second": {
                        name: rate * 0.6 for name, rate in rates[model, scale].items()
                    },
                }
            )
    for scale in (1, 2, 4):
        for i, first in enumerate(MODELS):
            for second in MODELS[i:]:
                parts = [draw.uniform(0.4, 0.9), draw.uniform(0.4, 0.9)]
                if first == second:
                    parts[1] = parts[0]
                both = {
                    name: [rates[first, scale][name] * parts[0],
                           rates[second, scale][name] * parts[1]]
                    for name in SLOWNESS
                }  # fmt: skip
                pairs.append(
                    {"models": [first, second], "scale_factor": scale, "steps_per_second": both}
                )
    return {"schema": "hetflow.throughputs/1", "models": models, "pairs": pairs}


def _jobs(count: int, *, arrives: bool, largest: int = 4) -> dict[str, Any]:
    draw = random.Random(f"jobs {count}")
    jobs, now = [], 0.0
    for number in range(count):
        now += draw.expovariate(1 / 600.0) if arrives else 0.0
        jobs.append(
            {
                "id": f"job{number}",
                "model": draw.choice(MODELS),
                "steps": float(round(10 ** draw.uniform(3.5, 5))),
                "scale_factor": min(largest, draw.choice((1, 1, 1, 2, 4))),
                "priority_weight": draw.choice((1.0, 1.0, 5.0)),
                "arrival_seconds": now,
                "slo_seconds": draw.uniform(3e5, 9e5) if number % 2 else None,
                "entity": draw.choice(("red", "blue")),
            }
        )
    return {
        "schema": "hetflow.jobs/1",
        "jobs": [{key: value for key, value in job.items() if value is not None} for job in jobs],
        "entities": [{"name": "red", "weight": 2.0}, {"name": "blue", "weight": 1.0}],
    }


def _cluster() -> dict[str, Any]:
    prices = {"V100": 2.48, "P100": 1.46, "K80": 0.45}
    return {
        "schema": "hetflow.cluster/1",
        "device_types": {
            name: {"memory_bytes": 16 << 30, "dollars_per_hour": price}
            for name, price in prices.items()
        },
        "servers": [
            {"count": 2, "devices": {name: 2}, "intra_bytes_per_second": 1e10} for name in prices
        ],
        "inter_bytes_per_second": 1.25e9,
    }


def _pipedream_graph() -> str:
    draw = random.Random("graph")
    times = [
        (draw.uniform(1, 9), draw.uniform(2, 20), draw.randrange(1000, 9000)) for _ in range(5)
    ]
    lines = ["node1 -- Input -- forward_compute_time=0.0, backward_compute_time=0.0, "
             "activation_size=0.0, parameter_size=0.0"]  # fmt: skip
    lines += [
        f"node{n} -- Linear({n}) -- forward_compute_time={forward:.3f}, "
        f"backward_compute_time={backward:.3f}, activation_size={size}.0, "
        f"parameter_size={4 * size}.0"
        for n, (forward, backward, size) in enumerate(times, start=2)
    ]
    lines += [f"\tnode{n} -- node{n + 1}" for n in range(1, 6)]
    return "\n".join(lines) + "\n"
