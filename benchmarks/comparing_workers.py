"""CPU time of finding workers that part: the look in each step, and the comparison of parameters.

python benchmarks/comparing_workers.py [--quick] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hetflow.profilers.zoo.models import resnet18
from hetflow.runtime.agreement.agreement import KnownParameters, SettingsNumber
from hetflow.runtime.agreement.verdict import fingerprint
from hetflow.runtime.nested_tensors import digest_of


def cpu_seconds(function: Callable[[], object], rounds: int) -> float:
    """Median CPU time of a call."""
    function()
    found = []
    for _ in range(rounds):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return statistics.median(found)


def transformer(layers: int) -> nn.Module:
    """An encoder of so many layers, 256 wide."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def measured(model: nn.Module, rounds: int) -> dict[str, float]:
    """Of one model: its size, and CPU microseconds of each part."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    named = dict(model.named_parameters())
    known = KnownParameters(model, [optimizer], named, keeps_groups=False)
    settings, tensors = SettingsNumber([optimizer]), list(named.values())

    def step() -> None:
        known.check()
        settings.read()
        settings.read()

    return {
        "parameter_megabytes": sum(t.numel() * t.element_size() for t in tensors) / 1e6,
        "parameters": len(tensors),
        "step_microseconds": cpu_seconds(step, rounds) * 1e6,
        "fingerprint_microseconds": cpu_seconds(lambda: fingerprint(tensors), rounds) * 1e6,
        "sha256_microseconds": cpu_seconds(lambda: digest_of(named), max(rounds // 10, 3)) * 1e6,
    }


def main() -> None:
    """Print a table of three models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {
        "mlp": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        "resnet18": resnet18()[0],
        "transformer of 24 layers": transformer(24),
    }
    rows = {name: measured(m, 10 if arguments.quick else 100) for name, m in models.items()}
    print(f"{'model':26} {'MB':>6} {'each step us':>13} {'comparison us':>14} {'SHA-256 us':>11}")
    for name, row in rows.items():
        print(
            f"{name:26} {row['parameter_megabytes']:6.1f} {row['step_microseconds']:13.0f} "
            f"{row['fingerprint_microseconds']:14.0f} {row['sha256_microseconds']:11.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
