"""``hetflow.simulate`` and ``hetflow.sweep``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ..clusters.mechanisms.allocators import always_pairs
from ..clusters.simulator import cases
from ..clusters.simulator.arrivals import DrawOptions, TraceKind
from ..clusters.simulator.cases import Case
from ..clusters.simulator.market.many_jobs import MarketOptions
from ..formats.importers.jobs_files import read_jobs
from ..planning.inputs import pool_of, spelled_as
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.jobs import Entity, Job, Jobs
from ..schema.options import asked_of, option
from ..schema.requests.simulate import Simulated, SimulateRequest, SweepRequest
from ..schema.simulation import SimulationRun
from ..schema.spelling import nearest
from .calls import takes
from .files import jobs_of, throughputs_of

KINDS: tuple[str, ...] = get_args(TraceKind)


_OF_CASES = tuple(
    asked.name for asked in asked_of(Simulated) if asked.name in Case.__dataclass_fields__
    and asked.name not in ("trace", "throughputs", "scheduler", "market")
)  # fmt: skip
_OF_MARKETS = (
    "start",
    "preemption_seconds",
    "checkpoint_seconds",
    "cloud_move_dollars",
    "rent_policy",
)


@takes(SimulateRequest)
def simulate(request: SimulateRequest) -> SimulationRun:
    """Simulate a cluster in virtual time; the same seed gives exactly the same results.

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
    trace = request.trace if isinstance(request.trace, Path | str) else jobs_of(request.trace)
    loads = () if request.jobs_per_hour is None else (request.jobs_per_hour,)
    (case,) = _drawn(_case(request), trace, 1, loads, request.num_jobs)
    case = replace(case, records_spans=request.with_spans)
    if isinstance(trace, Jobs):
        jobs: Iterable[Job] | None = trace.jobs
        case, name = replace(case, entities=trace.entities), "jobs"
    else:
        name, jobs = str(trace), None
        if case.trace is None:
            jobs, entities = _read(Path(trace), case)
            case = replace(case, entities=entities)
    run = cases.run_case(case, jobs, request.progress)
    return cases.report(case, run, name, with_jobs=request.with_jobs)


@takes(SweepRequest)
def sweep(request: SweepRequest) -> Iterator[SimulationRun]:
    """Simulate random traces of several loads and seeds.

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
    drawn = _drawn(_case(request), request.trace, request.seeds, request.loads, request.num_jobs)
    if drawn[0].trace is None:
        raise ProblemError(f"only drawn traces are swept, {request.trace!r} is no kind to draw")
    return cases.sweep(drawn, request.processes)


def _case(asked: Simulated) -> Case:
    needs_pairs = asked.space_sharing or always_pairs(asked.policy)
    table = throughputs_of(asked.throughputs, pairs=needs_pairs)
    devices = spelled_as(pool_of(asked.pool), table)
    chosen: dict[str, Any] = {name: getattr(asked, name) for name in _OF_CASES}
    if asked.scheduler is not None:
        chosen["scheduler"] = asked.scheduler
    return Case(
        throughputs=table,
        num_devices=devices.num_devices,
        servers=devices.sizes,
        server_numbers=devices.server_numbers,
        dollars_per_hour=devices.dollars_per_hour,
        **_market(asked, devices) | chosen,
    )


def _market(asked: Simulated, devices: Cluster) -> dict[str, Any]:
    """Return the fields of a case that describe its market; empty without a market."""
    if asked.market is None:
        for name in _OF_MARKETS:
            if getattr(asked, name):
                raise ProblemError(f"{option(name)} is for a market, and none is given")
        return {}
    from ..planning.market_prices import market_offers
    from .files import markets_of

    prices, is_told = market_offers(markets_of(asked.market), devices.num_devices, asked.start)
    told = MarketOptions(
        restart_seconds=asked.restart_seconds,
        cloud_move_dollars=asked.cloud_move_dollars,
        preemption_seconds=asked.preemption_seconds,
        checkpoint_seconds=asked.checkpoint_seconds,
        seed=asked.seed,
        is_told=is_told,
        policy=asked.rent_policy,
    )
    return {"scheduler": "market", "market": prices, "market_options": told}


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
            trace=DrawOptions(
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
        from ..formats.importers.gavel import read_gavel_trace

        return read_gavel_trace(path), ()  # a stream: it may be larger than memory
    if path.name.startswith("cluster_job_log"):
        from ..formats.importers.philly import PhillyTrace

        return PhillyTrace(path, case.throughputs, next(iter(case.num_devices))), ()
    guess = nearest(str(path), KINDS)
    if guess is not None and not path.exists():
        raise ProblemError(f"{path}: no such file, and no kind to draw; did you mean {guess!r}?")
    found = read_jobs(path)
    return found.jobs, found.entities
