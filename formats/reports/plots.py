"""Plots of profiles, splits and simulations; matplotlib is optional (``hetflow[plots]``)."""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...schema.errors import HetflowError
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
    """Plot throughput over batch size, one line per device type (VirtualFlow figure 7, left).

    Args:
        profiles: Profiles of one or more device types.
        file_format: ``png`` or ``svg``.

    Returns:
        The bytes of the file.

    Raises:
        HetflowError: matplotlib is not installed.
    """
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
        axes.errorbar(sizes, rates, yerr=bars, marker="o", capsize=3, label=_label(profile))
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.set_xlabel("batch size (samples)")
    axes.set_ylabel("samples per second, forward + backward")
    axes.set_title(" / ".join(sorted({profile.model for profile in profiles})))
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper")
    return rendered(figure, file_format)


def split_image(plan: Plan, file_format: str) -> bytes:
    """Plot the split of a batch: each device's passes as bars on a time axis.

    Args:
        plan: The split.
        file_format: ``png`` or ``svg``.

    Returns:
        The bytes of the file.

    Raises:
        HetflowError: matplotlib is not installed.
    """
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


def _label(profile: Profile) -> str:
    return device_name(profile.device_type, profile.emulation is not None)


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
    """Make an axis of drawn data logarithmic, with plain numbers.

    They stand at 1, 2 and 5 times powers of ten, where these are many at powers of ten only, and
    evenly where they are few.
    """
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
