"""Seconds of `hetflow allocate` for jobs of unlike models, with the share of its own check.

Every job has its own throughputs. ``contended``: a tenth as many devices as jobs;
``one each``: as many devices as jobs, where water filling finds most bottlenecks.

    python benchmarks/allocate_command.py [--jobs 400 1000]
"""

import argparse
import os
import random
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hetflow.planning.allocate import allocation_problem
from hetflow.planning.checks.allocation import check
from hetflow.planning.inputs import pool_of
from hetflow.schema.jobs import AllocationProblem, Job, Jobs, ModelThroughput, Throughputs
from hetflow.solvers.allocation import allocate

TYPES = 10


def drawn(number: int, devices_of_type: int, *, agnostic: bool) -> AllocationProblem:
    """Jobs with throughputs from 1 to 8 steps per second on each of ten device types."""
    rng = random.Random(0)
    types = [f"t{k}" for k in range(TYPES)]
    jobs = [Job(id=f"j{i}", model=f"m{i}", steps=rng.uniform(1e4, 1e6)) for i in range(number)]
    rows = [
        ModelThroughput(model=job.model, steps_per_second={t: rng.uniform(1, 8) for t in types})
        for job in jobs
    ]
    return allocation_problem(
        Jobs(jobs=tuple(jobs)),
        Throughputs(models=tuple(rows)),
        pool_of(",".join(f"{devices_of_type}x{name}" for name in types)),
        heterogeneity="agnostic" if agnostic else "aware",
    )


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, nargs="*", default=[400, 1000])
    arguments = parser.parse_args()
    allocate(drawn(20, 2, agnostic=False), "las")  # imports, compiled loops
    for number in arguments.jobs:
        for title, devices, agnostic in (
            ("contended", number // 100, False),
            ("contended, agnostic", number // 100, True),
            ("one each", number // 10, False),
        ):
            problem = drawn(number, devices, agnostic=agnostic)
            start = time.process_time()
            found = allocate(problem, "las")
            solved = time.process_time()
            faults = check(found, problem)
            checked = time.process_time()
            print(
                f"{number} jobs, {title}: solved {solved - start:.2f} s, checked "
                f"{checked - solved:.2f} s (CPU); {found.certificate.method}; {len(faults)} faults",
                flush=True,
            )


if __name__ == "__main__":
    main()
