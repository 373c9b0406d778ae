"""Time of ``hetflow --help`` and of a small ``hetflow solve``, against starting Python alone.

python benchmarks/cli_startup.py [--quick] [--json FILE]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from hetflow.schema import files

COMMANDS = {
    "python alone": ["-c", "pass"],
    "hetflow --help": ["-m", "hetflow.cli.main", "--help"],
    "hetflow solve --help": ["-m", "hetflow.cli.main", "solve", "--help"],
    "import torch": ["-c", "import torch"],
}


def cpu_seconds(arguments: list[str]) -> float:
    """CPU seconds of one process: steadier than wall time on a busy machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True, env=dict(os.environ)
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Interleave the commands and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 15
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            samples[name].append(cpu_seconds(command))
    result = {
        name: {
            "median_cpu_seconds": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
        for name, values in samples.items()
    }
    for name, row in result.items():
        print(
            f"{name:22} {row['median_cpu_seconds']:.3f} s  ({row['min']:.3f} to {row['max']:.3f})"
        )
    if arguments.json:
        files.write_text(arguments.json, json.dumps(result, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
