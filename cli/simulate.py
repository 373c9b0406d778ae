"""``hetflow simulate``: what a policy and a mechanism would do with a cluster over weeks."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.requests.simulate import SweepRequest
from .asking import Asked, asks
from .common import (
    ForceFlag,
    JsonFlag,
    emit,
    emit_file,
    emit_json,
    note,
    shows_progress,
)

if TYPE_CHECKING:
    from ..schema.simulation import SimulationRun

PlotOption = Annotated[
    Path | None,
    typer.Option(help="Draw which job held each device, and the CDF of JCT (.png, .svg)."),
]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write the run with every job, and who held which devices, here."
    ),
]
CsvOption = Annotated[
    Path | None,
    typer.Option(help="Write a table here: one row for each job, or for each run of a sweep."),
]


@asks(SweepRequest)
def simulate(
    asked: Asked,
    plot: PlotOption = None,
    output: RunOption = None,
    csv: CsvOption = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Simulate a cluster in virtual time; the same seed gives the same digits.

    \b
    hetflow simulate continuous-single --throughputs t.json --gpus 36xv100,36xp100 --loads 4,5.6

    With -o, --json or --plot a single run records which job held which devices; that takes longer.
    """
    from .. import sweep
    from ..formats.reports.gantt import simulation_image
    from ..formats.reports.plots import image_format, new_figure
    from ..schema.files import check_outputs, write_bytes
    from ..schema.frames import frame_of
    from ..schema.simulation import frame_of_runs
    from .allocate import warn_of_left_out

    check_outputs(output, plot, csv, force=force)
    if csv is not None:
        frame_of((), ())  # whether pandas is installed
    picture = None if plot is None else image_format(plot)
    if picture is not None:
        new_figure()  # whether matplotlib is installed
    loads, seeds = asked.get("loads", []), asked.get("seeds", 1)
    number = seeds * max(1, len(loads))
    if (plot is not None or output is not None) and number > 1:
        raise ProblemError(f"--plot and -o take one run, this sweep has {number}")
    if number > 1:
        runs = list(_watched(sweep(**asked), number))
    else:
        keeps = output is not None or plot is not None
        runs = [_one(asked, with_jobs=keeps or csv is not None, with_spans=keeps or json)]
    if csv is not None:
        table = runs[0].to_frame() if number == 1 else frame_of_runs(runs)
        text = table.to_csv(index=False, lineterminator="\n")
        write_bytes(csv, text.encode(), force=force)
        note(f"{csv} written")
    if plot is not None and picture is not None:
        write_bytes(plot, simulation_image(runs[0], picture), force=force)
    if output is not None:
        emit_file(runs[0], output, force=force)
    for run in runs:
        warn_of_left_out(run.left_out)
    _tell(runs, json)


def _one(asked: Asked, *, with_jobs: bool, with_spans: bool) -> "SimulationRun":
    from .. import simulate as run
    from ..api.simulate import KINDS

    ours = ("loads", "seeds", "processes")
    given = {name: value for name, value in asked.items() if name not in ours}
    given |= {"with_jobs": with_jobs, "with_spans": with_spans}
    if asked.get("loads"):
        given["jobs_per_hour"] = asked["loads"][0]
    if not shows_progress():
        return run(**given)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        total = asked.get("num_jobs", 1000) if asked["trace"] in KINDS else None
        task = bar.add_task("jobs done", total=total)
        return run(**given, progress=lambda done, _: bar.update(task, completed=done))


def _watched(runs: "Iterable[SimulationRun]", total: int) -> "Iterable[SimulationRun]":
    if not shows_progress():
        return runs
    from rich.console import Console
    from rich.progress import track

    return track(runs, "runs", total=total, console=Console(stderr=True), transient=True)


def _tell(runs: "list[SimulationRun]", json: bool) -> None:
    from ..formats.reports.cluster_tables import simulation_table
    from ..schema.files import to_plain

    if json:
        plain = [to_plain(run) for run in runs]
        emit_json(plain[0] if len(plain) == 1 else plain)
    else:
        emit(simulation_table(runs))
