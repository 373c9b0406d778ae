"""``hetflow simulate``: what a policy and a mechanism would do with a cluster over weeks."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..schema.errors import HetflowError, ProblemError
from ..schema.spelling import whole_number
from . import completing
from .common import (
    ForceFlag,
    JsonFlag,
    asked_pool,
    check_outputs,
    check_table,
    emit,
    emit_file,
    emit_json,
    emit_table,
    shows_progress,
)

if TYPE_CHECKING:
    from ..api.simulate import SimulationOptions
    from ..schema.simulation import SimulationRun

Inputs = tuple[str, Path, str | Path]  # trace, throughputs, pool


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="Jobs (hetflow.jobs/1, .csv), a Gavel .trace, Philly's cluster_job_log, or a "
            "kind to draw: continuous-single, continuous-multiple, static-single, static-multiple."
        ),
    ],
    throughputs: Annotated[
        Path, typer.Option(help="Throughputs (hetflow.throughputs/1, .csv, or Gavel's table).")
    ],
    gpus: Annotated[str | None, typer.Option(help="The pool, e.g. 36xv100,36xp100.")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Instead: a cluster file with prices, or `nvidia-smi -L`."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            autocompletion=completing.policies,
            help="As of `hetflow allocate`, or fifo_greedy, fifo_any_type, allox, gandiva; in "
            "rounds.",
        ),
    ] = "las",
    scheduler: Annotated[
        str | None,
        typer.Option(
            autocompletion=completing.schedulers,
            help="rounds, published-rounds, elastic, static-priority, easyscale, "
            "easyscale-taking, easyscale-homogeneous, yarn, or market with --market "
            "[default: rounds].",
        ),
    ] = None,
    agnostic: Annotated[
        bool, typer.Option("--agnostic", help="Ignore what device types differ in.")
    ] = False,
    space_sharing: Annotated[
        bool, typer.Option("--space-sharing", help="Let pairs of jobs share devices, in rounds.")
    ] = False,
    placement: Annotated[
        Literal["consolidated", "mixed"],
        typer.Option(help="mixed: policies weigh spread devices too; needs servers."),
    ] = "consolidated",
    optimum: Annotated[
        Literal["vertex", "centre"],
        typer.Option(help="Which of LAS's optima: a simplex vertex (fast) or the centre."),
    ] = "vertex",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of traces to draw, with seeds from --seed on.")
    ] = 1,
    loads: Annotated[
        str | None, typer.Option(help="Jobs per hour of drawn traces, e.g. 2,4,5.6.")
    ] = None,
    num_jobs: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Number of jobs in a drawn trace.")
    ] = 1000,
    window: Annotated[
        str | None, typer.Option(help="Average over jobs FROM:TO of the trace, e.g. 4000:5000.")
    ] = None,
    round_seconds: Annotated[float, typer.Option(help="Length of a round, in seconds.")] = 360.0,
    restart_seconds: Annotated[
        float, typer.Option(help="Seconds that a job loses when it starts or restarts.")
    ] = 0.0,
    resize_seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a job loses when it goes over to other devices of its server "
            "[default: --restart-seconds]."
        ),
    ] = None,
    early_rounds: Annotated[
        bool,
        typer.Option(
            "--early-rounds",
            help="A round ends when no job holds a device any more, as on a live cluster.",
        ),
    ] = False,
    failure_hours: Annotated[
        float | None, typer.Option(help="Mean time between failures of a device, in hours.")
    ] = None,
    server_failure_hours: Annotated[
        float | None,
        typer.Option(help="Mean time between failures of a whole server, in hours."),
    ] = None,
    repair_hours: Annotated[
        float, typer.Option(help="Hours until a failed device or server works again.")
    ] = 1.0,
    market: Annotated[
        list[Path] | None,
        typer.Option(
            help="Jobs rent machines of this market (hetflow.market/1), the pool is their quota; "
            "may be repeated."
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="Market: second 0, as 2020-03-07T00:00:00Z; else once all is known."),
    ] = None,
    preemption_hours: Annotated[
        float | None,
        typer.Option(help="Market: mean time until a spot machine is taken away, at random."),
    ] = None,
    checkpoint_seconds: Annotated[
        float,
        typer.Option(
            help="Market: between checkpoints; 0: written when a machine is announced to go."
        ),
    ] = 0.0,
    cloud_move_dollars: Annotated[
        float, typer.Option(help="Market: egress of a move between clouds.")
    ] = 0.0,
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes that share a sweep.")
    ] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw which job held each device, and the CDF of JCT (.png, .svg)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the run with every job, and who held which devices, here."
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write a table here: one row for each job, or for each run of a sweep."),
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Simulate a cluster in virtual time; the same seed gives the same digits.

    \b
    hetflow simulate continuous-single --throughputs t.json --gpus 36xv100,36xp100 --loads 4,5.6

    With -o, --json or --plot a single run records which job held which devices; that takes longer.
    """
    from ..schema.simulation import frame_of_runs
    from .allocate import warn_of_left_out

    check_outputs(output, plot, csv, force=force)
    if csv is not None:
        check_table(csv, force=force)
    picture = None if plot is None else _picture_format(plot)
    number = seeds * max(1, len(_numbers(loads)))
    if (plot is not None or output is not None) and number > 1:
        raise ProblemError(f"--plot and -o take one run, this sweep has {number}")
    inputs = (trace, throughputs, asked_pool(gpus, cluster))
    options: SimulationOptions = {
        "policy": policy,
        "agnostic": agnostic,
        "space_sharing": space_sharing,
        "placement": placement,
        "optimum": optimum,
        "round_seconds": round_seconds,
        "restart_seconds": restart_seconds,
        "resize_seconds": resize_seconds,
        "early_rounds": early_rounds,
        "failure_seconds": None if failure_hours is None else 3600.0 * failure_hours,
        "server_failure_seconds": (
            None if server_failure_hours is None else 3600.0 * server_failure_hours
        ),
        "repair_seconds": 3600.0 * repair_hours,
        "window": _window(window),
        "seed": seed,
        "num_jobs": num_jobs,
        "start": start,
        "preemption_seconds": None if preemption_hours is None else 3600.0 * preemption_hours,
        "checkpoint_seconds": checkpoint_seconds,
        "cloud_move_dollars": cloud_move_dollars,
    }
    if scheduler is not None:
        options["scheduler"] = scheduler
    if market:
        options["market"] = market
    if number > 1:
        runs = _swept(inputs, _numbers(loads), seeds, processes, options)
    else:
        keeps = output is not None or plot is not None
        with_jobs = keeps or csv is not None
        spans = keeps or json
        runs = [_one(inputs, _numbers(loads), options, with_jobs=with_jobs, with_spans=spans)]
    if csv is not None:
        emit_table(runs[0].to_frame() if number == 1 else frame_of_runs(runs), csv, force=force)
    if plot is not None and picture is not None:
        _draw(runs[0], plot, picture, force)
    if output is not None:
        emit_file(runs[0], output, force=force)
    for run in runs:
        warn_of_left_out(run.left_out)
    _tell(runs, json)


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, last = (whole_number(part) for part in text.partition(":")[::2])
    if first is None or last is None or first >= last:
        raise ProblemError(f"--window {text}: must be FROM:TO such as 4000:5000")
    return first, last


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ProblemError(f"--loads {text}: must be numbers such as 2,4,5.6") from None


def _one(
    inputs: Inputs,
    loads: list[float],
    options: "SimulationOptions",
    *,
    with_jobs: bool,
    with_spans: bool,
) -> "SimulationRun":
    from .. import simulate as run
    from ..api.simulate import KINDS

    trace, throughputs, pool = inputs
    load = loads[0] if loads else None
    if not shows_progress():
        return run(
            trace, throughputs, pool, jobs_per_hour=load, with_jobs=with_jobs,
            with_spans=with_spans, **options,
        )  # fmt: skip
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("jobs done", total=options["num_jobs"] if trace in KINDS else None)
        return run(
            trace, throughputs, pool, jobs_per_hour=load, with_jobs=with_jobs,
            with_spans=with_spans, progress=lambda done, _: bar.update(task, completed=done),
            **options,
        )  # fmt: skip


def _swept(
    inputs: Inputs, loads: list[float], seeds: int, processes: int, options: "SimulationOptions"
) -> "list[SimulationRun]":
    from .. import sweep

    trace, throughputs, pool = inputs
    runs = sweep(trace, throughputs, pool, loads=loads, seeds=seeds, processes=processes, **options)
    return list(_watched(runs, seeds * max(1, len(loads))))


def _watched(runs: "Iterable[SimulationRun]", total: int) -> "Iterable[SimulationRun]":
    if not shows_progress():
        return runs
    from rich.console import Console
    from rich.progress import track

    return track(runs, "runs", total=total, console=Console(stderr=True), transient=True)


def _picture_format(plot: Path) -> str:
    """What to draw in; said before the run, as is that matplotlib is missing."""
    from ..reports.plots import new_figure

    file_format = plot.suffix.lower().lstrip(".")
    if file_format not in ("png", "svg"):
        raise HetflowError(f"--plot {plot}: must end in .png or .svg", hint="rename the output")
    new_figure()
    return file_format


def _draw(run: "SimulationRun", plot: Path, file_format: str, force: bool) -> None:
    from ..reports.gantt import simulation_image
    from ..schema.files import write_bytes

    write_bytes(plot, simulation_image(run, file_format), force=force)


def _tell(runs: "list[SimulationRun]", json: bool) -> None:
    from ..reports.cluster_tables import simulation_table
    from ..schema.files import to_plain

    if json:
        plain = [to_plain(run) for run in runs]
        emit_json(plain[0] if len(plain) == 1 else plain)
    else:
        emit(simulation_table(runs))
