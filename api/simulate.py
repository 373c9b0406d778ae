"""``hetflow.simulate`` and ``hetflow.sweep``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

from .. import simulator
from ..importers.jobs_files import read_jobs
from ..mechanisms.allocators.named import always_pairs
from ..planning.inputs import pool_of, spelled_as
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.jobs import Entity, Job, Jobs
from ..schema.options import option
from ..schema.records import Count, Index, nearest
from ..schema.requests.kinds import JobsTable, Markets, Pool, ThroughputsTable
from ..schema.simulation import SimulationRun
from ..simulator import Case, TraceOptions
from ..simulator.market.many_jobs import MarketOptions
from ..simulator.traces.draws import TraceKind
from .calls import checks
from .files import jobs_of, throughputs_of

if TYPE_CHECKING:
    pass

KINDS: tuple[str, ...] = get_args(TraceKind)


class SimulationOptions(TypedDict, total=False):
    """Options of a simulation; the defaults, in parentheses, are those of ``hetflow simulate``.

    Jobs: ``policy`` (las) is used by the ``scheduler`` rounds only. ``agnostic`` ignores
    differences between device types. ``space_sharing`` lets pairs of jobs share devices. The
    ``placement`` mixed considers devices on several servers too. ``optimum`` selects one of LAS's
    optimal allocations. ``round_seconds`` (360) is the length of a round, ``restart_seconds`` (0)
    the time that a job loses when it starts or restarts, ``resize_seconds`` (None: the same) when
    it goes over to other devices of its server. ``early_rounds`` (False) ends a round as soon as no
    job holds a device, as a live cluster does.

    Failures: ``failure_seconds`` and ``server_failure_seconds`` are the mean times between failures
    of a device and of a server (None: no failures); ``repair_seconds`` (3600) is the time until
    what failed is back.

    Traces and results: ``window``, such as (4000, 5000), averages over these jobs of the trace
    only. ``seed`` (0) is the seed of all random numbers, ``num_jobs`` (1000) the length of a drawn
    trace.

    With ``market`` (markets, or their files), jobs rent machines at the market's prices, at most as
    many devices as the pool has. The simulation begins at ``start`` (None: the first time at which
    the largest number of prices is known at once). A spot machine is preempted after
    ``preemption_seconds`` on average (None: only when the market's availability says so). The work
    since the last checkpoint is then lost; checkpoints are written every ``checkpoint_seconds``
    (0: when a preemption is announced). Moving to another cloud costs ``cloud_move_dollars``.
    """

    policy: str
    scheduler: str
    agnostic: bool
    space_sharing: bool
    placement: Literal["consolidated", "mixed"]
    optimum: Literal["centre", "vertex"]
    round_seconds: float
    restart_seconds: float
    resize_seconds: float | None
    early_rounds: bool
    failure_seconds: float | None
    server_failure_seconds: float | None
    repair_seconds: float
    window: tuple[Index, Index] | None
    seed: Index
    num_jobs: Count
    market: "Markets"
    start: str | None
    preemption_seconds: float | None
    checkpoint_seconds: float
    cloud_move_dollars: float


_OF_MARKETS = ("start", "preemption_seconds", "checkpoint_seconds", "cloud_move_dollars")


@checks
def simulate(
    trace: JobsTable,
    throughputs: ThroughputsTable,
    pool: Pool,
    *,
    jobs_per_hour: float | None = None,
    with_jobs: bool = True,
    with_spans: bool = False,
    progress: Callable[[int, float], None] | None = None,
    **options: Unpack[SimulationOptions],
) -> SimulationRun:
    """Simulate a cluster in virtual time; the same seed gives exactly the same results.

    Args:
        trace: Jobs, their DataFrame or file, or a kind of random trace: ``continuous-single``,
            ``continuous-multiple``, ``static-single`` or ``static-multiple``.
        throughputs: Throughputs, their DataFrame, or their file.
        pool: ``"36xV100,36xP100"``, ``{"V100": 36, "P100": 36}``, a ``Cluster``, or the ``Path`` of
            a cluster's file.
        jobs_per_hour: Load of a random trace.
        with_jobs: Whether to keep the outcome of every job.
        with_spans: Whether to keep which job held which devices when; takes longer.
        progress: Called with the number of completed jobs and the virtual seconds.
        options: See ``SimulationOptions``.

    Returns:
        The simulated run: its metrics and, if asked for, its jobs and spans.

    Raises:
        ProblemError: Options, jobs and pool do not fit together.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> jobs = hetflow.Jobs(jobs=(hetflow.Job(id="a", model="m", steps=7200),))
        >>> rates = hetflow.ModelThroughput(model="m", scale_factor=1, steps_per_second={"V100": 2})
        >>> run = hetflow.simulate(jobs, hetflow.Throughputs(models=(rates,)), "V100")
        >>> run.metrics.makespan_seconds
        3600.0
    """
    if not isinstance(trace, Path | str):
        trace = jobs_of(trace)
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


@checks
def sweep(
    trace: str,
    throughputs: ThroughputsTable,
    pool: Pool,
    *,
    loads: Sequence[float] = (),
    seeds: Count = 1,
    processes: Count = 1,
    **options: Unpack[SimulationOptions],
) -> Iterator[SimulationRun]:
    """Simulate random traces of several loads and seeds.

    Args:
        trace: A kind of random trace; see ``simulate``.
        throughputs: Throughputs, their DataFrame, or their file.
        pool: The devices, in any form that ``simulate`` takes.
        loads: Loads in jobs per hour.
        seeds: Number of seeds for each load, counted from the option ``seed``.
        processes: Number of processes that simulate at the same time.
        options: See ``SimulationOptions``.

    Returns:
        An iterator over the runs, in order of loads and then seeds.

    Raises:
        ProblemError: Options and pool do not fit together, or the trace is not a random one.
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


def _case(throughputs: ThroughputsTable, pool: Pool, options: SimulationOptions) -> Case:
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
        dollars_per_hour=devices.dollars_per_hour,
        **chosen,
    )


def _market(options: SimulationOptions, devices: Cluster) -> dict[str, Any]:
    """Return the fields of a case that describe its market; empty without a market."""
    if "market" not in options:
        for name in _OF_MARKETS:
            if options.get(name):
                raise ProblemError(f"{name} is for a market, and none is given")
        return {}
    from ..planning.market_prices import market_offers, markets_of

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
    """Return a case per load and seed of a random trace; only ``base`` if the trace is given."""
    kind = next((kind for kind in get_args(TraceKind) if trace == kind), None)
    if kind is None:
        if seeds > 1 or loads:
            raise ProblemError(
                f"{option('seeds')} and {option('jobs_per_hour')} are for drawn traces",
                hint="give a kind, not a file",
            )
        return [base]
    if kind.startswith("continuous") and not loads:
        raise ProblemError(f"a continuous trace needs {option('jobs_per_hour')}, in jobs per hour")
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
    """Read a trace as a stream of jobs, and the entities of its hierarchy."""
    if path.suffix == ".trace":
        from ..importers.gavel import read_gavel_trace

        return read_gavel_trace(path), ()  # a stream: it may be larger than memory
    if path.name.startswith("cluster_job_log"):
        from ..importers.philly import PhillyTrace

        return PhillyTrace(path, case.throughputs, next(iter(case.num_devices))), ()
    guess = nearest(str(path), KINDS)
    if guess is not None and not path.exists():
        raise ProblemError(f"{path}: no such file, and no kind to draw; did you mean {guess!r}?")
    found = read_jobs(path)
    return found.jobs, found.entities
