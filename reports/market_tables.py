"""Markets, and what renting costs under each policy, as tables."""

from bisect import bisect_left
from itertools import accumulate

from ..schema.market import Market, RentReport
from .grid import grid


def rent_table(report: RentReport) -> str:
    """Policies, cheapest first, and which one to take."""
    bound = sum(report.bound_dollars) / len(report.bound_dollars)
    rows: list[tuple[object, ...]] = [
        (
            entry.policy,
            f"{entry.mean_dollars:.2f}",
            f"{min(entry.dollars):.2f}",
            f"{max(entry.dollars):.2f}",
            f"{entry.mean_over_bound:.3f}",
            f"{entry.mean_launches:.1f}",
            entry.missed_deadlines,
        )
        for entry in sorted(report.policies, key=lambda entry: entry.mean_dollars)
    ]
    rows.append(("(known in advance)", f"{bound:.2f}", f"{min(report.bound_dollars):.2f}",
                 f"{max(report.bound_dollars):.2f}", "1.000", "-", 0))  # fmt: skip
    lines = [
        f"{report.work_seconds / 3600:g} h of work within {report.deadline_seconds / 3600:g} h, "
        f"{report.restart_seconds:g} s a restart, {len(report.windows)} windows",
        grid(("policy", "mean $", "least $", "most $", "/ least", "launches", "late"), rows),
    ]
    if report.choice is not None:
        lines.append(f"take {report.choice}: the cheapest that was never late")
    if report.expected_dollars is not None:
        lines.append(f"dynamic_program expects {report.expected_dollars:.2f} $ from its history")
    return "\n".join(lines)


def market_table(market: Market) -> str:
    """Machines, what they cost over time, and how often each zone had spot machines."""
    parts = []
    if market.instance_types:
        rows = [
            (
                one.name,
                f"{one.num_devices}x{one.device_type}",
                one.region or "-",
                _dollars(one.on_demand_dollars_per_hour),
                _dollars(one.spot_dollars_per_hour),
            )
            for one in market.instance_types
        ]
        parts.append(
            grid(("instance type", "devices", "region", "on demand $/h", "spot $/h"), rows)
        )
    if market.availability:
        windows = []
        for one in market.availability:
            known = [tick for tick in one.available if tick is not None]
            hours = len(one.available) * one.tick_seconds / 3600
            share = f"{100 * sum(known) / len(known):.1f}" if known else "-"
            windows.append(
                (one.zone, one.start or "-", f"{hours:.1f}", share, len(one.available) - len(known))
            )
        parts.append(grid(("zone", "start", "hours", "available %", "unknown ticks"), windows))
    if market.prices:
        parts.append(_prices(market))
    return "\n\n".join(parts) or "an empty market"


def _prices(market: Market) -> str:
    """Each history: its span, and its prices over the time in which they are known."""
    rows = []
    for history in market.prices:
        machine = market.instance_type_of(history)
        cap = machine.on_demand_dollars_per_hour if machine is not None else None
        known = sorted(
            (dollars, end - start)
            for start, end, dollars in history.stretches()
            if dollars is not None and end > start
        )
        total = sum(seconds for _, seconds in known)
        span = history.end_seconds() - history.start_seconds()[0]
        at_cap = sum(seconds for dollars, seconds in known if cap is not None and dollars >= cap)
        rows.append(
            (
                history.cloud,
                history.place,
                history.instance_type,
                history.times[0][:10],
                f"{span / 86400:.1f}",
                f"{(span - total) / 86400:.1f}",
                *(_dollars(value) for value in _least_median_most(known)),
                f"{100 * at_cap / total:.1f}" if cap is not None and total > 0 else "-",
            )
        )
    titles = ("cloud", "place", "instance type", "from", "days", "unknown", "least $/h",
              "median", "most", "at cap %")  # fmt: skip
    return grid(titles, rows)


def _least_median_most(known: list[tuple[float, float]]) -> tuple[float | None, ...]:
    """Of (dollars, seconds) in the order of dollars; the median is over time."""
    if not known:
        return None, None, None
    passed = list(accumulate(seconds for _, seconds in known))
    median, _ = known[bisect_left(passed, passed[-1] / 2)]
    return known[0][0], median, known[-1][0]


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
