"""Gavel's simulated figures (thesis 5.7.3): the paper's ratio beside ours.

    python examples/gavel_figures/gavel.py simulation_throughputs.json [--seeds 3] [--quick]
        [--only las|fifo|fairness|makespan]

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


def figures_of(case: Case) -> dict[str, float]:
    """Average JCT of the window and makespan in hours, and the average finish-time fairness."""
    found = report(case, run_case(case), "drawn").metrics
    return {
        "JCT": found.average_jct_seconds / HOUR,
        "makespan": found.makespan_seconds / HOUR,
        "FTF": found.average_finish_time_fairness,
    }


def compare(
    name: str, paper: str, slow: Case, fast: Case, seeds: int, figures: tuple[str, ...] = ("JCT",)
) -> None:
    """Print baseline, ours and their ratio for each seed and figure."""
    for seed in range(seeds):
        both = []
        for case in (slow, fast):
            assert case.trace is not None
            drawn = replace(case, seed=seed, trace=replace(case.trace, seed=seed))
            both.append(figures_of(drawn))
        for figure in figures:
            before, after = both[0][figure], both[1][figure]
            sys.stdout.write(
                f"{name:<44} seed {seed}  {figure:<8} {before:8.2f}  {after:8.2f}  "
                f"ours {before / after:.2f}x  paper {paper}\n"
            )
        sys.stdout.flush()


def las(single: Case, multiple: Case, seeds: int) -> None:
    """Figures 5.9 and 5.10: aware, packed, and Gandiva's packing."""
    for title, paper, packed, base in (
        ("LAS, continuous-single at 5.6/h", "3.5x (3.31x: 95.99/28.96 h)", "19.64 h", single),
        ("LAS, continuous-multiple at 2.6/h", "2.2x (1.94x: 70.54/36.44 h)", "30.51 h", multiple),
    ):
        flat, shared = replace(base, agnostic=True), replace(base, space_sharing=True)
        for optimum in ("vertex", "centre"):
            compare(f"{title}, {optimum}", paper, flat, replace(base, optimum=optimum), seeds)
        compare(f"{title}, packed", f"last {packed}", base, shared, seeds)
        compare(f"{title}, packed, Gandiva", "2.2x", replace(base, policy="gandiva"), shared, seeds)


def fifo(single: Case, seeds: int) -> None:
    """FIFO on the fastest free type against FIFO on any."""
    assert single.trace is not None
    for load in (3.0, 4.0, 5.0):
        at = replace(single, trace=replace(single.trace, jobs_per_hour=load))
        compare(
            f"FIFO, continuous-single at {load:g}/h", "2.7x at high load",
            replace(at, policy="fifo_any_type"), replace(at, policy="fifo_greedy"), seeds,
        )  # fmt: skip


def fairness(multiple: Case, seeds: int) -> None:
    """Figure 5.11."""
    base = replace(multiple, policy="finish_time_fairness")
    title = "FTF, continuous-multiple at 2.6/h"
    paper = "JCT 3x, FTF 2.8x (64.38/33.90 h)"
    compare(title, paper, replace(base, agnostic=True), base, seeds, ("JCT", "FTF"))


def makespan(single: Case, seeds: int, quick: bool) -> None:
    """Static traces: makespan against FIFO and Gandiva's packing, and packed."""
    for jobs in (100,) if quick else (100, 300, 500, 1000):
        static = replace(
            single,
            window=None,
            policy="makespan",
            trace=TraceOptions(kind="static-multiple", num_jobs=jobs),
        )
        for against, paper in (("fifo_any_type", "2.5x"), ("gandiva", "1.4x")):
            name = f"makespan against {against}, {jobs} jobs"
            compare(name, paper, replace(static, policy=against), static, seeds, ("makespan",))
        shared = replace(static, space_sharing=True)
        compare(f"makespan packed, {jobs} jobs", "1.09x", static, shared, seeds, ("makespan",))


def main() -> None:
    """Run the figures that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("throughputs", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="1,000 jobs, window 500 to 700")
    parser.add_argument("--only", choices=("las", "fifo", "fairness", "makespan"))
    arguments = parser.parse_args()
    number, window = (1000, (500, 700)) if arguments.quick else (6000, (4000, 5000))
    single = Case(
        throughputs=read_gavel_throughputs(arguments.throughputs),
        num_devices={"v100": 36, "p100": 36, "k80": 36},
        trace=TraceOptions(kind="continuous-single", num_jobs=number, jobs_per_hour=5.6),
        window=window,
    )
    assert single.trace is not None
    multiple = replace(
        single, trace=replace(single.trace, kind="continuous-multiple", jobs_per_hour=2.6)
    )
    seeds, only = arguments.seeds, arguments.only
    if only in (None, "las"):
        las(single, multiple, seeds)
    if only in (None, "fifo"):
        fifo(single, seeds)
    if only in (None, "fairness"):
        fairness(multiple, seeds)
    if only in (None, "makespan"):
        makespan(single, seeds, arguments.quick)


if __name__ == "__main__":
    main()
