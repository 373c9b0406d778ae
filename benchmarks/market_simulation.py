"""A simulated market: 1,000 jobs over 90 days of AWS's and Azure's prices, and what it takes.

Jobs of the models of thesis table 6.1, 1 to 100 V100-hours (log-uniform), arriving at random
over 80 days; half have a deadline of 2 to 6 times their time on a V100. Quotas are 16 devices of
each type. The same jobs with on-demand machines alone stand beside it.

    python benchmarks/market_simulation.py        half a minute
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import hetflow
from hetflow.benchmarks.spot_prices import DAY, TABLE_6_1, market
from hetflow.schema.jobs import Job, Jobs, ModelThroughput, Throughputs
from hetflow.schema.market import Market
from hetflow.schema.simulation import SimulationRun

START = "2020-01-08T00:00:00Z"


def throughputs() -> Throughputs:
    """Table 6.1, steps of a K80 per second."""
    rates = {
        model: {"K80": 1.0, "P100": p100, "V100": v100}
        for model, ((p100, v100), _) in TABLE_6_1.items()
    }
    models = (ModelThroughput(model=name, steps_per_second=row) for name, row in rates.items())
    return Throughputs(models=tuple(models))


def drawn(number: int, days: float, seed: int) -> Jobs:
    """Jobs, half of them with a deadline."""
    random = np.random.default_rng(seed)
    names = list(TABLE_6_1)
    jobs = []
    for place, arrival in enumerate(np.sort(random.uniform(0, days * DAY, number))):
        model = names[int(random.integers(len(names)))]
        seconds = 3600 * float(10 ** random.uniform(0, 2))
        late = seconds * float(random.uniform(2, 6))
        jobs.append(
            Job(
                id=str(place),
                model=model,
                arrival_seconds=float(arrival),
                steps=seconds * TABLE_6_1[model][0][1],
                slo_seconds=late if random.random() < 0.5 else None,
            )
        )
    return Jobs(jobs=tuple(jobs))


def run(jobs: Jobs, place: Market, quota: int, hours: float | None) -> tuple[SimulationRun, float]:
    """One run and its CPU seconds."""
    before = time.process_time()
    found = hetflow.simulate(
        jobs,
        throughputs(),
        f"{quota}xK80,{quota}xP100,{quota}xV100",
        market=place,
        start=START,
        restart_seconds=300.0,
        cloud_move_dollars=0.05,
        preemption_seconds=hours and 3600 * hours,
        with_jobs=False,
    )
    return found, time.process_time() - before


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--days", type=float, default=80.0)
    parser.add_argument("--quota", type=int, default=16, help="devices of each type")
    parser.add_argument("--quick", action="store_true", help="100 jobs")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    table = market()
    jobs = drawn(100 if args.quick else args.jobs, args.days, seed=0)
    fixed = replace(table, prices=())
    rows = []
    for title, place, hours in (
        ("spot and on demand", table, None),
        ("the same, spot taken away every 12 h", table, 12.0),
        ("on demand alone", fixed, None),
    ):
        found, seconds = run(jobs, place, args.quota, hours)
        figures = found.metrics
        row = {
            "market": title, "jobs": figures.num_jobs, "dollars": figures.dollars,
            "late": figures.num_slo_violations, "deadlines": figures.num_slos,
            "moves": figures.num_moves, "taken_away": figures.num_preemptions,
            "mean_jct_hours": figures.average_jct_seconds / 3600,
            "end_days": figures.makespan_seconds / DAY,
            "decisions": found.num_allocations, "cpu_seconds": seconds,
        }  # fmt: skip
        rows.append(row)
        print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in row.items()), flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
