"""Plot price histories: over time by zone, or per device (thesis figures 6.1 and 6.4)."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ..schema.errors import HetflowError
from ..schema.market import Market, PriceHistory
from .plots import new_figure, rendered

_PANEL_INCHES = 2.2
_LINE_INCHES = 0.15  # height of a legend's line, approximately
_MOST_PANELS = 40


def prices_image(market: Market, file_format: str, *, per_device: bool = False) -> bytes:
    """Draw prices over time; lines have gaps where prices are unknown.

    Args:
        market: A market with price histories.
        file_format: ``png`` or ``svg``.
        per_device: Draw one panel per device type, in dollars per device and hour, with one line
            per history. Else one panel per instance type, in dollars per hour, with one line per
            zone and the on-demand price where it is known.

    Returns:
        The bytes of the file.

    Raises:
        HetflowError: matplotlib is not installed, there are no prices or too many panels, or the
            devices of a machine are unknown.
    """
    if not market.prices:
        raise HetflowError("this market has no prices to plot", hint="leave --plot out")
    panels: dict[str, list[PriceHistory]] = {}
    for history in market.prices:
        panels.setdefault(_panel(market, history, per_device=per_device), []).append(history)
    if len(panels) > _MOST_PANELS:
        raise HetflowError(
            f"{len(panels)} panels are more than {_MOST_PANELS}", hint="plot a smaller market"
        )
    heights = [max(_PANEL_INCHES, _LINE_INCHES * len(lines)) for lines in panels.values()]
    figure = new_figure(height_inches=sum(heights) + 0.4)
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, histories) in zip(every, panels.items(), strict=True):
        _draw(axes, market, histories, per_device=per_device)
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("$ / device / hour" if per_device else "$ / hour", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    every[-1].tick_params(axis="x", labelrotation=20)
    every[-1].set_xlabel("time (UTC)")
    return rendered(figure, file_format)


def _panel(market: Market, history: PriceHistory, *, per_device: bool) -> str:
    if not per_device:
        return f"{history.cloud} {history.instance_type}"
    machine = market.instance_type_of(history)
    if machine is None:
        raise HetflowError(
            f"{history.title}: the market does not say what devices it has",
            hint="import the prices again with --instance-types FILE",
        )
    return f"{history.cloud} {machine.device_type}"


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
