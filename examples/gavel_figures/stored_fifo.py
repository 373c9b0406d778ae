"""Gavel's FIFO without heterogeneity against stored results of its simulator, seed by seed.

    python examples/gavel_figures/stored_fifo.py GAVEL [--seeds 6]

GAVEL holds ``simulated.json``, ``traces/`` and ``throughputs/`` (tests/data/README.md). The rule
draws types at random, and which generator the stored runs had is not known: what is to be seen is
whether they lie among ours.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from baselines import GavelFifo

from hetflow.clusters.mechanisms.cluster.pool import ClusterPool
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.clusters.simulator.simulate_rounds import simulate_rounds
from hetflow.formats.importers.gavel import read_gavel_throughputs, read_gavel_trace
from hetflow.schema.errors import HetflowError

TYPES = ("v100", "p100", "k80")


def main() -> None:
    """Print a line for each stored row: its JCT in hours, and ours for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gavel", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    folder = arguments.gavel
    table = read_gavel_throughputs(folder / "throughputs" / "simulation_throughputs.json")
    for stored in json.loads((folder / "simulated.json").read_text()):
        if stored["policy"] != "fifo":
            continue
        numbers = map(int, stored["cluster"].split(":"))
        pool = ClusterPool(throughputs=table, num_devices=dict(zip(TYPES, numbers, strict=True)))
        mended = "fixfifo" in stored["options"]
        found = []
        for seed in range(arguments.seeds):
            options = RoundOptions(seed=seed, convention="published", fills_idle=False)
            jobs = read_gavel_trace(folder / "traces" / stored["trace"])
            allocator = GavelFifo(pool, seed, mended=mended)
            done = simulate_rounds(jobs, pool, allocator, options).jobs
            found.append(statistics.mean(job.completion_seconds for job in done) / 1e3)
        shown = " ".join(f"{jct:.1f}" for jct in sorted(found))
        sys.stdout.write(
            f"{stored['trace'][:12]:<12} {'mended' if mended else 'as it is':<9} "
            f"JCT {stored['avg_jct_s'] / 1e3:.1f} thousand s, ours {shown}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except HetflowError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
