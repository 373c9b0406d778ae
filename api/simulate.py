"""``hetflow.simulate`` and ``hetflow.sweep``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

from .. import simulator
from ..importers.gavel import read_gavel_trace
from ..importers.jobs_files import read_jobs
from ..importers.philly import PhillyTrace
from ..mechanisms.allocators.named import always_pairs
from ..planning.inputs import Pool, pool_of, spelled_as
from ..planning.market_prices import Markets, market_offers, markets_of
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.jobs import Entity, Job, Jobs, Throughputs
from ..schema.records import nearest
from ..schema.simulation import SimulationRun
from ..simulator import Case, TraceOptions
from ..simulator.market.many_jobs import MarketOptions
from ..simulator.traces.draws import TraceKind
from .files import throughputs_of
from .naming import names_arguments

KINDS: tuple[str, ...] = get_args(TraceKind)


class SimulationOptions(TypedDict, total=False):
    """What to simulate; what is left out is as ``hetflow simulate`` has it.

    ``policy`` (las) counts under ``scheduler`` rounds. ``agnostic`` ignores what device types
    differ in, ``space_sharing`` lets pairs of jobs share devices, ``placement`` mixed weighs
    spread devices too, ``optimum`` says which of LAS's optima is taken. ``round_seconds`` (360)
    is a round's length, ``restart_seconds`` (0) are lost by a job that restarts.
    ``failure_seconds`` and ``server_failure_seconds`` are mean times between failures (None:
    never), ``repair_seconds`` (3600) how long what failed is gone. ``window`` (4000, 5000)
    averages over these jobs of the trace only. ``seed`` (0) is that of all that is drawn, and
    ``num_jobs`` (1000) the length of a drawn trace.

    With ``market`` (markets, or their files) jobs rent machines at its prices within the pool as
    quota, from ``start`` on (None: once as many prices are known as ever are); a spot machine is
    taken away after ``preemption_seconds`` on average (None: only where the market says so), and
    the work since the last checkpoint, every ``checkpoint_seconds`` (0: when notice is given), is
    lost; a move to another cloud costs ``cloud_move_dollars``.
    """

    policy: str
    scheduler: str
    agnostic: bool
    space_sharing: bool
    placement: Literal["consolidated", "mixed"]
    optimum: Literal["centre", "vertex"]
    round_seconds: float
    restart_seconds: float
    failure_seconds: float | None
    server_failure_seconds: float | None
    repair_seconds: float
    window: tuple[int, int] | None
    seed: int
    num_jobs: int
    market: Markets
    start: str | None
    preemption_seconds: float | None
    checkpoint_seconds: float
    cloud_move_dollars: float


_OF_MARKETS = ("start", "preemption_seconds", "checkpoint_seconds", "cloud_move_dollars")


@names_arguments(gpus="pool", cluster="pool", loads="jobs_per_hour")
def simulate(
    trace: Jobs | Path | str,
    throughputs: Throughputs | Path | str,
    pool: Pool,
    *,
    jobs_per_hour: float | None = None,
    with_jobs: bool = True,
    with_spans: bool = False,
    progress: Callable[[int, float], None] | None = None,
    **options: Unpack[SimulationOptions],
) -> SimulationRun:
    """Simulate a cluster in virtual time; the same seed gives the same digits.

    Args:
        trace: Jobs, their file, or a kind to draw: ``continuous-single``, ``continuous-multiple``,
            ``static-single`` or ``static-multiple``.
        throughputs: Throughputs, or their file.
        pool: ``"36xV100,36xP100"``, a ``Cluster``, or the ``Path`` of a cluster's file.
        jobs_per_hour: Load of a trace that is drawn.
        with_jobs: Whether every job's outcome is kept.
        with_spans: Whether it is kept who held which devices; takes longer.
        progress: Told how many jobs are done, and the virtual seconds.
        options: As ``SimulationOptions`` says.

    Raises:
        ProblemError: Options, jobs and pool that do not go together.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> jobs = hetflow.Jobs(jobs=(hetflow.Job(id="a", model="m", steps=7200),))
        >>> rates = hetflow.ModelThroughput(model="m", scale_factor=1, steps_per_second={"V100": 2})
        >>> run = hetflow.simulate(jobs, hetflow.Throughputs(models=(rates,)), "V100")
        >>> run.metrics.makespan_seconds
        3600.0
    """
    case = _case(throughputs, pool, options)
    loads = () if jobs_per_hour is None else (jobs_per_hour,)
    (case,) = _drawn(case, trace, 1, loads, options.get("num_jobs", 1000))
    case = replace(case, records_spans=with_spans)
    if isinstance(trace, Jobs):
        jobs: Iterable[Job] | None = trace.jobs
        case, name = replace(case, entities=trace.entities), "jobs"
    else:
        name, jobs = str(trace), None
        if case.trace is None:
            jobs, entities = _read(Path(trace), case)
            case = replace(case, entities=entities)
    run = simulator.run_case(case, jobs, progress)
    return simulator.report(case, run, name, with_jobs=with_jobs)


@names_arguments(gpus="pool", cluster="pool")
def sweep(
    trace: str,
    throughputs: Throughputs | Path | str,
    pool: Pool,
    *,
    loads: Sequence[float] = (),
    seeds: int = 1,
    processes: int = 1,
    **options: Unpack[SimulationOptions],
) -> Iterator[SimulationRun]:
    """Simulate drawn traces of several loads and seeds, in order of these.

    Args:
        trace: A kind to draw.
        throughputs: Throughputs, or their file.
        pool: The devices.
        loads: Jobs per hour.
        seeds: So many of each load, from ``seed`` on.
        processes: How many run at a time.
        options: As ``SimulationOptions`` says.

    Raises:
        ProblemError: Options and pool that do not go together, or a trace that is not drawn.
        BackendError: A process died.

    Example:
        >>> import hetflow
        >>> rates = "sample:throughputs.csv"
        >>> runs = hetflow.sweep("static-single", rates, "4xV100", seeds=2, num_jobs=3)
        >>> [run.metrics.num_jobs for run in runs]
        [3, 3]
    """
    case = _case(throughputs, pool, options)
    cases = _drawn(case, trace, seeds, loads, options.get("num_jobs", 1000))
    if cases[0].trace is None:
        raise ProblemError(f"only drawn traces are swept, {trace!r} is no kind to draw")
    return simulator.sweep(cases, processes)


def _case(throughputs: Throughputs | Path | str, pool: Pool, options: SimulationOptions) -> Case:
    needs_pairs = options.get("space_sharing", False) or always_pairs(options.get("policy", "las"))
    table = throughputs_of(throughputs, pairs=needs_pairs)
    devices = spelled_as(pool_of(pool), table)
    ours = ("num_jobs", "market", *_OF_MARKETS)
    chosen: dict[str, Any] = {k: v for k, v in options.items() if k not in ours}
    chosen |= _market(options, devices)
    return Case(
        throughputs=table,
        num_devices=devices.num_devices,
        servers=devices.sizes,
        server_numbers=devices.server_numbers,
        dollars_per_hour={
            n: t.dollars_per_hour for n, t in devices.device_types.items() if t.dollars_per_hour
        },
        **chosen,
    )


def _market(options: SimulationOptions, devices: Cluster) -> dict[str, Any]:
    """What a case says of its market; nothing where there is none."""
    if "market" not in options:
        for name in _OF_MARKETS:
            if options.get(name):
                raise ProblemError(f"{name} is for a market, and none is given")
        return {}
    prices, is_told = market_offers(
        markets_of(options["market"]), devices.num_devices, options.get("start")
    )
    told = MarketOptions(
        restart_seconds=options.get("restart_seconds", 0.0),
        cloud_move_dollars=options.get("cloud_move_dollars", 0.0),
        preemption_seconds=options.get("preemption_seconds"),
        checkpoint_seconds=options.get("checkpoint_seconds", 0.0),
        seed=options.get("seed", 0),
        is_told=is_told,
    )
    return {
        "scheduler": options.get("scheduler", "market"),
        "market": prices,
        "market_options": told,
    }


def _drawn(
    base: Case, trace: Jobs | Path | str, seeds: int, loads: Sequence[float], num_jobs: int
) -> list[Case]:
    """The case with each recipe of a trace; as it is where the trace is given."""
    kind = next((kind for kind in get_args(TraceKind) if trace == kind), None)
    if kind is None:
        if seeds > 1 or loads:
            raise ProblemError(
                "--seeds and --loads are for drawn traces", hint="give a kind, not a file"
            )
        return [base]
    if kind.startswith("continuous") and not loads:
        raise ProblemError("a continuous trace needs --loads, in jobs per hour")
    reference = next(iter(base.num_devices))
    return [
        replace(
            base,
            seed=number,
            trace=TraceOptions(
                kind=kind,
                num_jobs=num_jobs,
                jobs_per_hour=load,
                seed=number,
                reference_device=reference,
            ),
        )
        for load in loads or [1.0]
        for number in range(base.seed, base.seed + seeds)
    ]


def _read(path: Path, case: Case) -> tuple[Iterable[Job], tuple[Entity, ...]]:
    """A trace as a stream, and the entities of its hierarchy."""
    if path.suffix == ".trace":
        return read_gavel_trace(path), ()  # a stream: it may be larger than memory
    if path.name.startswith("cluster_job_log"):
        return PhillyTrace(path, case.throughputs, next(iter(case.num_devices))), ()
    guess = nearest(str(path), KINDS)
    if guess is not None and not path.exists():
        raise ProblemError(f"{path}: no such file, and no kind to draw; did you mean {guess!r}?")
    found = read_jobs(path)
    return found.jobs, found.entities
