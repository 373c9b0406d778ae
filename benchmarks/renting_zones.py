"""A job under a deadline that may move between two zones, on Can't Be Late's windows.

The 60 windows of each zone say where in one trace of 12 days they were cut from. Joined, they are
two traces of the same time. The job is that of ``renting.py``, with 0.10 dollars a move. Policies
are replayed on one half of the time, in windows every 3 hours; the dynamic program learns from the
other half. Beside it stands the dynamic program that stays in one zone.

    python benchmarks/renting_zones.py        a minute
    python benchmarks/renting_zones.py --moving        prices that move, 10 minutes

With ``--moving``, a machine's price in each zone is that of a machine of AWS in a zone of us-east-1
from the day given, early in 2020: histories of prices and of availability of one time and place are
not at hand. V100 (p3.2xlarge) hardly move; of K80 (p2.8xlarge) one goes from 2.16 to 7.20 dollars.
"""

import argparse
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from hetflow.clusters.simulator.renting import compare
from hetflow.formats.importers.availability import read_availability
from hetflow.formats.importers.spot_prices import read_aws_spot_prices
from hetflow.solvers.market import dynamic_program
from hetflow.solvers.market.chain import chain_of
from hetflow.solvers.market.dynamic_program import least_dollars
from hetflow.solvers.market.job import RentJob
from hetflow.solvers.market.odds import availability_correlation
from hetflow.solvers.market.windows import Traces, joined, traces_of
from hetflow.tests.data import reference

ZONES = ("us-west-2a_v100_1", "us-west-2b_v100_1")
CASES = ((52, 0.02), (52, 0.20), (70, 0.02), (70, 0.20))
START = "2023-01-01T00:00:00Z"  # any time: the files say when a window begins in its trace only
MOVING = (
    ("p3.2xlarge", "bd", "2020-02-10T00:00:00Z", 3.06, (0.02, 0.2)),
    ("p2.8xlarge", "cd", "2020-02-10T00:00:00Z", 7.20, (0.02,)),
)
ON_DEMAND, SPOT, MOVE = 3.06, 0.9731, 0.10


def halves() -> tuple[Traces, Traces]:
    """The first and the second half of the time."""
    windows = [
        window
        for zone in ZONES
        for window in read_availability(
            reference.availability() / "cant_be_late" / zone / "overhead_0.02", trace_start=START
        )
    ]
    both = joined(windows)
    print(f"{len(both[0].available)} ticks; correlation of the zones "
          f"{availability_correlation(both[0], both[1]):.2f}")  # fmt: skip
    traces = traces_of(windows)
    middle = traces.begin_seconds + len(traces.ticks[0]) // 2 * traces.tick_seconds
    return traces.split(middle)


def moving(machine: str, letters: str, start: str) -> tuple[Traces, Traces]:
    """The same halves, with the prices of a machine in two zones of us-east-1 from a time on."""
    histories = {
        history.zone: history
        for history in read_aws_spot_prices(reference.spot_prices() / "aws")
        if history.instance_type == machine
    }
    windows = [
        window
        for zone in ZONES
        for window in read_availability(
            reference.availability() / "cant_be_late" / zone / "overhead_0.02", trace_start=start
        )
    ]
    names = dict.fromkeys(window.zone for window in windows)
    prices = [
        replace(histories[f"us-east-1{letter}"], zone=name)
        for letter, name in zip(letters, names, strict=True)
    ]
    traces = traces_of(windows, prices)
    return traces.split(traces.begin_seconds + len(traces.ticks[0]) // 2 * traces.tick_seconds)


def measure_moving(
    traces: Traces, history: Traces, on_demand: float, restart_hours: float
) -> dict[str, object]:
    """Every policy on one half of the time: 48 h of work within 70 h."""
    means = [
        fmean(price for price in zone if price is not None)
        for zone in traces.spot_dollars_per_hour or ()
    ]
    job = replace(
        job_of(70, restart_hours, len(ZONES)),
        on_demand_dollars_per_hour=on_demand,
        spot_dollars_per_hour=tuple(means),
    )
    report = compare(job, [traces], history=[history], every_seconds=12 * 3600.0)
    return {
        "mean_spot_dollars_per_hour": means,
        "num_windows": len(report.windows),
        "least_dollars": fmean(report.bound_dollars),
        "policies": {
            entry.policy: {
                "mean_dollars": entry.mean_dollars,
                "mean_over_least": entry.mean_over_bound,
                "missed_deadlines": entry.missed_deadlines,
            }
            for entry in report.policies
        },
    }


def main_moving(path: Path | None) -> None:
    """Measure and print the cases with prices that move."""
    rows = []
    for machine, letters, start, on_demand, restarts in MOVING:
        first, second = moving(machine, letters, start)
        halves_in_turn = [(1, (first, second)), (2, (second, first))]
        for (half, each), restart in product(halves_in_turn, restarts):
            row = {"machine": machine, "start": start, "half": half, "restart_hours": restart}
            row |= measure_moving(*each, on_demand, restart)
            rows.append(row)
            shown = ", ".join(
                f"{name} {entry['mean_over_least']:.3f} ({entry['missed_deadlines']} late)"
                for name, entry in row["policies"].items()
            )
            case = f"{machine} {start[:10]}, half {half}, {restart} h a restart"
            print(f"{case}: least {row['least_dollars']:.2f} $; {shown}", flush=True)
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def job_of(deadline_hours: float, restart_hours: float, num_zones: int) -> RentJob:
    """The published job, with equal prices in all zones."""
    return RentJob(
        work_seconds=48 * 3600.0,
        deadline_seconds=deadline_hours * 3600.0,
        restart_seconds=restart_hours * 3600,
        tick_seconds=600.0,
        on_demand_dollars_per_hour=ON_DEMAND,
        spot_dollars_per_hour=(SPOT,) * num_zones,
        move_dollars=MOVE,
    )


def measure(
    traces: Traces, history: Traces, deadline_hours: float, restart_hours: float
) -> dict[str, object]:
    """One half and deadline: every policy, and the dynamic program in each zone alone."""
    job = job_of(deadline_hours, restart_hours, len(ZONES))
    report = compare(job, [traces], history=[history], every_seconds=3 * 3600.0)
    alone = {}
    for place, zone in enumerate(ZONES):
        only, learned = (
            replace(each, zones=(zone,), ticks=(each.ticks[place],)) for each in (traces, history)
        )
        one = compare(
            job_of(deadline_hours, restart_hours, 1), [only], history=[learned],
            policies=["dynamic_program"], every_seconds=3 * 3600.0,
        )  # fmt: skip
        alone[zone] = one.policies[0].mean_dollars
    window = [[tick or 0 for tick in zone[: job.num_ticks]] for zone in traces.ticks]
    started = time.process_time()
    least_dollars(job, window)
    offline = time.process_time() - started
    started = time.process_time()
    dynamic_program.solve(job, chain_of([history.ticks]))
    return {
        "deadline_hours": deadline_hours,
        "restart_hours": restart_hours,
        "num_windows": len(report.windows),
        "least_dollars": sum(report.bound_dollars) / len(report.windows),
        "least_alone_dollars": {
            zone: sum(dollars) / len(dollars) for zone, dollars in report.alone_dollars.items()
        },
        "dynamic_program_alone_dollars": alone,
        "offline_cpu_seconds_a_window": offline,
        "dynamic_program_cpu_seconds": time.process_time() - started,
        "policies": {
            entry.policy: {
                "mean_dollars": entry.mean_dollars,
                "mean_over_least": entry.mean_over_bound,
                "missed_deadlines": entry.missed_deadlines,
                "mean_moves": entry.mean_moves,
            }
            for entry in report.policies
        },
    }


def main() -> None:
    """Measure every case and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one half")
    parser.add_argument("--moving", action="store_true", help="prices that move")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    if arguments.moving:
        main_moving(arguments.json)
        return
    first, second = halves()
    rows = []
    for half, (traces, history) in enumerate([(first, second), (second, first)], start=1):
        if arguments.quick and half == 2:
            break
        for deadline, restart in CASES:
            row = {"half": half, **measure(traces, history, deadline, restart)}
            rows.append(row)
            shown = ", ".join(
                f"{name} {entry['mean_dollars']:.2f} ({entry['mean_over_least']:.3f})"
                for name, entry in row["policies"].items()
            )
            alone = ", ".join(
                f"{zone[:10]} {dollars:.2f}"
                for zone, dollars in row["dynamic_program_alone_dollars"].items()
            )
            print(
                f"half {half}, {deadline} h, restart {restart} h, {row['num_windows']} windows: "
                f"least {row['least_dollars']:.2f}, {shown}; dynamic program alone: {alone}; "
                f"offline {row['offline_cpu_seconds_a_window']:.3f} CPU s a window, dynamic "
                f"program {row['dynamic_program_cpu_seconds']:.2f} CPU s",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
