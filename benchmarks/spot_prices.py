"""Thesis section 6.3 on its own data: tables 6.1 and 6.3, figures 6.1 and 6.3 to 6.6.

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
from itertools import combinations
from pathlib import Path

import numpy as np

from hetflow.clusters.simulator.renting import strategy_replay
from hetflow.formats.importers.price_lists import read_instance_types
from hetflow.formats.importers.spot_prices import read_aws_spot_prices, read_azure_spot_prices
from hetflow.schema import files
from hetflow.schema.errors import ProblemError
from hetflow.schema.market import InstanceType, Market, PriceHistory, utc_text
from hetflow.solvers.market.odds import price_correlation
from hetflow.solvers.market.offers import Prices, bound, job_on, prices_of, strategies
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


def hourly(prices: Prices, places: list[int]) -> np.ndarray:
    """Dollars per hour of whole machines [stretches, places]; NaN where unknown."""
    number = [prices.offers[place].num_devices for place in places]
    return np.asarray(prices.dollars_per_second[:, places] * 3600 * number)


def figure_6_1(table: Market, prices: Prices) -> list[dict[str, object]]:
    """AWS's machines: prices over time and zones, against what the figure's caption says."""
    rows: list[dict[str, object]] = []
    for machine in [one for one in table.instance_types if one.name.startswith("p")]:
        places = [place for place, offer in enumerate(prices.offers)
                  if (offer.cloud, offer.instance_type) == ("aws", machine.name)]  # fmt: skip
        dollars = hourly(prices, places)
        known = np.isfinite(dollars)
        held = known * prices.seconds[:, None]
        at_cap = dollars >= (machine.on_demand_dollars_per_hour or np.inf) * (1 - 1e-9)
        share = (at_cap * held).sum(axis=0) / held.sum(axis=0)
        every = dollars[known.all(axis=1)]
        cheapest = every == every.min(axis=1, keepdims=True)
        moves, zones = 0, cheapest[0]
        for now in cheapest[1:]:  # zones that have been the cheapest ones since the last change
            moves, zones = (moves, zones & now) if (zones & now).any() else (moves + 1, now)
        histories = [one for one in table.prices if one.instance_type == machine.name]
        together = [found for a, b in combinations(histories, 2)
                    if (found := price_correlation(a, b)) is not None]  # fmt: skip
        rows.append({
            "machine": machine.name, "zones": len(places),
            "least": float(np.nanmin(dollars)), "most": float(np.nanmax(dollars)),
            "on_demand": machine.on_demand_dollars_per_hour,
            "zone_at_cap": prices.offers[places[int(share.argmax())]].place,
            "share_at_cap": float(share.max()), "cheapest_zone_changes": moves,
            "mean_correlation": sum(together) / len(together) if together else None,
        })  # fmt: skip
    return rows


def figure_6_3(prices: Prices) -> list[dict[str, object]]:
    """Least and most of each cloud, and which one is cheapest how long, where both are known."""
    rows: list[dict[str, object]] = []
    for device, number in (("K80", 1), ("V100", 1), ("V100", 4)):
        least, most = [], []
        for cloud in ("aws", "azure"):
            dollars = hourly(prices, [
                place for place, offer in enumerate(prices.offers)
                if (offer.cloud, offer.device_type, offer.num_devices) == (cloud, device, number)
            ])  # fmt: skip
            least.append(np.where(np.isnan(dollars), np.inf, dollars).min(axis=1))
            most.append(np.where(np.isnan(dollars), -np.inf, dollars).max(axis=1))
        both = np.isfinite(least).all(axis=0)
        seconds = prices.seconds[both]
        aws, azure = (each[both] for each in least)
        first = aws < azure
        rows.append({
            "device": device, "number": number, "days": float(seconds.sum() / DAY),
            **{cloud: [float(low[both].min()), float(high[both].max())]
               for cloud, low, high in zip(("aws", "azure"), least, most, strict=True)},
            "aws_is_cheaper": float(first @ seconds / seconds.sum()),
            "changes": int((first[1:] != first[:-1]).sum()),
        })  # fmt: skip
    return rows


def figure_6_4(prices: Prices) -> list[dict[str, object]]:
    """Standard deviation over mean of AWS's prices for a device, by the machine's devices."""
    rows: list[dict[str, object]] = []
    sizes = {(one.device_type, one.num_devices) for one in prices.offers if one.cloud == "aws"}
    for device, number in sorted(sizes):
        spread = []
        for place, offer in enumerate(prices.offers):
            if (offer.cloud, offer.device_type, offer.num_devices) != ("aws", device, number):
                continue
            dollars = prices.dollars_per_second[:, place]
            known = np.isfinite(dollars)
            weights, told = prices.seconds[known], dollars[known] * 3600
            mean = np.average(told, weights=weights)
            spread.append(float(np.sqrt(np.average((told - mean) ** 2, weights=weights)) / mean))
        rows.append({"device": device, "number": number, "zones": len(spread),
                     "median_deviation": float(np.median(spread)),
                     "most_deviation": max(spread)})  # fmt: skip
    return rows


def replayed(
    model: str, v100_days: float, names: tuple[str, ...], prices: Prices, args: argparse.Namespace
) -> dict:
    """Dollars of the first strategy by those of each and of the bound, means over known starts."""
    p100, v100 = TABLE_6_1[model][0]
    rates = {"K80": 1.0, "P100": p100, "V100": v100}
    job = job_on(
        prices.offers,
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
            found = strategies(window)
            outcomes = {name: strategy_replay(job, found[name], window) for name in names}
            dollars = {name: outcome.dollars for name, outcome in outcomes.items()}
            dollars["bound"] = bound(job, window).dollars
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


def year(folder: Path, *more: str) -> float:
    """CPU seconds of ``hetflow rent prices`` on a drawn year of 500 machines, a price a day.

    Its job is 96 hours of a V100's work, of which an A100 does 61; ``more`` options may follow.
    """
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
    market_ = Market(instance_types=tuple(machines), prices=tuple(histories))
    files.write(path, market_, force=True)
    rates = {"V100": 9.6, "P100": 3.7, "K80": 1.0, "A100": 15.0, "T4": 2.0}
    asked = [part for name, rate in rates.items() for part in ("--rate", f"{name}={rate}")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "hetflow.cli.main", "rent", "prices", path]
    subprocess.run([*command, *asked, "--work-hours", "96", *more], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def told(value: object) -> str:
    """A number of a row in few digits."""
    if isinstance(value, list):
        return " to ".join(map(told, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    parser.add_argument("--quick", action="store_true", help="no durations, figure 6.6")
    parser.add_argument("--year", action="store_true", help="the timing of a year alone")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = [year(Path(folder), *more) for more in ((), ("--deadline-hours", "120"))]
    print("a year of 500 machines: {:.2f} CPU s, with a deadline {:.2f}".format(*seconds))
    if args.year:
        return
    table = market()
    results: dict[str, list] = {
        "year_cpu_seconds": seconds,
        "table_6_1": table_6_1(),
        "table_6_3": table_6_3(table),
    }
    for row in (*results["table_6_1"], *results["table_6_3"]):
        *where, ours, published = row.values()
        print(*where, f"{ours:.2f} (published {published})")
    prices = prices_of([table], {"K80": 1.0, "P100": 1.0, "V100": 1.0})
    results["figure 6.1"] = figure_6_1(table, prices)
    results["figure 6.3"] = figure_6_3(prices)
    results["figure 6.4"] = figure_6_4(prices)
    for figure in ("figure 6.1", "figure 6.3", "figure 6.4"):
        for row in results[figure]:
            print(f"{figure}:", ", ".join(f"{key} {told(value)}" for key, value in row.items()))
    asked = [("figure 6.5", tuple(strategies(prices)), (4.0,))]
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
