"""Show markets, and the cost of renting under each policy, as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...schema.market import (
    Market,
    OddsReport,
    PreemptionRate,
    PriceReport,
    RentAdvice,
    RentReport,
    RentRun,
    RentState,
    Survivors,
    ZoneOdds,
    held_text,
)
from .grid import grid, shown


def rent_table(report: RentReport) -> str:
    """The policies, cheapest first, what can be known in advance, and which one to use."""
    zones, machines = len(report.alone_dollars), len(report.speeds) - 1
    known = {"(known in advance)": report.bound_dollars}
    known |= {f"(only {zone})": dollars for zone, dollars in report.alone_dollars.items()}
    heads = ["policy", "mean $", "least $", "most $", "/ least", "launches", "moves", "late"]
    rows: list[list[object]] = [
        [
            entry.policy,
            *_spread(entry.dollars),
            f"{entry.mean_over_bound:.3f}",
            f"{entry.mean_launches:.1f}",
            f"{entry.mean_moves:.1f}",
            entry.missed_deadlines,
        ]
        for entry in sorted(report.policies, key=lambda entry: entry.mean_dollars)
    ]
    for title, dollars in known.items():
        ratios = [
            paid / least if least > 0 else 1.0
            for paid, least in zip(dollars, report.bound_dollars, strict=True)
        ]
        rows.append([title, *_spread(dollars), f"{sum(ratios) / len(ratios):.3f}", "-", "-", 0])
    if not zones:
        rows, heads = [[*row[:-2], row[-1]] for row in rows], [*heads[:-2], heads[-1]]
    left_out = f", {report.num_left_out} left out" if report.num_left_out else ""
    lines = [
        f"{report.work_seconds / 3600:g} {'h' if machines == 1 else 'machine hours'} of work "
        f"within {report.deadline_seconds / 3600:g} h"
        + (f" on at most {machines} machines" if machines > 1 else "")
        + (f" in {zones} zones" if zones else "")
        + f", {report.restart_seconds:g} s a restart"
        + (f", {report.move_dollars:g} $ a move" if zones else "")
        + (", spot prices that move" if report.has_moving_prices else "")
        + f", {len(report.windows)} windows{left_out}",
        grid(heads, rows),
    ]
    if report.choice is not None:
        lines.append(f"take {report.choice}: the cheapest that was never late")
    if report.expected_dollars is not None:
        line = f"dynamic_program expects {report.expected_dollars:.2f} $ from its history"
        if report.expected_dollars_90 is not None:
            low, high = report.expected_dollars_90
            line += f", and 9 in 10 jobs to cost {low:.2f} to {high:.2f} $"
        lines.append(line)
    if report.decision_seconds is not None:
        lines.append(
            f"dynamic_program decides each {report.decision_seconds:g} s: its table of every tick "
            "would be too large"
        )
    if report.most_zones_to_learn is not None:
        lines.append(
            f"dynamic_program was left out: it learns up to {report.most_zones_to_learn} zones"
        )
    if report.unused_seconds:
        lines.append(
            f"{report.unused_seconds / 3600:.4g} h that were given are in no window: less than "
            f"{report.deadline_seconds / 3600:g} h were left, or they are unknown"
        )
    return "\n".join(lines)


def state_text(state: RentState) -> str:
    """What a running job holds and sees."""
    held = held_text(state.num_spot, state.num_on_demand, state.zone)
    return (
        f"after {state.elapsed_seconds / 3600:.4g} h: holds {held}, "
        f"{state.work_left_seconds / 3600:.4g} h of work left\n"
        + grid(("zone", "spot machines"), tuple(state.available.items()))
    )


def advice_text(advice: RentAdvice) -> str:
    """What to hold now and why, and what other policies would hold."""
    what = held_text(advice.num_spot, advice.num_on_demand, advice.zone)
    lines = [
        f"{'now hold' if advice.is_change else 'keep'} {what}, {advice.dollars_per_hour:.4g} $/h "
        f"({advice.choice}): {advice.reason}",
        f"all on demand would do in {advice.spare_seconds / 3600:.3g} h; ask again in "
        f"{advice.decide_again_seconds:g} s, or when machines come or go",
        *(f"{name} would hold {held}" for name, held in advice.others.items()),
    ]
    return "\n".join(lines)


def rent_run_table(run: RentRun) -> str:
    """What a training on rented machines held, from when on, and its cost beside the predicted."""
    rows = [
        (
            f"{row.at_seconds / 3600:.3f}",
            held_text(row.num_spot, row.num_on_demand, row.zone),
            f"{row.dollars_per_hour:.4g}",
            row.why,
        )
        for row in run.held
    ]
    off = 100 * (run.dollars / run.predicted_dollars - 1) if run.predicted_dollars else 0.0
    late = ", LATE" if run.is_late else ""
    lines = [
        grid(("hours", "held", "$/h", "why"), rows),
        f"{run.policy}: {run.dollars:.4f} $ in {run.seconds / 3600:.3f} h{late}; predicted "
        f"{run.predicted_dollars:.4f} $ in {run.predicted_seconds / 3600:.3f} h ({off:+.1f} %)",
        f"{run.num_launches} launches ({run.predicted_launches} predicted), {run.num_moves} "
        f"moves, {run.num_preemptions} machines taken away; {run.num_steps_repeated} of "
        f"{run.num_steps} steps repeated, a checkpoint each {run.checkpoint_every}",
        f"a launch took up to {run.longest_restart_seconds:.0f} s until its first step; "
        f"{run.restart_seconds:g} s were asked for",
    ]
    if run.parameters_digest is not None:
        lines.append(f"parameters {run.parameters_digest}")
    return "\n".join(lines)


def _spread(dollars: Sequence[float]) -> tuple[str, ...]:
    """Mean, least and most."""
    return tuple(
        f"{value:.2f}" for value in (sum(dollars) / len(dollars), min(dollars), max(dollars))
    )


def strategies_table(report: PriceReport) -> str:
    """What each strategy on price histories pays, and the bound."""
    rows: list[tuple[object, ...]] = [
        (
            name,
            f"{outcome.dollars:.2f}",
            f"{outcome.seconds / 3600:.1f}",
            outcome.num_moves,
            " > ".join(one.title for one in outcome.held),
        )
        for name, outcome in report.outcomes.items()
    ]
    rows.append(("(bound)", f"{report.bound_dollars:.2f}", "-", "-", "-"))
    until = report.deadline_seconds
    lines = [f"from {report.start}" + (f" within {until / 3600:g} h" if until else "")]
    lines.append(grid(("strategy", "$", "hours", "moves", "held"), rows))
    lines += [f"{name}: {why}" for name, why in report.refused.items()]
    return "\n".join(lines)


def market_table(market: Market) -> str:
    """Machines, their prices over time, and how often each zone had spot machines."""
    parts = []
    if market.instance_types:
        rows = [
            (
                one.name,
                f"{one.num_devices}x{one.device_type}",
                one.cloud or "-",
                one.region or "-",
                shown(one.on_demand_dollars_per_hour),
                shown(one.spot_dollars_per_hour),
            )
            for one in market.instance_types
        ]
        titles = ("instance type", "devices", "cloud", "region", "on demand $/h", "spot $/h")
        parts.append(grid(titles, rows))
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
    if market.capacity:
        parts.append(_capacity(market))
    if market.prices:
        parts.append(_prices(market))
    return "\n\n".join(parts) or "an empty market"


def _capacity(market: Market) -> str:
    """Each trace of how many spot machines there were."""
    rows = []
    for one in market.capacity:
        known = [count for count in one.num_machines if count is not None]
        hours = len(one.num_machines) * one.tick_seconds / 3600
        shown = (min(known), f"{sum(known) / len(known):.1f}", max(known)) if known else ("-",) * 3
        unknown = len(one.num_machines) - len(known)
        rows.append((one.zone, one.start or "-", f"{hours:.1f}", *shown, unknown))
    titles = ("zone", "start", "hours", "least machines", "mean", "most", "unknown ticks")
    return grid(titles, rows)


def _prices(market: Market) -> str:
    """Each history: its time span, and its prices weighted by the time for which they held."""
    rows = []
    for history in market.prices:
        machine = market.instance_type_of(history)
        cap = machine.on_demand_dollars_per_hour if machine is not None else None
        known = history.known()
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
                *map(shown, history.quantiles((0.0, 0.5, 1.0)) or (None,) * 3),
                f"{100 * at_cap / total:.1f}" if cap is not None and total > 0 else "-",
            )
        )
    titles = ("cloud", "place", "instance type", "from", "days", "unknown", "least $/h",
              "median", "most", "at cap %")  # fmt: skip
    return grid(titles, rows)


def odds_table(report: OddsReport) -> str:
    """How long machines last in each zone, prices, and how the zones correlate."""
    parts = []
    if report.zones:
        parts.append(_zones(report))
        parts.append(_ages(report))
    if report.prices:
        heads = ("cloud", "place", "instance type",
                 *(f"{100 * part:g} % $/h" for part in report.parts))  # fmt: skip
        rows = [
            (one.cloud, one.place, one.instance_type, *map(shown, one.dollars_per_hour))
            for one in report.prices
        ]
        parts.append(grid(heads, rows))
    if report.together:
        pairs = [
            (one.of, one.first, one.second, f"{one.correlation:.2f}") for one in report.together
        ]
        parts.append(grid(("correlation of", "zone", "with", "r"), pairs))
    return "\n\n".join(parts)


def _zones(report: OddsReport) -> str:
    heads = ["zone", "windows", "there %", "taken away", "mean h (95 %)", "median h",
             "mean to h (95 %)"]  # fmt: skip
    told = report.checkpoint_seconds is not None
    if told:
        heads += ["checkpoint every min", "lost %"]
    rows = []
    for one in report.zones:
        row: list[object] = [
            _name(one),
            one.num_windows,
            f"{100 * one.available_share:.1f}",
            one.rate.num_preemptions,
            _mean(one.rate),
            _hours(one.median_seconds),
            "-"
            if one.mean_seconds is None
            else f"{_hours(one.horizon_seconds)}: {_hours(one.mean_seconds)} "
            f"({_hours(one.mean_low_seconds)} to {_hours(one.mean_high_seconds)})",
        ]
        if told:
            lost = one.lost_share
            row += [
                "-" if one.daly_seconds is None else f"{one.daly_seconds / 60:.1f}",
                "-" if lost is None else f"{100 * lost:.1f}",
            ]
        rows.append(tuple(row))
    return grid(tuple(heads), rows)


def _ages(report: OddsReport) -> str:
    """The mean hours to preemption by age, and the percentage that reaches each age."""
    ages = sorted({each.from_age_seconds or 0.0 for one in report.zones for each in one.by_age})
    old = sorted({each.age_seconds for one in report.zones for each in one.survivors})
    heads = ["zone", *(f"mean h from age {age / 3600:g} h" for age in ages),
             *(f"{age / 3600:g} h old %" for age in old)]  # fmt: skip
    rows = []
    for one in report.zones:
        means = {each.from_age_seconds: _mean(each) for each in one.by_age}
        alive = {each.age_seconds: _alive(each) for each in one.survivors}
        by_age = [means.get(age, "-") for age in ages]
        rows.append((_name(one), *by_age, *(alive.get(age, "-") for age in old)))
    return grid(tuple(heads), rows)


def _alive(one: Survivors) -> str:
    return f"{100 * one.part:.0f} ({100 * one.low:.0f} to {100 * one.high:.0f})"


def _name(one: ZoneOdds) -> str:
    return " ".join(word for word in (one.zone, one.instance_type) if word)


def _mean(one: PreemptionRate) -> str:
    """Mean in hours; if nothing was preempted, only the interval's lower end is known."""
    if one.mean_seconds is None:
        return f"over {_hours(one.low_seconds)}"
    return f"{_hours(one.mean_seconds)} ({_hours(one.low_seconds)} to {_hours(one.high_seconds)})"


def _hours(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 3600:.3g}"


def choices_table(choices: Sequence[Mapping[str, Any]]) -> str:
    """Machines to rent for a whole training, as the JSON of `hetflow rent` has them."""
    heads = ("$", "hours", "$/million samples", "devices", "rent", "")
    rows = [
        (
            f"{one['dollars']:.2f}",
            f"{one['hours']:.4g}",
            shown(one["dollars_per_million_samples"]),
            counted(one["devices"]),
            counted(one["machines"], " x "),
            "" if one["is_pareto"] else "dearer or slower",
        )
        for one in choices
    ]
    return grid(heads, rows)


def counted(numbers: Mapping[str, int], times: str = "x") -> str:
    """Numbers of named things: ``2xV100, 8xP100``."""
    return ", ".join(f"{number}{times}{name}" for name, number in numbers.items())
