"""Thesis section 6.3 on its own data: tables 6.1 and 6.3, figures 6.5 and 6.6 beside what it says.

One device a job, as there; machines with several are paid by the device. Throughputs are those of
table 6.1, prices those of AWS and Azure in early 2020. Starts are every 12 hours; one for which a
strategy would have to pay a price that nobody knows is left out of all strategies.

    python benchmarks/spot_prices.py        a minute
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hetflow.importers.aws_spot_prices import read_aws_spot_prices
from hetflow.importers.azure_spot_prices import read_azure_spot_prices
from hetflow.importers.instance_types import read_instance_types
from hetflow.schema import files
from hetflow.schema.errors import ProblemError
from hetflow.schema.market import InstanceType, Market, PriceHistory, utc_text
from hetflow.simulator.market.price_replay import replay
from hetflow.solvers.market.offers import MovingJob, Prices, prices_of
from hetflow.solvers.market.price_bound import least_dollars
from hetflow.solvers.market.price_strategies import strategies
from hetflow.tests.data import reference

DAY = 86400.0
# Table 6.1, by K80: throughput of P100 and V100, and the same by dollar.
TABLE_6_1 = {
    "Transformer": ((3.3, 3.3), (1.0, 0.8)),
    "A3C": ((1.2, 2.2), (0.4, 0.4)),
    "CycleGAN": ((4.5, 9.3), (1.4, 1.7)),
    "ResNet-18": ((4.0, 6.8), (1.2, 1.2)),
    "ResNet-50": ((3.7, 9.6), (1.1, 1.8)),
}
# GCP's on-demand dollars per GPU and hour in 2020, from memory; the thesis does not print them.
GCP = {"K80": 0.45, "P100": 1.46, "V100": 2.48}
TABLE_6_3 = {("aws", "us-east-1"): {"K80": 2.7, "V100": 3.3},
             ("azure", "us_east"): {"K80": 7.3, "P100": 8.0, "V100": 5.1}}  # fmt: skip
V100_DAYS = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0)


def market() -> Market:
    """AWS's and Azure's prices, and the machines."""
    place = reference.spot_prices()
    return Market(
        instance_types=read_instance_types(place / "instance_types.csv"),
        prices=(*read_aws_spot_prices(place / "aws"), *read_azure_spot_prices(place / "azure")),
    )


def table_6_1() -> list[dict[str, object]]:
    """Throughput by dollar at GCP's on-demand prices, relative to a K80."""
    rows: list[dict[str, object]] = []
    for model, (rates, said) in TABLE_6_1.items():
        for device, rate, published in zip(("P100", "V100"), rates, said, strict=True):
            ours = rate * GCP["K80"] / GCP[device]
            rows.append({"model": model, "device": device, "ours": ours, "published": published})
    return rows


def table_6_3(prices: Market) -> list[dict[str, object]]:
    """On-demand price by the least spot price, of machines with one device."""
    rows: list[dict[str, object]] = []
    for (cloud, region), published in TABLE_6_3.items():
        for device, factor in published.items():
            least, cap = [], 0.0
            for history in prices.prices:
                machine = prices.instance_type_of(history)
                if (history.cloud, history.region) != (cloud, region) or machine is None:
                    continue
                if machine.device_type == device and machine.num_devices == 1:
                    least += [price for price in history.dollars_per_hour if price is not None]
                    cap = machine.on_demand_dollars_per_hour or 0.0
            rows.append({"cloud": cloud, "region": region, "device": device,
                         "ours": cap / min(least), "published": factor})  # fmt: skip
    return rows


def replayed(
    model: str, v100_days: float, names: tuple[str, ...], prices: Prices, args: argparse.Namespace
) -> dict:
    """Dollars of the first strategy by those of each and of the bound, means over known starts."""
    p100, v100 = TABLE_6_1[model][0]
    rates = {"K80": 1.0, "P100": p100, "V100": v100}
    job = MovingJob(
        work=v100_days * DAY * v100,
        work_per_second=rates,
        restart_seconds=args.restart_seconds,
        cloud_move_dollars=args.cloud_move_dollars,
    )
    ratios = dict.fromkeys((*names, "bound"), 0.0)
    greatest = dict.fromkeys(ratios, 0.0)
    used = tried = moves = most = 0
    start, end = 1582502400.0, float(prices.edges[-1])  # 2020-02-24, when Azure's begin
    while start < end:
        window = prices.since(start)
        start += DAY / 2
        tried += 1
        try:
            outcomes = {name: replay(job, strategies()[name], window) for name in names}
            dollars = {name: outcome.dollars for name, outcome in outcomes.items()}
            dollars["bound"] = least_dollars(job, window)
        except ProblemError:
            continue
        used += 1
        moves += outcomes["dynamic"].num_moves
        most = max(most, outcomes["dynamic"].num_moves)
        for name, paid in dollars.items():
            ratios[name] += dollars[names[0]] / paid
            greatest[name] = max(greatest[name], dollars[names[0]] / paid)
    return {
        "model": model, "v100_days": v100_days, "starts": used, "tried": tried,
        "reduction": {name: ratio / used for name, ratio in ratios.items()} if used else {},
        "greatest_reduction": greatest if used else {},
        "mean_moves": moves / used if used else None, "most_moves": most,
    }  # fmt: skip


def year(folder: Path) -> float:
    """CPU seconds of ``hetflow rent prices`` on a drawn year of 500 machines, a price a day."""
    random = np.random.default_rng(0)
    devices = {"V100": 1.0, "P100": 0.5, "K80": 0.3, "A100": 1.6, "T4": 0.25}
    machines, histories = [], []
    for place in range(500):
        device = list(devices)[place % 5]
        number = (1, 2, 4, 8)[place // 5 % 4]
        where = {"cloud": ("aws", "azure", "gcp")[place % 3], "region": f"region{place % 7}"}
        machines.append(
            InstanceType(name=f"m{place}", device_type=device, num_devices=number, **where)
        )
        times = 1577836800.0 + DAY * np.arange(365) + random.integers(0, 86000)
        walk = np.exp(np.cumsum(random.normal(0, 0.03, 365)))
        histories.append(
            PriceHistory(
                instance_type=f"m{place}",
                times=tuple(utc_text(float(time)) for time in times),
                dollars_per_hour=tuple(np.round(devices[device] * number * walk, 4).tolist()),
                known_until=utc_text(float(times[-1]) + DAY),
                **where,
            )
        )
    path = folder / "year.json"
    files.write(path, Market(instance_types=tuple(machines), prices=tuple(histories)))
    rates = {"V100": 9.6, "P100": 3.7, "K80": 1.0, "A100": 15.0, "T4": 2.0}
    asked = [part for name, rate in rates.items() for part in ("--rate", f"{name}={rate}")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "hetflow.cli.main", "rent", "prices", path]
    subprocess.run([*command, *asked, "--work-hours", "96"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def show(figure: str, row: dict) -> None:
    """Print one model and duration."""
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["reduction"].items())
    if shown:
        greatest = row["greatest_reduction"]
        shown += f"; at most {greatest['dynamic']:.2f}, bound {greatest['bound']:.2f}"
    moved = f"; {row['mean_moves']:.1f} moves, at most {row['most_moves']}" if shown else ""
    print(f"{figure}: {row['model']}, {row['v100_days']:g} V100-days, {row['starts']} of "
          f"{row['tried']} starts: {shown or 'none'}{moved}", flush=True)  # fmt: skip


def main() -> None:
    """Recompute everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restart-seconds", type=float, default=300.0)
    parser.add_argument("--cloud-move-dollars", type=float, default=0.05, help="egress a move")
    parser.add_argument("--quick", action="store_true", help="figure 6.5 only, no durations")
    parser.add_argument("--year", action="store_true", help="the timing of a year alone")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = year(Path(folder))
    print(f"a year of 500 machines: {seconds:.2f} CPU s")
    if args.year:
        return
    table = market()
    results: dict[str, list] = {
        "year_cpu_seconds": [seconds],
        "table_6_1": table_6_1(),
        "table_6_3": table_6_3(table),
    }
    for row in (*results["table_6_1"], *results["table_6_3"]):
        *where, ours, published = row.values()
        print(*where, f"{ours:.2f} (published {published})")
    prices = prices_of([table], {"K80": 1.0, "P100": 1.0, "V100": 1.0})
    asked = [("figure 6.5", tuple(strategies()), (4.0,))]
    if not args.quick:
        asked.append(("figure 6.6", ("multi_cloud", "dynamic"), V100_DAYS))
    for figure, names, durations in asked:
        results[figure] = []
        for model in TABLE_6_1:
            for days in durations:
                results[figure].append(row := replayed(model, days, names, prices, args))
                show(figure, row)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
