"""VirtualFlow's elastic scheduler on three and on twenty jobs (6.4): paper beside ours.

    python examples/virtualflow_6_4/compare.py

The paper gives demands, priorities and the arrival rate, not the jobs' lengths nor how their
speed follows the GPUs they hold; every figure is printed for several of each. README.md states
the assumptions, and what the paper's own numbers say about the second.
"""

import argparse
import itertools
import statistics
import sys

import numpy as np

from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.simulator.events import FairShareOptions, simulate_fair_share
from hetflow.clusters.simulator.metrics import Simulation, summarise
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs
from hetflow.schema.simulation import SimulationMetrics

TABLE = Throughputs(
    models=tuple(
        ModelThroughput(model="job", scale_factor=n, steps_per_second={"V100": 1.0})
        for n in (1, 2, 4, 8)
    )
)
PRIORITIES = (1.0, 5.0, 10.0)


SCALINGS = (1.0, 0.8, 0.6, 0.4)  # exponents: on n of d GPUs a job runs at (n / d)^x of full speed


def both(jobs: list[Job], devices: int, scaling: float) -> tuple[Simulation, Simulation]:
    """Run the static priority scheduler and the elastic one on the same jobs."""
    pool = ClusterPool(throughputs=TABLE, num_devices={"V100": devices})
    static = simulate_fair_share(jobs, pool, FairShareOptions(scheduler="static_priority"))
    elastic = FairShareOptions(efficiency=lambda n, demand: (n / demand) ** scaling)
    return static, simulate_fair_share(jobs, pool, elastic)


def three_jobs() -> None:
    """Compare jobs that ask for 4, 2 and 4 of 4 GPUs, in order of rising priority (6.4.1).

    The last one arrives when the second has just started, as in the text, where it waits for it.
    """
    sys.stdout.write("three jobs: paper makespan -38 %, JCT of the most urgent -45 %\n")
    for scaling in SCALINGS:
        found = []
        lengths_of = itertools.product((10, 20), (20, 40), (10, 20), (1, 5))
        for first, second, third, late in lengths_of:
            lengths, arrivals = (first, second, third), (0, late, first + late)
            jobs = [
                Job(id=str(i), model="job", steps=60.0 * lengths[i], scale_factor=need,
                    arrival_seconds=60.0 * arrivals[i], priority_weight=PRIORITIES[i])
                for i, need in enumerate((4, 2, 4))
            ]  # fmt: skip
            static, elastic = both(jobs, 4, scaling)
            urgent = [
                next(job for job in run.jobs if job.id == "2").completion_seconds
                for run in (static, elastic)
            ]
            found.append(
                (
                    100 * (elastic.end_seconds / static.end_seconds - 1),
                    100 * (urgent[1] / urgent[0] - 1),
                )
            )
        makespan, jct = zip(*found, strict=True)
        sys.stdout.write(
            f"  power {scaling:g}: makespan {statistics.median(makespan):+.1f} % "
            f"({min(makespan):+.1f} to {max(makespan):+.1f}), JCT {statistics.median(jct):+.1f} % "
            f"({min(jct):+.1f} to {max(jct):+.1f})\n"
        )


def twenty(seed: int, median_minutes: float) -> list[Job]:
    """Draw twenty jobs, 12 per hour, with priorities of 1, 5 and 10 (6.4.2)."""
    random = np.random.default_rng(seed)
    jobs, now = [], 0.0
    for index in range(20):
        now += float(random.exponential(300.0)) if index else 0.0
        minutes = median_minutes * 10 ** float(random.uniform(-0.5, 0.5))
        jobs.append(
            Job(
                id=str(index),
                model="job",
                steps=60.0 * minutes,
                scale_factor=int(random.choice([1, 2, 4, 8])),
                arrival_seconds=now,
                priority_weight=float(random.choice(PRIORITIES)),
            )
        )
    return jobs


def twenty_jobs() -> None:
    """Print the paper's four figures for three job lengths: medians over 20 seeds."""
    sys.stdout.write(
        "twenty jobs on 16 GPUs, median of 20 seeds\n"
        "  paper: utilisation 71.1 -> 90.6 %, makespan -45.5 %, median JCT -47.6 %, "
        "median queueing -99.3 %; so GPU time -30.5 %\n"
    )
    for minutes in (15.0, 30.0, 60.0):
        for scaling in SCALINGS:
            rows = []
            for seed in range(20):
                static, elastic = both(twenty(seed, minutes), 16, scaling)
                rows.append(_row(summarise(static), summarise(elastic)))
            middle = [statistics.median(column) for column in zip(*rows, strict=True)]
            sys.stdout.write(
                f"  median length {minutes:g} min, power {scaling:g}: utilisation "
                f"{middle[0]:.1f} -> {middle[1]:.1f} %, makespan {-middle[2]:+.1f} %, median JCT "
                f"{-middle[3]:+.1f} %, median queueing {-middle[4]:+.1f} %, "
                f"GPU time {-middle[5]:+.1f} %\n"
            )


def _row(static: SimulationMetrics, elastic: SimulationMetrics) -> tuple[float, ...]:
    def less(name: str) -> float:
        before = float(getattr(static, name))
        return 100 * (1 - float(getattr(elastic, name)) / before) if before else 0.0

    used = [run.utilisation * run.makespan_seconds for run in (static, elastic)]
    return (
        100 * static.utilisation,
        100 * elastic.utilisation,
        less("makespan_seconds"),
        less("median_jct_seconds"),
        less("median_queueing_seconds"),
        100 * (1 - used[1] / used[0]),
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    three_jobs()
    twenty_jobs()
