"""Renting under a deadline: policies on Can't Be Late's windows, and what deciding takes.

48 h of work at 3.06 dollars an hour on demand and 0.9731 on spot machines, 60 windows a zone. The
dynamic program learns from the other zone, whose windows it is not replayed on. Beside it stands
what the future is worth: the same program on windows drawn from the chain that it knows, where no
policy expects to pay less, divided by the least possible cost of these.

    python benchmarks/renting.py        a minute
"""

import argparse
import json
import time
from pathlib import Path
from statistics import fmean

import numpy as np

from hetflow.clusters.simulator.renting import compare, replay
from hetflow.formats.importers.availability import read_availability
from hetflow.solvers.market import dynamic_program
from hetflow.solvers.market.chain import Chain, chain_of
from hetflow.solvers.market.dynamic_program import least_dollars
from hetflow.solvers.market.job import RentJob
from hetflow.solvers.market.windows import apart
from hetflow.tests.data import reference

ZONES = ("us-west-2a_v100_1", "us-west-2b_v100_1")
CASES = ((52, 0.02), (52, 0.20), (70, 0.02), (70, 0.20))


def windows_of(zone: str, overhead: float):
    """The windows of a zone."""
    place = reference.availability() / "cant_be_late" / zone / f"overhead_{overhead:.2f}"
    return read_availability(place)


def drawn(chain: Chain, num_ticks: int, seed: int) -> list[list[int]]:
    """A window in which machines come and go as a chain says [zones][ticks]."""
    draw = np.random.default_rng(seed)
    states = [int(draw.integers(len(chain.transitions)))]
    while len(states) < num_ticks:
        states.append(int(draw.choice(len(chain.transitions), p=chain.transitions[states[-1]])))
    return chain.available[:, states].tolist()


def foresight(job: RentJob, policy: dynamic_program.DynamicProgram) -> float:
    """Mean of the program's dollars over the least possible, in windows of its own chain."""
    windows = [drawn(policy.chain, job.num_ticks, seed) for seed in range(100)]
    return fmean(replay(job, policy, one).dollars / least_dollars(job, one) for one in windows)


def measure(zone: str, deadline_hours: float, overhead_hours: float) -> dict[str, object]:
    """One zone and deadline: dollars of every policy, and CPU seconds of deciding."""
    job = RentJob(
        work_seconds=48 * 3600.0,
        deadline_seconds=deadline_hours * 3600.0,
        restart_seconds=overhead_hours * 3600,
        tick_seconds=600.0,
        on_demand_dollars_per_hour=3.06,
        spot_dollars_per_hour=(0.9731,),
    )
    windows = windows_of(zone, overhead_hours)
    (other,) = (name for name in ZONES if name != zone)
    history = windows_of(other, overhead_hours)
    report = compare(job, apart(windows), history=apart(history))
    started = time.process_time()
    for window in windows:
        least_dollars(job, [window.available])  # type: ignore[arg-type]
    offline = (time.process_time() - started) / len(windows)
    started = time.process_time()
    policy = dynamic_program.solve(job, chain_of([[window.available] for window in history]))
    solving = time.process_time() - started
    return {
        "zone": zone,
        "deadline_hours": deadline_hours,
        "restart_hours": overhead_hours,
        "least_dollars": sum(report.bound_dollars) / len(windows),
        "offline_cpu_seconds_a_window": offline,
        "dynamic_program_cpu_seconds": solving,
        "dynamic_program_on_its_own_chain": foresight(job, policy),
        "policies": {
            entry.policy: {
                "mean_dollars": entry.mean_dollars,
                "mean_over_least": entry.mean_over_bound,
                "missed_deadlines": entry.missed_deadlines,
            }
            for entry in report.policies
        },
    }


def main() -> None:
    """Measure every case and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one zone")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    rows = []
    for zone in ZONES[:1] if arguments.quick else ZONES:
        for deadline, overhead in CASES:
            rows.append(row := measure(zone, deadline, overhead))
            shown = ", ".join(
                f"{name} {entry['mean_dollars']:.2f} ({entry['mean_over_least']:.3f})"
                for name, entry in row["policies"].items()
            )
            print(
                f"{zone}, {deadline} h, restart {overhead} h: least {row['least_dollars']:.2f}, "
                f"{shown}; offline {row['offline_cpu_seconds_a_window']:.3f} CPU s a window, "
                f"dynamic program {row['dynamic_program_cpu_seconds']:.2f} CPU s; on its own chain "
                f"{row['dynamic_program_on_its_own_chain']:.3f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
