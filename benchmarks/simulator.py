r"""CPU seconds of the simulator beside those of the published one, and of a 5,000-job trace.

    python benchmarks/simulator.py --gavel ../shared/data/gavel \
        [--quick] [--repeats 3] [--json FILE]

The published simulator's figures are those stored in ``simulated.json``: its own CPU seconds,
and the wall seconds of its solver, which it reports apart; both ratios are given. Ours are CPU
seconds of the whole run, solver included, reading the table and loading HiGHS left out; the least
of ``--repeats`` runs. ``policy`` in rounds by the text's conventions (vertex for LAS), and by the
published ones (inside the optimal face) for agreement.
"""

import argparse
import itertools
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hetflow.profilers.importers_gavel import read_gavel_throughputs, read_gavel_trace
from hetflow.schema.jobs import Throughputs
from hetflow.simulator import Case, TraceOptions, report, run_case

# What it is here, heterogeneity-agnostic or not, with space sharing or not.
POLICIES = {
    "max_min_fairness": ("las", True, False),
    "max_min_fairness_perf": ("las", False, False),
    "fifo_perf": ("fifo_greedy", False, False),
    "min_total_duration": ("makespan", True, False),
    "min_total_duration_perf": ("makespan", False, False),
    "finish_time_fairness": ("finish_time_fairness", True, False),
    "finish_time_fairness_perf": ("finish_time_fairness", False, False),
    "max_min_fairness_water_filling_perf": ("las_water_filling", False, False),
    "max_min_fairness_packed": ("las", False, True),
    "allox": ("allox", False, False),
    "gandiva": ("gandiva", False, False),
}
TYPES = ("v100", "p100", "k80")


def measured(case: Case, trace: Path | None, repeats: int) -> tuple[float, dict[str, float], int]:
    """Least CPU seconds of so many runs, the figures, and the rounds of one."""
    seconds = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run = run_case(case, None if trace is None else read_gavel_trace(trace))
        seconds = min(seconds, time.process_time() - start)
    figures = report(case, run, "benchmark").metrics
    return (
        seconds,
        {
            "average_jct_seconds": figures.average_jct_seconds,
            "makespan_seconds": figures.makespan_seconds,
            "utilisation": figures.utilisation,
        },
        run.num_rounds,
    )


def against_published(
    folder: Path, table: Throughputs, quick: bool, repeats: int
) -> list[dict[str, Any]]:
    """One row for each stored result that has a counterpart here."""
    rows = []
    for stored in json.loads((folder / "simulated.json").read_text()):
        if stored["policy"] not in POLICIES or stored["options"]:
            continue
        if quick and not stored["trace"].startswith("small"):
            continue
        name, agnostic, shares = POLICIES[stored["policy"]]
        numbers = [int(number) for number in stored["cluster"].split(":")]
        for scheduler in ("published-rounds", "rounds"):
            case = Case(
                throughputs=table, num_devices=dict(zip(TYPES, numbers, strict=True)),
                scheduler=scheduler, policy=name, agnostic=agnostic, space_sharing=shares,
            )  # fmt: skip
            seconds, ours, rounds = measured(case, folder / "traces" / stored["trace"], repeats)
            jct = ours["average_jct_seconds"] / stored["avg_jct_s"] - 1
            end = ours["makespan_seconds"] / stored["total_duration_s"] - 1
            whole = stored["sim_cpu_s"] + stored["solver_s_total"]
            row = {
                "trace": stored["trace"], "policy": stored["policy"], "scheduler": scheduler,
                "cpu_seconds": seconds, "rounds": rounds, **ours,
                "jct_difference": jct, "makespan_difference": end,
                "utilisation_difference": ours["utilisation"] / stored["utilization"] - 1,
                "speedup_over_cpu": stored["sim_cpu_s"] / seconds,
                "speedup_over_cpu_and_solver": whole / seconds,
            }  # fmt: skip
            rows.append(row)
            sys.stdout.write(
                f"{stored['trace'][:13]:<13} {stored['policy']:<36} {scheduler:<17}"
                f"JCT {100 * jct:+6.2f} %  makespan {100 * end:+6.2f} %  {seconds:6.2f} s  "
                f"{row['speedup_over_cpu']:5.1f}x CPU, "
                f"{row['speedup_over_cpu_and_solver']:5.1f}x with its solver\n"
            )
            sys.stdout.flush()
    return rows


def long_traces(table: Throughputs, quick: bool, repeats: int) -> list[dict[str, Any]]:
    """5,000 jobs at the thesis's high loads; the target is 5 CPU seconds."""
    rows = []
    number = 500 if quick else 5000
    loads = (("continuous-single", 5.6), ("continuous-multiple", 2.6))
    for (kind, load), agnostic in itertools.product(loads, (False, True)):
        trace = TraceOptions(
            kind=kind,  # type: ignore[arg-type]
            num_jobs=number,
            jobs_per_hour=load,
        )
        case = Case(
            throughputs=table,
            num_devices=dict.fromkeys(TYPES, 36),
            trace=trace,
            agnostic=agnostic,
        )
        seconds, ours, rounds = measured(case, None, repeats)
        eye = "agnostic" if agnostic else "aware"
        rows.append(
            {"trace": kind, "heterogeneity": eye, "jobs": number, "cpu_seconds": seconds,
             "rounds": rounds, **ours}
        )  # fmt: skip
        sys.stdout.write(
            f"{kind}, {number} jobs at {load}/h, LAS {eye}: {seconds:.2f} CPU s, {rounds} rounds, "
            f"{ours['makespan_seconds'] / 3600 / seconds:,.0f} simulated hours a second\n"
        )
    return rows


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gavel", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    path = arguments.gavel / "throughputs" / "simulation_throughputs.json"
    table = read_gavel_throughputs(path)
    quick, repeats = arguments.quick, arguments.repeats
    few = TraceOptions(kind="continuous-single", num_jobs=5, jobs_per_hour=5.6)
    measured(Case(throughputs=table, num_devices=dict.fromkeys(TYPES, 4), trace=few), None, 1)
    document = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "load_average_at_the_start": os.getloadavg()[0],
        "repeats": repeats,
        "long": long_traces(table, quick, repeats),
        "published": against_published(arguments.gavel, table, quick, repeats),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
