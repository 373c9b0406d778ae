"""Plot profiles and splits. matplotlib is optional (``pip install hetflow[plots]``)."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..schema.errors import HetflowError
from ..schema.plan import SplitPlan
from ..schema.profile import Profile
from .tables import device_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        axes.errorbar(sizes, rates, yerr=errors, marker="o", capsize=3, label=_label(profile))
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.set_xlabel("batch size (samples)")
    axes.set_ylabel("samples per second, forward + backward")
    axes.set_title(" / ".join(sorted({profile.model for profile in profiles})))
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper")
    return rendered(figure, file_format)


def split_image(plan: SplitPlan, file_format: str) -> bytes:
    """Plot the split of a batch: each device's passes as bars on a time axis in seconds.

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
    labels = []
    for row, group in enumerate(plan.groups):
        _draw_passes(axes, row, group.virtual_nodes, group.pass_seconds or 0.0)
        name = device_name(group.device_type, group.device_type in emulated)
        labels.append(
            f"{group.num_devices} x {name}\n{group.virtual_nodes} x "
            f"{group.virtual_node_batch_size} samples"
        )
    compute = plan.predicted.compute_seconds or 0.0
    if _draw_tail(axes, compute, plan):
        figure.legend(loc="outside right upper")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start of a step (predicted)")
    axes.set_title(f"{plan.model}, global batch {plan.global_batch_size}")
    return rendered(figure, file_format)


def _draw_passes(axes: Any, row: int, passes: int, seconds: float) -> None:
    # With more than a few hundred passes, the edges alone would fill the picture.
    shown = passes if passes <= 200 else 1
    width = passes * seconds / shown
    axes.barh(
        [row] * shown,
        [width] * shown,
        left=[width * i for i in range(shown)],
        color="tab:blue",
        edgecolor="white",
    )


def _draw_tail(axes: Any, compute: float, plan: SplitPlan) -> bool:
    """Draw what follows the passes; whether there is anything."""
    left = compute
    for seconds, color, label in (
        (plan.predicted.sync_seconds, "tab:orange", "synchronise"),
        (plan.predicted.update_seconds, "tab:green", "update"),
    ):
        if seconds:
            axes.axvspan(left, left + seconds, color=color, alpha=0.4, label=label)
            left += seconds
    return left > compute


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
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
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
