"""How long profiling takes, beside an earlier version's profiler: default options, in turn.

    git worktree add ../before b3107c4
    python benchmarks/profiling_time.py ../before
    python benchmarks/profiling_time.py ../before --model mlp --turns 3 --json FILE

Wall seconds are what a user waits; CPU seconds hold on a machine that has other work too.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hetflow.schema import files

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("mlp", "digits-cnn", "resnet18")


def profiled(checkout, model, folder):
    """(wall, CPU) seconds of profiling one model with the hetflow of a checkout."""
    home = folder / "home"
    home.mkdir()
    (home / "hetflow").symlink_to(checkout, target_is_directory=True)
    before, began = cpu_seconds(), time.monotonic()
    subprocess.run(
        [sys.executable, "-P", "-m", "hetflow", "profile", f"zoo:{model}", "--device", "cpu",
         "-o", str(folder / "profiles")],
        env={**os.environ, "PYTHONPATH": str(home)},
        stdout=subprocess.DEVNULL,
        check=True,
    )  # fmt: skip
    return time.monotonic() - began, cpu_seconds() - before


def cpu_seconds():
    """Of all processes that have ended and been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def described(found):
    """Medians over turns, with the least and the most."""
    wall, cpu = (sorted(values) for values in zip(*found, strict=True))
    return (
        f"{statistics.median(wall):.0f} s ({wall[0]:.0f} to {wall[-1]:.0f}; "
        f"CPU {statistics.median(cpu):.0f})"
    )


def main():
    """Profile each model with both, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one")
    parser.add_argument("--turns", type=int, default=1, help="of each, one after the other")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    rows = {}
    for model in arguments.model or MODELS:
        rows[model] = row = {"before": [], "now": []}
        for _ in range(arguments.turns):
            for name, checkout in (("before", arguments.before.resolve()), ("now", ROOT)):
                with tempfile.TemporaryDirectory() as folder:
                    row[name].append(profiled(checkout, model, Path(folder)))
        told = ", ".join(f"{name} {described(found)}" for name, found in row.items())
        print(f"{model:11} {told}", flush=True)
    if arguments.json:
        files.write_text(arguments.json, json.dumps(rows, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
