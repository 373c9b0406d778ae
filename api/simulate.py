"""``hetflow.simulate`` and ``hetflow.sweep``; ``hetflow cluster replay``.

A replay simulates a live cluster's jobs at their predicted speed, beside what happened.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ..clusters.mechanisms import easyscale, elastic
from ..clusters.mechanisms.allocators import always_pairs
from ..clusters.scheduler.history import JobHistory, LiveJob, history
from ..clusters.scheduler.store import ClusterStore
from ..clusters.simulator import cases
from ..clusters.simulator.arrivals import DrawOptions, TraceKind
from ..clusters.simulator.cases import Case, run_case
from ..clusters.simulator.market import MarketOptions
from ..clusters.simulator.metrics import Simulation
from ..formats.importers.recognise import read_jobs
from ..formats.importers.sacct import read_sacct
from ..planning.inputs import pool_of, spelled_as
from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.jobs import Entity, Job, Jobs
from ..schema.options import asked_of, option, told
from ..schema.requests.cluster import ReplayRequest
from ..schema.requests.simulate import Simulated, SimulateRequest, SweepRequest
from ..schema.simulation import JobOutcome, SimulationRun
from ..schema.spelling import nearest, whole_number
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


_log = logging.getLogger("hetflow")


def replay(request: ReplayRequest, state: Path) -> tuple[dict[str, Any], Simulation]:
    """Simulate the jobs of a live cluster, or of a Slurm cluster's log, and compare.

    Returns:
        What happened beside what was simulated, as a JSON document; and the simulation.

    Raises:
        ProblemError: The policy cannot be simulated, or an option is for a log and there is none.
        FileError: There is no such cluster, or the log has faults.
    """
    if request.sacct is None:
        if request.gpus is not None or request.rates:
            raise ProblemError(
                told("{gpus} and {rates} are for a log"), hint=f"add {option('sacct', 'FILE')}"
            )
        live = history(ClusterStore.open(state))
    else:
        live = _history_of_log(Path(request.sacct), request)
    policy = request.policy or live.policy
    if policy == elastic.NAME or easyscale.VARIANTS.find(policy) is not None:
        raise ProblemError(
            f"jobs with a range of devices are not simulated under {policy}",
            hint=f"name another policy with {option('policy')}: each job then holds the most of "
            "its range",
        )
    case = Case(
        throughputs=live.throughputs,
        num_devices=live.num_devices,
        dollars_per_hour=live.dollars_per_hour,
        entities=live.entities,
        policy=policy,
        round_seconds=live.round_seconds,
        reset_seconds=0.0,
        restart_seconds=request.restart_seconds,
        resize_seconds=request.resize_seconds,
        early_rounds=True,
    )
    run = run_case(case, [one.job for one in live.jobs])
    return _compared(live, {outcome.id: outcome for outcome in run.jobs}, policy), run


def _history_of_log(path: Path, request: ReplayRequest) -> JobHistory:
    """The jobs of ``sacct`` as a live cluster's; what a policy was to give them is not known."""
    log = read_sacct(path)
    jobs, throughputs = log.as_jobs(request.rates or {})
    pool = Cluster.parse(request.gpus).num_devices if request.gpus else log.num_devices
    if log.num_left_out:
        _log.info(f"{log.num_left_out} jobs left out: no GPU, or not over")
    return JobHistory(
        jobs=tuple(
            LiveJob(
                name=one.name,
                job=job,
                completion_seconds=one.end_seconds - one.submit_seconds,
                device_seconds=one.num_devices * one.run_seconds,
                target_seconds=None,
                num_leases=one.num_starts,
                num_resizes=None,
            )
            for one, job in zip(log.jobs, jobs.jobs, strict=True)
        ),
        throughputs=throughputs,
        num_devices=pool,
        policy=request.policy or "fifo",
        round_seconds=request.round_seconds,
    )


def _compared(live: JobHistory, found: dict[str, JobOutcome], policy: str) -> dict[str, Any]:
    """The document; what the pool cannot hold is not simulated, and left out of the averages."""
    jobs: list[dict[str, Any]] = [
        {
            "number": one.job.id if (number := whole_number(one.job.id)) is None else number,
            "name": one.name,
            "arrival_seconds": one.job.arrival_seconds,
            "completion_seconds": one.completion_seconds,
            "simulated_completion_seconds": outcome and outcome.completion_seconds,
            "device_seconds": one.device_seconds,
            "simulated_device_seconds": outcome and outcome.device_seconds,
            "target_device_seconds": one.target_seconds,
            "starts": one.num_leases,
            "resizes": one.num_resizes,
        }
        for one, outcome in ((one, found.get(one.job.id)) for one in live.jobs)
    ]
    ends_twice = ("completion_seconds", "simulated_completion_seconds")
    done = [row for row in jobs if all(row[name] is not None for name in ends_twice)]
    document: dict[str, Any] = {"policy": policy, "jobs": jobs, "num_done": len(done)}
    if done:
        for name in ("", "simulated_"):
            took = [row[f"{name}completion_seconds"] for row in done]
            ends = [row["arrival_seconds"] + one for row, one in zip(done, took, strict=True)]
            document[f"{name}average_jct_seconds"] = sum(took) / len(took)
            document[f"{name}makespan_seconds"] = max(ends)
    return document
