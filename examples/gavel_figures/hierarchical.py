"""Multi-level fairness on 3 V100, 3 P100 and 3 K80 (thesis 5.7.3, figure 5.12): paper beside ours.

    python examples/gavel_figures/hierarchical.py simulation_throughputs.json [--seeds 20]

Eighteen jobs come one after another: six of entity 0 (weight 1), six of entity 1 (weight 2), six of
entity 2 (weight 3). Compared is the total effective throughput, each job's relative to its V100.
One policy is heterogeneity-aware, the other a static partition by the same shares that gives
everybody the same of each type.
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

from hetflow.formats.importers.gavel import read_gavel_throughputs
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Entity
from hetflow.solvers.allocation import make_instance, policy_named, solve

TYPES = ("v100", "p100", "k80")
CAPACITY = np.array([3.0, 3.0, 3.0])
ENTITIES = tuple(Entity(name=str(i), weight=float(i + 1)) for i in range(3))


def totals(rate: np.ndarray, entity: np.ndarray) -> tuple[float, float]:
    """Total throughput relative to V100s: heterogeneity-aware, and statically partitioned."""
    number = len(rate)
    instance = make_instance(
        rate=rate, scale=np.ones(number), capacity=CAPACITY, columns=TYPES,
        entity=entity, entities=ENTITIES,
    )  # fmt: skip
    aware = solve(instance, policy_named("hierarchical")).x
    alike = make_instance(
        rate=np.ones_like(rate), scale=np.ones(number), capacity=CAPACITY, columns=TYPES,
        entity=entity, entities=ENTITIES,
    )  # fmt: skip
    time = solve(alike, policy_named("hierarchical")).throughput
    static = time[:, None] * CAPACITY / CAPACITY.sum()
    relative = rate / rate[:, :1]
    return float((relative * aware).sum()), float((relative * static).sum())


def main() -> None:
    """Print both totals by number of jobs, and the loss over the whole run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("throughputs", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    table = read_gavel_throughputs(arguments.throughputs, pairs=False)
    rates = np.array(
        [
            [entry.steps_per_second.get(name, 0.0) for name in TYPES]
            for entry in table.models
            if entry.scale_factor == 1 and entry.steps_per_second.get("v100", 0.0) > 0
        ]
    )
    entity = np.repeat(np.arange(3), 6)
    whole, loaded = [], []
    for seed in range(arguments.seeds):
        drawn = rates[np.random.default_rng(seed).integers(len(rates), size=18)]
        both = np.array([totals(drawn[:n], entity[:n]) for n in range(1, 19)])
        whole.append(100 * (1 - both[:, 1].sum() / both[:, 0].sum()))
        loaded.append(100 * (1 - both[9:, 1].sum() / both[9:, 0].sum()))
    sys.stdout.write("paper: total effective throughput about 17 % lower without heterogeneity\n")
    for name, values in (("all 18 steps", whole), ("more jobs than devices", loaded)):
        sys.stdout.write(
            f"{name}: ours {statistics.median(values):.1f} % lower "
            f"({min(values):.1f} to {max(values):.1f} over {len(values)} seeds)\n"
        )


if __name__ == "__main__":
    try:
        main()
    except HetflowError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
