"""Gavel's simulated figures (thesis 5.7.3): the paper's ratio beside ours.

    python examples/gavel_figures/gavel.py simulation_throughputs.json [--seeds 3] [--quick]

The table is Gavel's (github.com/stanford-futuredata/gavel). Cluster 36:36:36, rounds of 360 s,
averages over jobs 4,000 to 5,000 of a drawn trace that goes on to 6,000 jobs. README.md states
what was assumed; nothing was fitted.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from hetflow.profilers.importers_gavel import read_gavel_throughputs
from hetflow.simulator import Case, TraceOptions, report, run_case

HOUR = 3600.0


def average_hours(case: Case) -> tuple[float, float]:
    """Average JCT of the window, and the makespan, in hours."""
    figures = report(case, run_case(case), "drawn").metrics
    return figures.average_jct_seconds / HOUR, figures.makespan_seconds / HOUR


def compare(
    name: str, paper: str, slow: Case, fast: Case, seeds: int, *, makespan: bool = False
) -> None:
    """Print baseline, ours and their ratio for each seed."""
    for seed in range(seeds):
        answers = []
        for case in (slow, fast):
            assert case.trace is not None
            drawn = replace(case, seed=seed, trace=replace(case.trace, seed=seed))
            answers.append(average_hours(drawn)[makespan])
        ratio = answers[0] / answers[1]
        sys.stdout.write(
            f"{name:<44} seed {seed}  {answers[0]:8.2f} h  {answers[1]:8.2f} h  "
            f"ours {ratio:.2f}x  paper {paper}\n"
        )
        sys.stdout.flush()


def main() -> None:
    """Run the figures that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("throughputs", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="1,000 jobs, window 500 to 700")
    arguments = parser.parse_args()
    number, window = (1000, (500, 700)) if arguments.quick else (6000, (4000, 5000))
    table = read_gavel_throughputs(arguments.throughputs, pairs=False)
    single = Case(
        throughputs=table,
        num_devices={"v100": 36, "p100": 36, "k80": 36},
        trace=TraceOptions(kind="continuous-single", num_jobs=number, jobs_per_hour=5.6),
        window=window,
    )
    assert single.trace is not None
    multiple = replace(
        single, trace=replace(single.trace, kind="continuous-multiple", jobs_per_hour=2.6)
    )
    seeds = arguments.seeds
    for title, paper, base in (
        ("LAS, continuous-single at 5.6/h", "3.5x (3.31x: 95.99/28.96 h)", single),
        ("LAS, continuous-multiple at 2.6/h", "2.2x (1.94x: 70.54/36.44 h)", multiple),
    ):
        for optimum in ("vertex", "centre"):
            aware = replace(base, optimum=optimum)
            compare(f"{title}, {optimum}", paper, replace(base, agnostic=True), aware, seeds)
    for load in (3.0, 4.0, 5.0):
        at = replace(single, trace=replace(single.trace, jobs_per_hour=load))
        compare(
            f"FIFO, continuous-single at {load:g}/h", "2.7x at high load",
            replace(at, policy="fifo_any_type"), replace(at, policy="fifo_greedy"), seeds,
        )  # fmt: skip
    for jobs in (100,) if arguments.quick else (100, 300, 500):
        static = replace(
            single,
            window=None,
            trace=TraceOptions(kind="static-multiple", num_jobs=jobs),
        )
        compare(
            f"makespan against FIFO, {jobs} static jobs", "2.5x",
            replace(static, policy="fifo_any_type"), replace(static, policy="makespan"), seeds,
            makespan=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
