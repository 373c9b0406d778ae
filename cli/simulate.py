"""``hetflow simulate``: what a policy and a mechanism would do with a cluster over weeks."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from ..schema.errors import HetflowError, ProblemError
from .common import ForceFlag, JsonFlag, emit, emit_file, emit_json, shows_progress

if TYPE_CHECKING:
    from ..schema.jobs import Entity, Job
    from ..schema.simulation import SimulationRun
    from ..simulator import Case


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
        Path | None, typer.Option(help="A cluster file instead of --gpus; holds prices.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="As of `hetflow allocate`, or fifo_greedy, fifo_any_type, allox, gandiva; in "
            "rounds."
        ),
    ] = "las",
    scheduler: Annotated[
        str,
        typer.Option(
            help="rounds, published-rounds, elastic, static-priority, easyscale, "
            "easyscale-taking, easyscale-homogeneous or yarn."
        ),
    ] = "rounds",
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
        float, typer.Option(help="Seconds that a job loses when it restarts or is resized.")
    ] = 0.0,
    failure_hours: Annotated[
        float | None, typer.Option(help="Mean time between failures of a device, in hours.")
    ] = None,
    server_failure_hours: Annotated[
        float | None,
        typer.Option(help="Mean time between failures of a server with all its devices."),
    ] = None,
    repair_hours: Annotated[
        float, typer.Option(help="Hours until a failed device or server works again.")
    ] = 1.0,
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
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Simulate a cluster in virtual time; the same seed gives the same digits.

    \b
    hetflow simulate continuous-single --throughputs t.json --gpus 36xv100,36xp100 --loads 4,5.6

    Who held which devices is kept for one run with -o, --json or --plot; keeping it takes longer.
    """
    from ..importers.jobs_files import read_throughputs, spelled_as
    from ..planning.judging import read_pool
    from ..schema.files import check_writable
    from ..simulator import Case
    from .allocate import warn_of_left_out

    for path in (output, plot):
        if path is not None:
            check_writable(path, force=force)
    picture = None if plot is None else _picture_format(plot)
    table = read_throughputs(throughputs, pairs=space_sharing or policy == "gandiva")
    pool = spelled_as(read_pool(gpus, cluster), table)
    prices = {n: t.dollars_per_hour for n, t in pool.device_types.items() if t.dollars_per_hour}
    base = Case(
        throughputs=table,
        num_devices=pool.num_devices,
        servers=pool.sizes,
        server_numbers=pool.server_numbers,
        dollars_per_hour=prices,
        scheduler=scheduler,
        policy=policy,
        agnostic=agnostic,
        space_sharing=space_sharing,
        placement=placement,
        optimum=optimum,
        round_seconds=round_seconds,
        restart_seconds=restart_seconds,
        failure_seconds=None if failure_hours is None else 3600.0 * failure_hours,
        server_failure_seconds=(
            None if server_failure_hours is None else 3600.0 * server_failure_hours
        ),
        repair_seconds=3600.0 * repair_hours,
        seed=seed,
        window=_window(window),
    )
    cases = _cases(base, trace, seeds, _numbers(loads), num_jobs)
    if (plot is not None or output is not None) and len(cases) > 1:
        raise ProblemError(f"--plot and -o take one run, this sweep has {len(cases)}")
    if len(cases) == 1 and (json or plot is not None or output is not None):
        cases = [replace(cases[0], records_spans=True)]
    runs = _run(cases, trace, processes, with_jobs=output is not None or plot is not None)
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
    first, colon, last = text.partition(":")
    if not colon or not first.isdigit() or not last.isdigit() or int(first) >= int(last):
        raise ProblemError(f"--window {text}: must be FROM:TO such as 4000:5000")
    return int(first), int(last)


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ProblemError(f"--loads {text}: must be numbers such as 2,4,5.6") from None


def _cases(base: "Case", trace: str, seeds: int, loads: list[float], num_jobs: int) -> "list[Case]":
    from ..simulator import TraceOptions
    from ..simulator.traces.draws import TraceKind

    if trace not in get_args(TraceKind):
        if seeds > 1 or loads:
            raise ProblemError(
                "--seeds and --loads are for drawn traces", hint="give a kind, not a file"
            )
        return [base]
    if trace.startswith("continuous") and not loads:
        raise ProblemError("a continuous trace needs --loads, in jobs per hour")
    reference = next(iter(base.num_devices))
    return [
        replace(
            base,
            seed=number,
            trace=TraceOptions(
                kind=trace,  # type: ignore[arg-type]
                num_jobs=num_jobs,
                jobs_per_hour=load,
                seed=number,
                reference_device=reference,
            ),
        )
        for load in loads or [1.0]
        for number in range(base.seed, base.seed + seeds)
    ]


def _run(
    cases: "list[Case]", trace: str, processes: int, *, with_jobs: bool
) -> "list[SimulationRun]":
    from ..simulator import report, run_case, sweep

    if len(cases) > 1:
        return list(_watched(sweep(cases, processes), len(cases)))
    case, jobs = cases[0], None
    if case.trace is None:
        jobs, entities = _read_jobs(Path(trace), case)
        case = replace(case, entities=entities)
    total = case.trace.num_jobs if case.trace is not None else None
    if not shows_progress():
        return [report(case, run_case(case, jobs), trace, with_jobs=with_jobs)]
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("jobs done", total=total)
        run = run_case(case, jobs, lambda done, _: bar.update(task, completed=done))
    return [report(case, run, trace, with_jobs=with_jobs)]


def _watched(runs: "Iterable[SimulationRun]", total: int) -> "Iterable[SimulationRun]":
    if not shows_progress():
        return runs
    from rich.console import Console
    from rich.progress import track

    return track(runs, "runs", total=total, console=Console(stderr=True), transient=True)


def _read_jobs(path: Path, case: "Case") -> "tuple[Iterable[Job], tuple[Entity, ...]]":
    """A trace as a stream, and the entities of its hierarchy."""
    from ..importers.gavel import read_gavel_trace
    from ..importers.jobs_files import read_jobs
    from ..importers.philly import PhillyTrace
    from ..schema.records import nearest
    from ..simulator.traces.draws import TraceKind

    if path.suffix == ".trace":
        return read_gavel_trace(path), ()  # a stream: it may be larger than memory
    if path.name.startswith("cluster_job_log"):
        return PhillyTrace(path, case.throughputs, next(iter(case.num_devices))), ()
    guess = nearest(str(path), get_args(TraceKind))
    if guess is not None and not path.exists():
        raise ProblemError(f"{path}: no such file, and no kind to draw; did you mean {guess!r}?")
    found = read_jobs(path)
    return found.jobs, found.entities


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
