r"""CPU seconds of the simulator beside those of the published one, and of a 5,000-job trace.

    python benchmarks/simulator.py [--gavel FOLDER] [--quick] [--repeats 3] [--json FILE] \
        [--published GAVEL/scheduler [--python PYTHON] [--log] [--traces 'cont_*'] [--policies P]]

With ``--published``, the folder ``scheduler`` of a checkout of Gavel, both simulators run one after
the other on the same traces: CPU seconds of the simulation with its solver, start-up left out on
both sides (imports, files, compiled loops loaded); of ours the least of ``--repeats`` runs before
and as many after. Gavel's is run by ``--python`` (one with cvxpy and ECOS), its log switched off
unless ``--log`` is given.

Without it the figures stored in ``simulated.json`` stand for the published one: its CPU seconds on
another day. They hold its solver already (as many rounds of LAS and of makespan differ by it), so
the wall seconds of the solver, stored apart, are not added.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hetflow.clusters.simulator.arrivals import DrawOptions
from hetflow.clusters.simulator.cases import Case, report, run_case
from hetflow.formats.importers.gavel import read_gavel_throughputs, read_gavel_trace
from hetflow.schema.jobs import Throughputs
from hetflow.solvers.compiling import can_compile
from hetflow.tests.data import reference

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


# At 36:36:36 with 1,000 jobs, side by side.
SIDE_BY_SIDE = (
    "max_min_fairness_perf", "fifo_perf", "min_total_duration_perf", "finish_time_fairness_perf"
)  # fmt: skip
PEER = Path(__file__).parent / "peers" / "published_simulator.py"


def measured(case: Case, trace: Path | None, repeats: int) -> tuple[float, dict[str, float], int]:
    """Least CPU seconds of so many runs, the figures, and the rounds of one."""
    seconds = float("inf")
    jobs = None if trace is None else list(read_gavel_trace(trace))
    for _ in range(repeats):
        start = time.process_time()
        run = run_case(case, jobs)
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


def against_stored(
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
            row = {
                "trace": stored["trace"], "policy": stored["policy"], "scheduler": scheduler,
                "cpu_seconds": seconds, "rounds": rounds, **ours,
                "jct_difference": jct, "makespan_difference": end,
                "utilisation_difference": ours["utilisation"] / stored["utilization"] - 1,
                "stored_cpu_seconds": stored["sim_cpu_s"],
                "stored_over_ours": stored["sim_cpu_s"] / seconds,
            }  # fmt: skip
            rows.append(row)
            sys.stdout.write(
                f"{stored['trace'][:13]:<13} {stored['policy']:<36} {scheduler:<17}"
                f"JCT {100 * jct:+6.2f} %  makespan {100 * end:+6.2f} %  {seconds:6.2f} s  "
                f"{row['stored_over_ours']:5.1f}x\n"
            )
            sys.stdout.flush()
    return rows


def side_by_side(
    folder: Path, table: Throughputs, asked: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each trace and policy: Gavel's simulator between runs of ours."""
    rows = []
    traces = sorted((folder / "traces").glob("small*" if asked.quick else asked.traces))
    numbers = (4, 4, 4) if asked.quick else (36, 36, 36)
    throughputs = folder / "throughputs" / "simulation_throughputs.json"
    for trace, policy in itertools.product(traces, asked.policies.split(",")):
        name, agnostic, _ = POLICIES[policy]
        cases = [
            Case(
                throughputs=table, num_devices=dict(zip(TYPES, numbers, strict=True)),
                scheduler=scheduler, policy=name, agnostic=agnostic,
            )
            for scheduler in ("rounds", "published-rounds")
        ]  # fmt: skip
        before = [measured(case, trace, asked.repeats)[0] for case in cases]
        command = [
            asked.python, "-W", "ignore", str(PEER), str(asked.published), policy, str(trace),
            ":".join(map(str, numbers)), str(throughputs), *(["--log"] if asked.log else []),
        ]  # fmt: skip
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        theirs = json.loads(done.stdout.splitlines()[-1])
        after = [measured(case, trace, asked.repeats)[0] for case in cases]
        for case, one, two in zip(cases, before, after, strict=True):
            ours = min(one, two)
            row = {
                "trace": trace.name, "policy": policy, "scheduler": case.scheduler,
                "cpu_seconds": ours, "published": theirs, "published_log": asked.log,
                "times_as_fast": theirs["cpu_seconds"] / ours,
            }  # fmt: skip
            rows.append(row)
            sys.stdout.write(
                f"{trace.name[:11]:<11} {policy:<26} {case.scheduler:<17}{ours:6.3f} s against "
                f"{theirs['cpu_seconds']:6.2f} s ({theirs['allocation_cpu_seconds']:.2f} "
                f"allocating): {row['times_as_fast']:5.1f}x\n"
            )
            sys.stdout.flush()
    return rows


def long_traces(table: Throughputs, quick: bool, repeats: int) -> list[dict[str, Any]]:
    """5,000 jobs at the thesis's high loads; the target is 5 CPU seconds."""
    rows = []
    number = 500 if quick else 5000
    loads = (("continuous-single", 5.6), ("continuous-multiple", 2.6))
    for (kind, load), agnostic in itertools.product(loads, (False, True)):
        trace = DrawOptions(
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
    parser.add_argument("--gavel", type=Path, help="Gavel's throughputs and traces")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--published", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--traces", default="cont_*", help="side by side: traces, by pattern")
    parser.add_argument("--policies", default=",".join(SIDE_BY_SIDE), help="side by side")
    parser.add_argument("--alone", action="store_true", help="nothing but side by side")
    arguments = parser.parse_args()
    gavel = arguments.gavel or reference.folder() / "gavel"
    path = gavel / "throughputs" / "simulation_throughputs.json"
    table = read_gavel_throughputs(path)
    quick, repeats = arguments.quick, arguments.repeats
    # Solvers and compiled loops are loaded before anything is timed.
    few = DrawOptions(kind="continuous-single", num_jobs=5, jobs_per_hour=5.6)
    for policy in ("las", "makespan", "finish_time_fairness"):
        case = Case(
            throughputs=table, num_devices=dict.fromkeys(TYPES, 4), trace=few, policy=policy
        )
        measured(case, None, 1)
    document = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "load_average_at_the_start": os.getloadavg()[0],
        "repeats": repeats,
        "compiled": can_compile(),
        "side_by_side": (
            [] if arguments.published is None else side_by_side(gavel, table, arguments)
        ),
        "long": [] if arguments.alone else long_traces(table, quick, repeats),
        "stored": ([] if arguments.alone else against_stored(gavel, table, quick, repeats)),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
