"""Plots of profiles, splits, simulations and markets; matplotlib is optional.

Each function returns the bytes of a ``png`` or an ``svg`` file. It raises HetflowError where
matplotlib is not installed (``hetflow[plots]``), or there is nothing or too much to draw.
"""

import io
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...schema.errors import HetflowError
from ...schema.market import Availability, Market, PriceHistory, RentReport
from ...schema.options import option
from ...schema.plan import Plan, Prediction
from ...schema.profile import Profile
from ...schema.simulation import SimulationRun, Span
from .grid import device_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PASSES = 60
_VISIBLE = 1e-3  # of a step: less is no line
_MOST_RATIO = {"x": 1000.0, "y": 10_000.0}  # of values, for ticks between powers of ten
_LEAST_RATIO = 5.0


def image_format(path: Path) -> str:
    """``png`` or ``svg``, as the picture's file is named.

    Raises:
        HetflowError: It has another ending.
    """
    found = path.suffix.lower().lstrip(".")
    if found not in ("png", "svg"):
        message = f"{option('plot', path)}: must end in .png or .svg"
        raise HetflowError(message, hint="rename the output")
    return found


def curves_image(profiles: Sequence[Profile], file_format: str) -> bytes:
    """Plot throughput over batch size, one line per device type (VirtualFlow figure 7, left)."""
    figure = new_figure()
    axes = figure.subplots()
    for profile in profiles:
        sizes = [point.batch_size for point in profile.batch_curve]
        rates = [point.batch_size / point.step_seconds for point in profile.batch_curve]
        errors = [
            rate * (point.step_seconds_error or 0.0)
            for rate, point in zip(rates, profile.batch_curve, strict=True)
        ]
        bars = errors if any(errors) else None
        name = device_name(profile.device_type, profile.emulation is not None)
        axes.errorbar(sizes, rates, yerr=bars, marker="o", capsize=3, label=name)
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.set_xlabel("batch size (samples)")
    axes.set_ylabel("samples per second, forward + backward")
    axes.set_title(" / ".join(sorted({profile.model for profile in profiles})))
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper")
    return rendered(figure, file_format)


def split_image(plan: Plan, file_format: str) -> bytes:
    """Plot the split of a batch: each device's passes as bars on a time axis."""
    figure = new_figure()
    axes = figure.subplots()
    emulated = {device.device_type for device in plan.emulated}
    unit, per_second = ("seconds", 1.0)
    if plan.predicted.step_seconds < 1:
        unit, per_second = ("milliseconds", 1e3)
    labels = []
    for row, group in enumerate(plan.groups):
        seconds = group.pass_seconds or 0.0
        _draw_passes(axes, row, group.virtual_nodes, seconds * per_second)
        name = device_name(group.device_type, group.device_type in emulated)
        labels.append(
            f"{group.num_devices} x {name}\n{group.virtual_nodes} x "
            f"{group.virtual_node_batch_size} samples"
        )
    _draw_tail(axes, plan.predicted, per_second)
    figure.legend(loc="outside right upper")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} since the start of a step (predicted)")
    axes.set_title(f"{plan.model}, global batch {plan.global_batch_size}")
    return rendered(figure, file_format)


def _draw_passes(axes: Any, row: int, passes: int, length: float) -> None:
    # With more passes, the edges between them would fill the picture.
    shown = passes if passes <= _MOST_PASSES else 1
    width = passes * length / shown
    axes.barh(
        [row] * shown,
        [width] * shown,
        left=[width * i for i in range(shown)],
        color="tab:blue",
        edgecolor="white",
        label="_more" if row else "passes of virtual nodes",
    )


def _draw_tail(axes: Any, predicted: Prediction, per_second: float) -> None:
    """Draw what follows the passes, up to the end of the step."""
    synchronise, update = predicted.sync_seconds or 0.0, predicted.update_seconds or 0.0
    compute = predicted.compute_seconds or 0.0
    others = predicted.step_seconds - compute - synchronise - update
    left = compute * per_second
    for seconds, color, label in (
        (others, "tab:gray", "loading and fixed costs"),
        (synchronise, "tab:orange", "synchronise"),
        (update, "tab:green", "update"),
    ):
        if seconds > _VISIBLE * predicted.step_seconds:
            right = left + seconds * per_second
            axes.axvspan(left, right, color=color, alpha=0.4, label=label)
            left = right


def new_figure(*, height_inches: float = 4.0) -> "Figure":
    """Make an empty figure.

    Raises:
        HetflowError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise HetflowError(
            "plots need matplotlib, which is not installed", hint="pip install 'hetflow[plots]'"
        ) from None
    return Figure(figsize=(7, height_inches), layout="constrained")


def log_axis(axes: Any, which: Literal["x", "y"]) -> None:
    """Make an axis of drawn data logarithmic, with plain numbers."""
    # They stand at 1, 2 and 5 times powers of ten, where these are many at powers of ten only, and
    # evenly where they are few.
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    if low == high:  # a single value has no range of its own
        (axes.set_xlim if which == "x" else axes.set_ylim)(low / 2, high * 2)
    between = (2.0, 5.0) if high < low * _MOST_RATIO[which] else ()
    narrow = low < high < low * _LEAST_RATIO
    axis.set_major_locator(
        MaxNLocator(6, steps=[1, 2, 5, 10]) if narrow else LogLocator(subs=(1.0, *between))
    )
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1000 else f"{x:g}"))
    axis.set_minor_locator(NullLocator())


def rendered(figure: "Figure", file_format: str) -> bytes:
    """A figure as the bytes of a ``png`` or ``svg`` file."""
    target = io.BytesIO()
    # A fixed salt and no date: the same input gives the same bytes.
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "hetflow"}):
        metadata = {"Date": None} if file_format == "svg" else {"Software": None}
        figure.savefig(target, format=file_format, dpi=144, metadata=metadata)
    return target.getvalue()


_HOUR = 3600.0
MOST_NAMED_ROWS = 80  # with more rows, rows are too low for text: only their groups are named
_ROW_INCHES = 0.16
_WIDTH_INCHES = 5.5  # of the bars, approximately
_LETTER_INCHES = 0.055
_COLOURS = 10  # up to this many jobs have separate colours and a legend
_ALPHA = 0.75
_MOST_EDGED = 100
_MOST_BARS = 20_000  # with more bars, they are drawn as pixels inside an .svg too


def simulation_image(run: SimulationRun, file_format: str) -> bytes:
    """Draw which job held each device over time, and the fraction of jobs done within a time.

    Bars are coloured by job and named where the name fits; up to ten jobs have a legend. More
    than ``MOST_NAMED_ROWS`` devices are drawn as thin rows, named by server and type. If these
    are still too many, they are named by type.

    Raises:
        HetflowError: The run keeps no jobs or no device names.
    """
    hint = f"simulate it again with -o, or with {option('plot')}"
    if not run.jobs:
        raise HetflowError("this run keeps no jobs to draw", hint=hint)
    if not run.spans or not all(span.devices for span in run.spans):
        raise HetflowError("this run does not say which devices its jobs held", hint=hint)
    rows = _rows(run)
    named = min(len(rows), MOST_NAMED_ROWS)
    gantt = max(2.0, 0.5 + _ROW_INCHES * named)
    figure = new_figure(height_inches=gantt + 2.2)
    upper, lower = figure.subplots(2, 1, height_ratios=[gantt, 2.2])
    colours = {
        job: f"C{i % _COLOURS}" for i, job in enumerate(dict.fromkeys(s.job for s in run.spans))
    }
    _draw_spans(upper, run.spans, rows, colours)
    if len(colours) <= _COLOURS:
        from matplotlib.patches import Patch

        patches = [
            Patch(color=colour, alpha=_ALPHA, label=_plain(job)) for job, colour in colours.items()
        ]
        figure.legend(handles=patches, loc="outside upper center", ncols=5, fontsize=6)
    upper.set_xlabel("time (h)")
    held, total = len(rows), sum(run.num_devices.values())
    upper.set_ylabel("devices" if held == total else f"devices ({held} of {total} ever held)")
    times = sorted(job.completion_seconds / _HOUR for job in run.jobs)
    shares = [i / len(times) for i in range(len(times) + 1)]
    lower.step([times[0], *times], shares, where="post")
    lower.set_ylim(0.0, 1.05)
    log_axis(lower, "x")
    lower.set_xlabel("completion time (h)")
    lower.set_ylabel("share of jobs")
    lower.grid(visible=True, which="major", alpha=0.3)
    return rendered(figure, file_format)


def device_groups(devices: Sequence[str]) -> list[str]:
    """The label of each device's row: the device, its server and type, or its type."""
    if len(devices) <= MOST_NAMED_ROWS:
        return list(devices)
    groups = [name.rpartition(":")[0] for name in devices]
    if len(set(groups)) <= MOST_NAMED_ROWS:
        return groups
    return [name.rpartition("/")[2] for name in groups]


def _plain(name: str) -> str:
    """The name, escaped so that matplotlib reads it as text and not as a formula."""
    return name.replace("$", r"\$")


def _rows(run: SimulationRun) -> dict[str, int]:
    """The row of each device that was held: by type in the pool's order, server, and number."""
    types = list(run.num_devices)
    kinds = {name: types.index(span.device_type) for span in run.spans for name in span.devices}
    ordered = sorted(kinds, key=lambda name: (kinds[name], _numbers(name)))
    return {name: row for row, name in enumerate(ordered)}


def _numbers(name: str) -> tuple[int, int]:
    """The server and number of a device; in a pool without servers, the server is -1."""
    server = re.match(r"server(\d+)/", name)
    return (-1 if server is None else int(server[1]), int(name.rpartition(":")[2]))


def _draw_spans(
    axes: "Axes", spans: Sequence[Span], rows: dict[str, int], colours: dict[str, str]
) -> None:
    hours = max(span.end_seconds for span in spans) / _HOUR
    bars: dict[tuple[int, float, float], list[tuple[float, float, str]]] = {}
    for span in spans:
        offset, height = _band(span)
        start, length = span.start_seconds / _HOUR, (span.end_seconds - span.start_seconds) / _HOUR
        for name in span.devices:
            row = bars.setdefault((rows[name], offset, height), [])
            row.append((start, length, colours[span.job]))
            is_named = len(rows) <= MOST_NAMED_ROWS and height > 0.5
            if is_named and length / hours * _WIDTH_INCHES > _LETTER_INCHES * (len(span.job) + 1):
                middle = (start + length / 2, rows[name])
                axes.text(
                    *middle, _plain(span.job), ha="center", va="center", fontsize=5.5, clip_on=True
                )
    as_pixels = sum(map(len, bars.values())) > _MOST_BARS
    draw: Any = axes.broken_barh
    for (line, offset, height), pieces in bars.items():
        draw(
            [(start, length) for start, length, _ in pieces],
            (line + offset, height),
            facecolors=[colour for _, _, colour in pieces],
            alpha=_ALPHA,
            edgecolor="white",
            # Edges of many bars would hide them.
            linewidth=0.3 if len(rows) <= MOST_NAMED_ROWS and len(pieces) <= _MOST_EDGED else 0.0,
            rasterized=as_pixels,
        )
    _name_rows(axes, rows)
    axes.set_xlim(0.0, hours)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _band(span: Span) -> tuple[float, float]:
    """The (bottom, height) of a bar: two jobs that share a device have half a row each."""
    if span.shared_with is None:
        return -0.45, 0.9
    return (-0.45 if span.job < span.shared_with else 0.0), 0.45


def _name_rows(axes: "Axes", rows: Iterable[str]) -> None:
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(device_groups(list(rows))):
        groups.setdefault(group, []).append(row)
    middles = [sum(each) / len(each) for each in groups.values()]
    axes.set_yticks(middles, list(groups), fontsize=6)
    axes.tick_params(axis="y", length=0)


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
            times, low, high = _price_band(histories)
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


def _price_band(
    histories: Sequence[PriceHistory],
) -> tuple[list[datetime], list[float], list[float]]:
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
