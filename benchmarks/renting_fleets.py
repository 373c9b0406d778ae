"""Elastic jobs under a deadline on traces of Bamboo and Parcae: policies beside the least dollars.

Windows of Bamboo's traces are 8 h long in ticks of 300 s; of Parcae's 40 min in ticks of 60 s. The
work is 40 or 70 % of what all machines could do until the deadline. n machines are n times as fast
as one. Dollars are those of a p2.xlarge in 2020: 0.90 on demand, 0.27 spot. The dynamic program
learns from traces that it is not replayed on: of the same machine in another zone or another hour,
or from the other half of the long trace.

    python benchmarks/renting_fleets.py        some minutes
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import hetflow
from hetflow.formats.importers.availability import read_bamboo_trace, read_parcae_trace
from hetflow.formats.importers.registry import TraceOptions
from hetflow.schema.market import Capacity
from hetflow.solvers.market import dynamic_program
from hetflow.solvers.market.chain import chain_of
from hetflow.solvers.market.dynamic_program import least_dollars
from hetflow.solvers.market.job import RentJob
from hetflow.tests.data import reference

SHARES = (0.4, 0.7)


@dataclass(frozen=True)
class Case:
    """Traces to replay on, what is learned from, and the job's size."""

    name: str
    traces: tuple[Capacity, ...]
    history: tuple[Capacity, ...]
    num_machines: int
    deadline_hours: float
    every_hours: float
    resize_seconds: tuple[float, ...]


def bamboo(name: str, unit_seconds: float) -> Capacity:
    """One of Bamboo's traces, by a part of its name."""
    (path,) = (reference.capacity() / "bamboo").glob(f"*{name}*.csv")
    options = TraceOptions(tick_seconds=300.0, time_unit_seconds=unit_seconds)
    (trace,) = read_bamboo_trace(path, options).capacity
    return trace


def half(trace: Capacity, number: int) -> Capacity:
    """The first or the second half of a trace."""
    middle = len(trace.num_machines) // 2
    counts = trace.num_machines[middle:] if number else trace.num_machines[:middle]
    return Capacity(zone=f"p2, half {number + 1}", tick_seconds=300.0, num_machines=counts)


def cases() -> list[Case]:
    """All traces that have changes enough to learn from."""
    long, first, second = bamboo("p2-xlarge-2020", 3600.0), bamboo("1c", 1.0), bamboo("1d", 1.0)
    halves = half(long, 0), half(long, 1)
    found = [
        Case("Bamboo p2, first half", halves[:1], halves[1:], 16, 8, 2, (30, 300)),
        Case("Bamboo p2, second half", halves[1:], halves[:1], 16, 8, 2, (30, 300)),
        Case("Bamboo g4dn, zone 1c", (first,), (second,), 12, 8, 1, (30, 300)),
        Case("Bamboo g4dn, zone 1d", (second,), (first,), 12, 8, 1, (30, 300)),
    ]
    hours = read_parcae_trace(reference.capacity() / "parcae", TraceOptions()).capacity
    for trace in hours:
        others = tuple(other for other in hours if other is not trace)
        name = f"Parcae {trace.zone.removeprefix('trace_')}"
        found.append(Case(name, (trace,), others, 32, 40 / 60, 5 / 60, (10, 60)))
    return found


def measure(case: Case, share: float, resize_seconds: float) -> dict[str, object]:
    """One case: mean dollars and ratios of every policy, and CPU seconds of deciding."""
    work = share * case.num_machines * case.deadline_hours * 3600
    report = hetflow.rent.deadline(
        case.traces,
        history=case.history,
        work_seconds=work,
        deadline_seconds=case.deadline_hours * 3600,
        restart_seconds=resize_seconds,
        num_machines=case.num_machines,
        every_seconds=case.every_hours * 3600,
        on_demand_dollars_per_hour=0.90,
        spot_dollars_per_hour=0.27,
    )
    job = RentJob(
        work_seconds=work,
        speeds=report.speeds,
        deadline_seconds=report.deadline_seconds,
        restart_seconds=resize_seconds,
        tick_seconds=case.traces[0].tick_seconds,
        on_demand_dollars_per_hour=0.90,
        spot_dollars_per_hour=(0.27,),
    )
    window = [count or 0 for count in case.traces[0].num_machines[: job.num_ticks]]
    started = time.process_time()
    least_dollars(job, [window])
    bounding = time.process_time() - started
    started = time.process_time()
    chain = chain_of([[one.num_machines] for one in case.history], case.num_machines)
    dynamic_program.solve(job, chain)
    number = len(report.windows)
    return {
        "case": case.name,
        "share": share,
        "resize_seconds": resize_seconds,
        "num_windows": number,
        "bound_dollars": sum(report.bound_dollars) / number,
        "bound_cpu_seconds_a_window": bounding,
        "dynamic_program_cpu_seconds": time.process_time() - started,
        "policies": {
            entry.policy: {
                "mean_dollars": entry.mean_dollars,
                "mean_over_bound": entry.mean_over_bound,
                "missed_deadlines": entry.missed_deadlines,
                "mean_changes": entry.mean_launches,
            }
            for entry in report.policies
        },
    }


def main() -> None:
    """Measure every case and print it, and the means over all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short pauses only")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    rows = []
    for case in cases():
        for resize in case.resize_seconds[:1] if arguments.quick else case.resize_seconds:
            for share in SHARES:
                rows.append(row := measure(case, share, resize))
                shown = ", ".join(
                    f"{name} {entry['mean_dollars']:.2f} ({entry['mean_over_bound']:.3f})"
                    for name, entry in row["policies"].items()
                )
                print(
                    f"{case.name}, {100 * share:g} %, {resize:g} s, {row['num_windows']} windows: "
                    f"least {row['bound_dollars']:.2f}, {shown};"
                    f" least {row['bound_cpu_seconds_a_window']:.3f} CPU s a window, dynamic "
                    f"program {row['dynamic_program_cpu_seconds']:.2f} CPU s",
                    flush=True,
                )
    for name in rows[0]["policies"]:
        ratios = [row["policies"][name]["mean_over_bound"] for row in rows]
        late = sum(row["policies"][name]["missed_deadlines"] for row in rows)
        print(f"{name}: mean {sum(ratios) / len(ratios):.3f}, at most {max(ratios):.3f} times the "
              f"least; {late} deadlines missed")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
