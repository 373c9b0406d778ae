"""Heterogeneous allocations on 4 V100, 8 P100 and 16 K80 (VirtualFlow 6.5.2): paper beside ours.

    python examples/virtualflow_6_5_2/compare.py [--seeds 5]

The paper withholds the jobs' lengths, the GPUs that they ask for and most speeds; README.md says
what stands in for them, and every choice is run.
"""

import argparse
import statistics
import sys

import numpy as np

from hetflow.clusters.simulator.cases import Case, report, run_case
from hetflow.clusters.simulator.mixes import split_throughput
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs
from hetflow.schema.problem import DeviceOption
from hetflow.schema.profile import BatchPoint, Sync

POOL = {"V100": 4, "P100": 8, "K80": 16}
LARGEST = {"V100": 256, "P100": 256, "K80": 128}
FIXED_SHARE = 0.05  # of a full pass, for a batch of any size: as in examples/virtualflow_6_5
# Samples per second of a V100 on full passes; bytes of weights.
WORKLOADS = {
    "ResNet-50": (400.0, 102_228_128),
    "BERT-BASE": (150.0, 440_000_000),
    "Transformer": (300.0, 244_000_000),
}
SPEEDS = {
    "V100 4x a P100": {"V100": 1.0, "P100": 0.25, "K80": 0.06},
    "V100 1.7x a P100": {"V100": 1.0, "P100": 0.6, "K80": 0.14},
}
DEMANDS = {"1, 2 or 4 GPUs": (1, 2, 4), "1 to 16 GPUs": (1, 2, 4, 8, 16)}
LENGTHS = {"3 to 100 min": (0.5, 2.0), "10 to 300 min": (1.0, 2.5)}
LOADS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0)


def options(workload: str, speeds: dict[str, float]) -> list[DeviceOption]:
    """The pool's device types with their batch curves; 16 Gbps between devices (6.1)."""
    per_second, weight_bytes = WORKLOADS[workload]
    link = 2e9
    found = []
    for name, number in POOL.items():
        full = 256 / (per_second * speeds[name])
        curve = tuple(
            BatchPoint(
                batch_size=size,
                step_seconds=full * (FIXED_SHARE + (1 - FIXED_SHARE) * size / 256),
                peak_memory_bytes=1,
            )
            for size in (8, 16, 32, 64, 128, 256)
            if size <= LARGEST[name]
        )
        found.append(
            DeviceOption(
                device_type=name,
                num_devices=number,
                batch_curve=curve,
                update_seconds=0.0,
                weight_bytes=weight_bytes,
                sync=Sync(
                    num_devices=2,
                    sync_seconds=weight_bytes / link,
                    latency_seconds=1e-4,
                    bytes_per_second=link,
                ),
            )
        )
    return found


def tables(demands: tuple[int, ...], speeds: dict[str, float]) -> tuple[Throughputs, Throughputs]:
    """Throughputs without and with multi-type allocations; 1,024 samples a step or 256 per GPU."""
    models: list[ModelThroughput] = []
    mixes = []
    for workload in WORKLOADS:
        for demand in demands:
            batch = 256 * max(4, demand)
            alone, mixed = split_throughput(workload, batch, options(workload, speeds), demand)
            models.append(alone)
            mixes.extend(mixed)
    return Throughputs(models=tuple(models)), Throughputs(models=tuple(models), mixes=tuple(mixes))


def draw(
    seed: int, load: float, demands: tuple[int, ...], lengths: tuple[float, float],
    table: Throughputs, number: int = 60,
) -> list[Job]:  # fmt: skip
    """Draw jobs with Poisson arrivals; 10^x minutes long, alone on the job's fastest type."""
    random, now, jobs = np.random.default_rng(seed), 0.0, []
    best = {(m.model, m.scale_factor): max(m.steps_per_second.values()) for m in table.models}
    for index in range(number):
        now += float(random.exponential(3600.0 / load))
        workload = list(WORKLOADS)[int(random.integers(len(WORKLOADS)))]
        demand = int(random.choice(demands))
        seconds = 60.0 * 10 ** float(random.uniform(*lengths))
        jobs.append(
            Job(id=str(index), model=workload, scale_factor=demand, arrival_seconds=now,
                steps=seconds * best[workload, demand])
        )  # fmt: skip
    return jobs


def main() -> None:
    """Print the change in mean JCT by load, for each choice of the withheld inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    sys.stdout.write("paper: average JCT up to -29.2 %, none lost at high load; 26.4 % at 8/h\n")
    choices = [
        ("V100 4x a P100", "1, 2 or 4 GPUs", "3 to 100 min"),
        ("V100 4x a P100", "1 to 16 GPUs", "3 to 100 min"),
        ("V100 4x a P100", "1, 2 or 4 GPUs", "10 to 300 min"),
        ("V100 1.7x a P100", "1, 2 or 4 GPUs", "3 to 100 min"),
        ("V100 1.7x a P100", "1 to 16 GPUs", "3 to 100 min"),
    ]
    for speed, demand, length in choices:
        plain, mixed = tables(DEMANDS[demand], SPEEDS[speed])
        sys.stdout.write(f"{speed}, jobs of {demand}, {length}\n")
        for load in LOADS:
            changes, busy = [], []
            for seed in range(seeds):
                jobs = draw(seed, load, DEMANDS[demand], LENGTHS[length], plain)
                runs = []
                for table in (plain, mixed):
                    case = Case(
                        throughputs=table, num_devices=POOL, optimum="centre", selection="joint"
                    )
                    runs.append(report(case, run_case(case, jobs), "drawn").metrics)
                before, after = (run.average_jct_seconds for run in runs)
                changes.append(100 * (after / before - 1))
                busy.append(100 * runs[0].utilisation)
            sys.stdout.write(
                f"  {load:4g} jobs/h ({statistics.median(busy):2.0f} % busy without): "
                f"average JCT {statistics.median(changes):+6.1f} % "
                f"({min(changes):+.1f} to {max(changes):+.1f})\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
