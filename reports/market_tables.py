"""Markets, and what renting costs under each policy, as tables."""

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
    """Machines with their prices, and how often each zone had spot machines."""
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
    return "\n\n".join(parts) or "an empty market"


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
