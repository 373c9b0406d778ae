"""Run every benchmark, quick by default; ``--full`` for the figures of docs/benchmarks.md."""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The second and third need an earlier checkout, the last two a GPU.
SKIPPED = ("all.py", "against.py", "profiling_time.py", "one_gpu.py", "activations.py")


def main() -> None:
    """Run each benchmark file in turn; results go to benchmarks/results with --full."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all sizes; writes the results")
    arguments = parser.parse_args()
    for script in sorted(HERE.glob("*.py")):
        if script.name in SKIPPED:
            continue
        flags = ["--quick"]
        if arguments.full:
            flags = ["--json", str(HERE / "results" / f"{script.stem}.json")]
        print(f"== {script.stem}", flush=True)
        subprocess.run([sys.executable, str(script), *flags], check=True)


if __name__ == "__main__":
    main()
