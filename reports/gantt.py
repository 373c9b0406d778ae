"""Simulated runs as a Gantt chart with the CDF of completion times."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..schema.errors import HetflowError
from ..schema.simulation import SimulationRun, Span
from .plots import new_figure, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HOUR = 3600.0


def simulation_image(run: SimulationRun, file_format: str) -> bytes:
    """Who held what over time, and the share of jobs done within a time.

    Args:
        run: With its spans and jobs.
        file_format: ``png`` or ``svg``.

    Raises:
        HetflowError: matplotlib is not installed, or the run keeps no jobs.
    """
    if not run.jobs:
        raise HetflowError("this run keeps no jobs to draw", hint="simulate it with --plot")
    figure = new_figure()
    upper, lower = figure.subplots(2, 1)
    _draw_spans(upper, run.spans)
    upper.set_xlabel("time (h)")
    upper.set_ylabel("jobs by type")
    times = sorted(job.completion_seconds / _HOUR for job in run.jobs)
    lower.step(times, [(i + 1) / len(times) for i in range(len(times))], where="post")
    lower.set_xscale("log")
    lower.set_xlabel("completion time (h)")
    lower.set_ylabel("share of jobs")
    lower.grid(visible=True, which="major", alpha=0.3)
    return rendered(figure, file_format)


def _draw_spans(axes: "Axes", spans: Sequence[Span]) -> None:
    lanes = _lanes(spans)
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(t for t, _ in lanes))}
    bars: Any = axes.broken_barh
    named: set[str] = set()
    for lane, ((name, _), stretches) in enumerate(lanes.items()):
        hours = [(start / _HOUR, (end - start) / _HOUR) for start, end in stretches]
        label = None if name in named else name
        named.add(name)
        bars(hours, (lane, 0.9), facecolors=colours[name], label=label)
    if named:
        axes.legend(loc="upper right", ncols=len(named), fontsize="small")


def _lanes(spans: Sequence[Span]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Stretches by device type and job; rounds that follow each other become one."""
    lanes: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in spans:
        stretches = lanes.setdefault((span.device_type, span.job), [])
        if stretches and span.start_seconds - stretches[-1][1] <= 1.0:
            stretches[-1] = (stretches[-1][0], span.end_seconds)
        else:
            stretches.append((span.start_seconds, span.end_seconds))
    return lanes
