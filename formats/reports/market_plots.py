"""Plot markets (thesis figures 6.1 to 6.4) and what there is to choose.

Prices over time by zone (6.1), per device (6.4) or by cloud (6.3), and when spot machines were
there (6.2). Each function returns the bytes of a ``png`` or an ``svg`` file. It raises HetflowError
where matplotlib is not installed, or there is nothing or too much to draw.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ...schema.errors import HetflowError
from ...schema.market import Availability, Market, PriceHistory, RentReport
from ...schema.options import option
from .plots import log_axis, new_figure, rendered

_PANEL_INCHES = 2.2
_LINE_INCHES = 0.15  # height of a legend's line, approximately
_MOST_PANELS = 40
_MOST_ROWS = 200


def prices_image(market: Market, file_format: str, *, per_device: bool = False) -> bytes:
    """Draw prices over time; lines have gaps where prices are unknown.

    A panel is of an instance type, in dollars per hour, with a line a zone and the on-demand price
    where it is known; ``per_device`` of a device type, in dollars per device and hour, with a line
    a history.
    """
    _check_prices(market)
    panels: dict[str, list[PriceHistory]] = {}
    for history in market.prices:
        panels.setdefault(_panel(market, history, per_device=per_device), []).append(history)
    heights = [max(_PANEL_INCHES, _LINE_INCHES * len(lines)) for lines in panels.values()]
    figure, every = _panels(list(panels), heights)
    for axes, histories in zip(every, panels.values(), strict=True):
        _draw(axes, market, histories, per_device=per_device)
    return _over_time(figure, every, "$ / device / hour" if per_device else "$ / hour", file_format)


def _over_time(figure: Any, every: Sequence[Any], unit: str, file_format: str) -> bytes:
    """Finish panels of prices over time."""
    for axes in every:
        axes.set_ylabel(unit, fontsize=8)
        axes.set_ylim(0, 1.08 * (axes.dataLim.y1 or 1))
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    every[-1].tick_params(axis="x", labelrotation=20)
    every[-1].set_xlabel("time (UTC)")
    return rendered(figure, file_format)


def _panel(market: Market, history: PriceHistory, *, per_device: bool) -> str:
    if not per_device:
        return f"{history.cloud} {history.instance_type}"
    return f"{history.cloud} {market.described(history).device_type}"


def _draw(
    axes: Any, market: Market, histories: Sequence[PriceHistory], *, per_device: bool
) -> None:
    caps = set()
    for history in histories:
        machine = market.instance_type_of(history)
        devices = machine.num_devices if per_device and machine is not None else 1
        times, dollars = _steps(history, devices)
        label = history.place
        if per_device:
            label = f"{devices}x, {history.instance_type}, {label}"
        axes.step(times, dollars, where="post", label=label, linewidth=1)
        if machine is not None and machine.on_demand_dollars_per_hour is not None:
            caps.add(machine.on_demand_dollars_per_hour / devices)
    for index, cap in enumerate(sorted(caps)):
        label = "_more" if index else "on demand"  # an underscore keeps it out of the legend
        axes.axhline(cap, color="black", linestyle="--", linewidth=0.8, label=label)


def _steps(history: PriceHistory, devices: int) -> tuple[list[datetime], list[float]]:
    """The times and dollars of a step line; NaN interrupts it."""
    times, dollars = [], []
    for start, _, price in history.stretches():
        times.append(datetime.fromtimestamp(start, UTC))
        dollars.append(float("nan") if price is None else price / devices)
    times.append(datetime.fromtimestamp(history.end_seconds(), UTC))
    dollars.append(dollars[-1])
    return times, dollars


def spread_image(market: Market, file_format: str) -> bytes:
    """Draw the least and the greatest price over all places, by cloud (thesis figure 6.3).

    One panel per device type and number of devices of a machine. A cloud's band is drawn while at
    least one of its prices is known.
    """
    _check_prices(market)
    panels: dict[tuple[str, int], dict[str, list[PriceHistory]]] = {}
    for history in market.prices:
        machine = market.described(history)
        clouds = panels.setdefault((machine.device_type, machine.num_devices), {})
        clouds.setdefault(history.cloud, []).append(history)
    figure, every = _panels([f"{number}x {name}" for name, number in sorted(panels)])
    colors: dict[str, str] = {}
    for axes, (_, clouds) in zip(every, sorted(panels.items()), strict=True):
        for cloud, histories in sorted(clouds.items()):
            color = colors.setdefault(cloud, f"C{len(colors)}")
            times, low, high = _band(histories)
            label = f"{cloud}, {len(histories)} places"
            axes.fill_between(times, low, high, step="post", alpha=0.3, color=color, linewidth=0)
            for values, name in ((low, label), (high, "_most")):
                axes.step(times, values, where="post", color=color, linewidth=1, label=name)
    return _over_time(figure, every, "$ / hour", file_format)


def presence_image(market: Market, file_format: str) -> bytes:
    """Draw when spot machines were there (thesis figure 6.2), and how many.

    Availability is a bar for each run of ticks with a machine, one row a window, with a mark where
    it was taken away. Capacity is a line for each trace. Unknown ticks are left blank. Hours count
    from the start of each window or trace.
    """
    if not market.availability and not market.capacity:
        raise HetflowError(
            "this market has no availability and no capacity to plot",
            hint=f"leave {option('plot')} out",
        )
    if len(market.availability) > _MOST_ROWS or len(market.capacity) > _MOST_PANELS:
        raise HetflowError(
            f"{len(market.availability)} windows and {len(market.capacity)} traces are more than "
            f"{_MOST_ROWS} and {_MOST_PANELS}",
            hint="plot a smaller market",
        )
    titles = ["spot machine there"] if market.availability else []
    heights = [max(_PANEL_INCHES, 0.18 * len(market.availability))] if market.availability else []
    figure, every = _panels(
        titles + [trace.zone for trace in market.capacity],
        heights + [_PANEL_INCHES] * len(market.capacity),
        share_times=False,
    )
    if market.availability:
        _draw_windows(every[0], market.availability)
    for axes, trace in zip(every[len(titles) :], market.capacity, strict=True):
        hours = [tick * trace.tick_seconds / 3600 for tick in range(len(trace.num_machines) + 1)]
        counts = [float("nan") if count is None else count for count in trace.num_machines]
        axes.stairs(counts, hours, fill=True, alpha=0.4)
        axes.set_ylabel("spot machines", fontsize=8)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1.08 * (axes.dataLim.y1 or 1))
    every[-1].set_xlabel("hours from the start")
    return rendered(figure, file_format)


def choices_image(
    choices: Sequence[tuple[float, float, str, bool]], file_format: str, *, title: str
) -> bytes:
    """Draw machines to rent by time and dollars, with the Pareto front as a line.

    A choice is hours, dollars, what is rented, and whether it is on the front.
    """
    if not choices:
        raise HetflowError("there are no choices to plot", hint=f"leave {option('plot')} out")
    figure = new_figure()
    axes = figure.subplots()
    front = sorted(one for one in choices if one[3])
    others = [one for one in choices if not one[3]]
    if others:
        axes.scatter(
            [one[0] for one in others], [one[1] for one in others],
            s=12, color="gray", alpha=0.6, label="dearer or slower",
        )  # fmt: skip
    axes.step(
        [one[0] for one in front], [one[1] for one in front],
        where="post", marker="o", linewidth=1, label="Pareto front",
    )  # fmt: skip
    for hours, dollars, label, _ in front:
        axes.annotate(
            label, (hours, dollars), xytext=(2, 6), textcoords="offset points", fontsize=6,
            rotation=35,
        )  # fmt: skip
    axes.set_xlabel("hours")
    axes.set_ylabel("dollars")
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.margins(0.08, 0.12)
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    return rendered(figure, file_format)


def deadlines_image(reports: Sequence[RentReport], file_format: str) -> bytes:
    """Draw what each policy costs against the deadline: means, and a band of nine windows in ten.

    There is a report for each deadline, in order, of the same job and policies.
    """
    figure = new_figure()
    axes = figure.subplots()
    hours = [report.deadline_seconds / 3600 for report in reports]
    for place, entry in enumerate(reports[-1].policies):
        told = [
            next(one.dollars for one in report.policies if one.policy == entry.policy)
            for report in reports
        ]
        means = [sum(dollars) / len(dollars) for dollars in told]
        axes.plot(hours, means, marker="o", markersize=3, color=f"C{place}", label=entry.policy)
        if entry.policy == reports[-1].choice:
            low, high = ([_quantile(one, part) for one in told] for part in (0.05, 0.95))
            axes.fill_between(hours, low, high, color=f"C{place}", alpha=0.15, linewidth=0)
    least = [sum(report.bound_dollars) / len(report.bound_dollars) for report in reports]
    axes.plot(hours, least, "--", color="black", label="(known in advance)")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hours until the deadline")
    axes.set_ylabel("dollars; the band: nine windows in ten")
    axes.legend(fontsize=8)
    axes.grid(visible=True, alpha=0.3)
    return rendered(figure, file_format)


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[round(part * (len(values) - 1))]


def _check_prices(market: Market) -> None:
    if not market.prices:
        raise HetflowError("this market has no prices to plot", hint=f"leave {option('plot')} out")


def _panels(
    titles: Sequence[str], heights: Sequence[float] = (), *, share_times: bool = True
) -> tuple[Any, list[Any]]:
    """A figure with one panel under another."""
    if len(titles) > _MOST_PANELS:
        raise HetflowError(
            f"{len(titles)} panels are more than {_MOST_PANELS}", hint="plot a smaller market"
        )
    each = list(heights) or [_PANEL_INCHES] * len(titles)
    figure = new_figure(height_inches=sum(each) + 0.4)
    every = figure.subplots(len(titles), 1, sharex=share_times, squeeze=False, height_ratios=each)[
        :, 0
    ]
    for axes, title in zip(every, titles, strict=True):
        axes.set_title(title, fontsize=9)
        axes.grid(visible=True, alpha=0.3)
    return figure, list(every)


def _band(histories: Sequence[PriceHistory]) -> tuple[list[datetime], list[float], list[float]]:
    """Times at which some price changes, with the least and greatest known price from then on."""
    stretches = [history.stretches() for history in histories]
    edges = sorted({time for one in stretches for start, end, _ in one for time in (start, end)})
    places = [0] * len(stretches)
    low, high = [], []
    for edge in edges:
        known = []
        for index, one in enumerate(stretches):
            while places[index] < len(one) and one[places[index]][1] <= edge:
                places[index] += 1
            if places[index] < len(one) and one[places[index]][0] <= edge:
                price = one[places[index]][2]
                known += [] if price is None else [price]
        low.append(min(known, default=float("nan")))
        high.append(max(known, default=float("nan")))
    return [datetime.fromtimestamp(edge, UTC) for edge in edges], low, high


def _draw_windows(axes: Any, windows: Sequence[Availability]) -> None:
    stretches, ends = [], []
    for row, window in enumerate(windows):
        hours = window.tick_seconds / 3600
        first = None
        for tick, there in enumerate((*window.available, None)):
            if there and first is None:
                first = tick
            elif not there and first is not None:
                stretches.append((row, first * hours, tick * hours))
                if there == 0:
                    ends.append((row, tick * hours))
                first = None
    rows, starts, stops = zip(*stretches, strict=True) if stretches else ((), (), ())
    axes.hlines(rows, starts, stops, color="C0", linewidth=1.5, label="there")
    rows, stops = zip(*ends, strict=True) if ends else ((), ())
    axes.plot(stops, rows, "|", color="C3", markersize=5, label="taken away")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    names = [window.zone for window in windows]
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("hours from the start", fontsize=8)
