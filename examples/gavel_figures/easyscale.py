"""EasyScale's trace on 32 V100, 16 P100 and 16 T4 (5.2): paper beside ours.

    python examples/gavel_figures/easyscale.py

The paper withholds the trace (arrivals like Microsoft's, lengths from its own production) and
the models' speeds; README.md states what stands in for them. Each load is printed.
"""

import statistics
import sys

import numpy as np

from hetflow.schema.jobs import Job, ModelThroughput, Throughputs
from hetflow.simulator import Pool, ProposalOptions, simulate_proposals, summarise

SPEEDS = {"even": (1.0, 0.5, 0.4), "steep": (1.0, 0.3, 0.25)}  # V100, P100, T4; assumed
DEVICES = {"V100": 32, "P100": 16, "T4": 16}
NEEDS, SHARES = (1, 2, 4, 8, 16), (0.5, 0.1, 0.15, 0.15, 0.1)


def jobs_of(seed: int, jobs_per_hour: float, number: int = 200) -> list[Job]:
    """Poisson arrivals; lengths 10^x minutes as in the thesis."""
    random, now, jobs = np.random.default_rng(seed), 0.0, []
    for index in range(number):
        now += float(random.exponential(3600.0 / jobs_per_hour))
        minutes = 10 ** float(random.uniform(0.5, 2.5))
        need = int(random.choice(NEEDS, p=SHARES))
        jobs.append(
            Job(id=str(index), model="job", steps=60.0 * minutes, scale_factor=need,
                arrival_seconds=now)
        )  # fmt: skip
    return jobs


def main() -> None:
    """Print JCT and makespan over YARN-CS for each speed and load."""
    sys.stdout.write(
        "paper: homogeneous JCT 8.3x, makespan 2.5x; heterogeneous JCT 13.2x, makespan 2.8x\n"
    )
    for name, speeds in SPEEDS.items():
        table = Throughputs(
            models=tuple(
                ModelThroughput(
                    model="job",
                    scale_factor=need,
                    steps_per_second=dict(zip(DEVICES, speeds, strict=True)),
                )
                for need in NEEDS
            )
        )
        for load in (20.0, 40.0, 80.0, 160.0):
            ratios = [_ratios(table, jobs_of(seed, load)) for seed in range(3)]
            middle = [statistics.median(column) for column in zip(*ratios, strict=True)]
            sys.stdout.write(
                f"speeds {name} {speeds}, {load:g} jobs/h: homogeneous JCT {middle[0]:.2f}x, "
                f"makespan {middle[1]:.2f}x; heterogeneous JCT {middle[2]:.2f}x, "
                f"makespan {middle[3]:.2f}x\n"
            )
            sys.stdout.flush()


def _ratios(table: Throughputs, jobs: list[Job]) -> tuple[float, ...]:
    pool = Pool(throughputs=table, num_devices=DEVICES)
    yarn, same, mixed = (
        summarise(simulate_proposals(jobs, pool, ProposalOptions(scheduler=scheduler)))
        for scheduler in ("yarn", "homogeneous", "heterogeneous")
    )
    return (
        yarn.average_jct_seconds / same.average_jct_seconds,
        yarn.makespan_seconds / same.makespan_seconds,
        yarn.average_jct_seconds / mixed.average_jct_seconds,
        yarn.makespan_seconds / mixed.makespan_seconds,
    )


if __name__ == "__main__":
    main()
