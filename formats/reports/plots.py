"""Plot profiles and splits. matplotlib is optional (``pip install hetflow[plots]``)."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...schema.errors import HetflowError
from ...schema.options import option
from ...schema.plan import Plan, Prediction
from ...schema.profile import Profile
from .grid import device_name

if TYPE_CHECKING:
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
