"""The jobs of a cluster: ``hetflow throughputs``, ``allocate`` (with a proof) and ``simulate``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from ..schema.errors import ProblemError
from ..schema.requests.simulate import AllocateRequest, SweepCommandRequest, ThroughputsRequest
from .asking import Asked, asks
from .common import (
    ForceFlag,
    JsonFlag,
    OutputOption,
    ReportOption,
    emit_either,
    emit_file,
    note,
    price_text,
    progress_line,
    shows_progress,
    warn,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..schema.simulation import SimulationRun


_MOST_NAMED = 10  # jobs on stderr; the answer names all


@asks(AllocateRequest)
def allocate(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Share a pool among jobs as a policy asks; the allocation carries its proof.

    It goes to stdout as JSON, or to -o FILE. Jobs that fit nowhere in the pool are left out, and
    named; devices that stand idle are named too.

    \b
    hetflow allocate jobs.json --throughputs t.json --gpus 8xV100,8xP100 --policy makespan
    """
    from .. import allocate as share
    from ..api.files import priced_pool
    from ..formats.reports.cluster_tables import idle_lines
    from ..planning.inputs import pool_of
    from ..schema.files import check_outputs
    from ..solvers.allocation import policy_named

    check_outputs(output, force=force)
    with progress_line() as tell:
        tell("sharing the pool among the jobs")
        allocation = share(**asked)
    warn_of_left_out(allocation.left_out)
    emit_file(allocation, output, force=force, json=json)
    if asked.get("market"):
        _, prices = priced_pool(pool_of(asked["pool"]), asked["market"], asked.get("at"))
        for name, price in prices.items():
            note(f"{name}: {price_text(price.dollars_per_hour, price.title)}")
    certificate, policy = allocation.certificate, policy_named(allocation.policy)
    gap = "unknown" if certificate.gap is None else f"{certificate.gap:.1e}"
    note(
        f"{policy.title}: {certificate.objective:.6g} {policy.unit} "
        f"({certificate.termination}, gap {gap}; {certificate.method})"
    )
    for line in idle_lines(allocation):
        note(line)
    if output is not None:
        note(f"allocation written to {output}")
    if allocation.certificate.termination != "optimal":
        raise typer.Exit(4)


def warn_of_left_out(left_out: Mapping[str, str]) -> None:
    """Name jobs that fit nowhere on stderr, with why [job id -> why]."""
    for name, reason in list(left_out.items())[:_MOST_NAMED]:
        warn(f"job {name!r} is left out: {reason}")
    if len(left_out) > _MOST_NAMED:
        warn(f"{len(left_out)} jobs are left out in all; the answer names each")


@asks(ThroughputsRequest)
def throughputs(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Turn profiles into the throughputs that allocate and simulate need.

    A job keeps its batch whatever it runs on: a rate is one over the step that `hetflow solve`
    predicts for that batch on so many devices of the type.

    \b
    hetflow throughputs profiles --batch-size 256 --scale-factors 1,2,4 -o throughputs.json
    """
    from .. import throughputs as rates_of
    from ..schema import files

    files.check_outputs(output, force=force)
    table = rates_of(**asked)
    emit_file(table, output, force=force, json=json)
    if output is not None:
        rows = len(table.models)
        note(f"{rows} rows written to {output}; next: hetflow allocate JOBS --throughputs")


@asks(SweepCommandRequest)
def simulate(
    asked: Asked, output: ReportOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Simulate a cluster in virtual time; the same seed gives the same digits.

    \b
    hetflow simulate continuous-single --throughputs t.json --gpus 36xv100,36xp100 --loads 4,5.6

    With -o, --json or --plot a single run records which job held which devices; that takes longer.
    """
    from .. import sweep
    from ..formats.reports.cluster_tables import simulation_table
    from ..formats.reports.plots import image_format, new_figure, simulation_image
    from ..schema.files import check_outputs, to_plain, write_bytes
    from ..schema.frames import frame_of
    from ..schema.simulation import frame_of_runs

    plot, csv = asked.pop("plot", None), asked.pop("csv", None)
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
        swept: Iterable[SimulationRun] = sweep(**asked)
        if shows_progress():
            from rich.console import Console
            from rich.progress import track

            console = Console(stderr=True)
            swept = track(swept, "runs", total=number, console=console, transient=True)
        runs = list(swept)
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
    plain = [to_plain(run) for run in runs] if json else []
    emit_either(json, plain[0] if len(plain) == 1 else plain, lambda: simulation_table(runs))


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
