"""Simulated runs as a Gantt chart with one row per device, and the CDF of completion times."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...schema.errors import HetflowError
from ...schema.options import option
from ...schema.simulation import SimulationRun, Span
from .plots import log_axis, new_figure, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

    Args:
        run: A run with its spans and jobs.
        file_format: ``png`` or ``svg``.

    Returns:
        The bytes of the file.

    Raises:
        HetflowError: matplotlib is not installed, or the run keeps no jobs or no device names.
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
    upper.set_ylabel(_held(len(rows), sum(run.num_devices.values())))
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


def _held(held: int, total: int) -> str:
    return "devices" if held == total else f"devices ({held} of {total} ever held)"


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
