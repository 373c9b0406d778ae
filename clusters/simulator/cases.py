"""One run from its description, and many of them in parallel processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...schema.errors import BackendError, ProblemError
from ...schema.jobs import Entity, Job, Throughputs, consolidated_devices
from ...schema.market import utc_text
from ...schema.options import option
from ...schema.plugins import Registry
from ...schema.simulation import SimulationRun
from ...schema.spelling import did_you_mean
from ...solvers.compiling import can_compile
from ...solvers.market.offers import Prices
from ..mechanisms.allocators import Allocator, allocator_named, always_pairs
from ..mechanisms.easyscale import Variant
from ..mechanisms.pool import ClusterPool
from ..mechanisms.seats import DeviceLayout
from .arrivals import DrawOptions, Queue, draw_jobs
from .events import FairShareOptions, ProposalOptions, simulate_fair_share, simulate_proposals
from .failures import FailureOptions
from .market import MarketOptions, simulate_market
from .metrics import Simulation, summarise
from .rounds import CombinedRounds, RoundOptions, Rounds

Progress = Callable[[int, float], None] | None
Run = Callable[["Case", Iterable[Job], ClusterPool, Progress], Simulation]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedScheduler:
    """What shares a cluster over time.

    ``run`` simulates a case. ``is_in_rounds``: it follows a policy, and pairs of jobs may share
    devices. ``resizes``: a job may change its devices at another cost than a restart's.
    ``knows_servers``: it places jobs on servers; else the pool counts as one.
    """

    run: Run
    is_in_rounds: bool = False
    resizes: bool = True
    knows_servers: bool = True


SCHEDULERS: Registry[SimulatedScheduler] = Registry(
    "scheduler",
    group="hetflow.schedulers",
    own=(__name__, "hetflow.papers.gavel.published_rounds", "hetflow.papers.easyscale.schedulers"),
)
MARKET = "market"  # the scheduler of machines to rent; needs a market


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to simulate. ``trace`` is a recipe, or None where jobs are given to ``run_case``.

    ``policy`` counts for rounds only. ``window`` keeps the metrics to the jobs from one place
    in the trace up to another (the thesis: 4,000 to 5,000). ``optimum`` says which of several
    optima LAS takes: ``centre``, inside the optimal face, or ``vertex``, by a warm simplex (fast).
    ``space_sharing`` lets pairs of jobs share devices, in rounds. ``servers`` are the devices of
    each type on each server [types][servers]; None is one server that holds them all;
    ``server_numbers`` [types][servers] says which of these are one server, none by default. With
    ``placement`` mixed policies see unconsolidated devices as columns of their own. Mixes of
    device types among the throughputs count under ``rounds``. ``resize_seconds`` (None: as
    ``restart_seconds``) is what a job loses that goes over to other devices of its server.
    ``early_rounds`` ends a round of ``rounds`` as soon as nobody holds a device. ``entities`` are
    the tree of the hierarchical policy. ``market`` are the offers under the scheduler ``market``,
    from the run's start on, and ``market_options`` what moving among them costs.
    """

    throughputs: Throughputs
    num_devices: dict[str, int]
    dollars_per_hour: dict[str, float] = field(default_factory=dict)
    trace: DrawOptions | None = None
    scheduler: str = "rounds"
    policy: str = "las"
    agnostic: bool = False
    space_sharing: bool = False
    servers: tuple[tuple[int, ...], ...] | None = None
    placement: Literal["consolidated", "mixed"] = "consolidated"
    optimum: Literal["centre", "vertex"] = "vertex"
    selection: Literal["by_type", "joint"] = "by_type"
    round_seconds: float = 360.0
    reset_seconds: float = 1920.0
    restart_seconds: float = 0.0
    resize_seconds: float | None = None
    early_rounds: bool = False
    server_numbers: tuple[tuple[int, ...], ...] | None = None
    failure_seconds: float | None = None
    server_failure_seconds: float | None = None
    repair_seconds: float = 3600.0
    seed: int = 0
    window: tuple[int, int] | None = None
    entities: tuple[Entity, ...] = ()
    records_spans: bool = False
    market: Prices | None = None
    market_options: MarketOptions = field(default_factory=MarketOptions)

    def __post_init__(self) -> None:
        if self.scheduler != MARKET and SCHEDULERS.find(self.scheduler) is None:
            known = (*SCHEDULERS.names(), MARKET)
            fix = did_you_mean(self.scheduler, known, f"known: {', '.join(known)}")
            raise ProblemError(f"no scheduler {self.scheduler!r}; {fix}")
        if self.space_sharing and not self.mechanism.is_in_rounds:
            raise ProblemError(
                f"space sharing is for rounds, {self.scheduler} runs every job on its own devices; "
                "leave one of them out"
            )
        if (self.scheduler == MARKET) != (self.market is not None):
            raise ProblemError(
                "a market is simulated by the scheduler market, which needs one",
                hint=f"add {option('market', 'FILE')}, and leave {option('scheduler')} out",
            )
        self._refuse_what_goes_unheard()
        if self.failures is None:
            FailureOptions(mean_seconds=1.0, repair_seconds=self.repair_seconds)
        if self.server_failure_seconds is not None and (
            self.servers is None or not self.mechanism.knows_servers
        ):
            raise ProblemError(
                "servers fail where there are several, and not under published-rounds, which "
                "knows none; give servers, such as 9x(4xv100)"
            )
        if self.placement == "mixed" and (
            self.servers is None or self.scheduler != "rounds" or self.space_sharing
        ):
            raise ProblemError(
                "placement mixed is for `rounds` on several servers, without space sharing; give "
                "servers, such as 9x(4xv100)"
            )

    @property
    def mechanism(self) -> SimulatedScheduler:
        """What shares the cluster."""
        return _RENTING if self.scheduler == MARKET else SCHEDULERS.get(self.scheduler)

    @property
    def moving_seconds(self) -> float:
        """What a job loses that goes over to other devices of its server."""
        return self.restart_seconds if self.resize_seconds is None else self.resize_seconds

    @property
    def layout(self) -> DeviceLayout | None:
        """The servers that devices are on; None for a flat pool, or a mechanism that knows none."""
        if self.servers is None or not self.mechanism.knows_servers:
            return None
        layout = DeviceLayout.apart(self.servers)
        if self.server_numbers is None:
            return layout
        return replace(layout, servers=self.server_numbers)

    @property
    def failures(self) -> FailureOptions | None:
        """When devices and servers fail, drawn from the case's seed; None where they never do."""
        if self.failure_seconds is None and self.server_failure_seconds is None:
            return None
        return FailureOptions(
            mean_seconds=self.failure_seconds, server_mean_seconds=self.server_failure_seconds,
            repair_seconds=self.repair_seconds, seed=self.seed, layout=self.layout,
        )  # fmt: skip

    def _refuse_what_goes_unheard(self) -> None:
        """Refuse options, such as a policy, that the chosen scheduler would ignore."""
        fails = self.failure_seconds is not None or self.server_failure_seconds is not None
        if self.market is not None and fails:
            raise ProblemError(
                "machines of a market do not fail, they are taken away",
                hint=f"give {option('preemption_hours')} instead of failures",
            )
        if self.resize_seconds is not None and not self.mechanism.resizes:
            raise ProblemError(
                f"{option('resize_seconds', format(self.resize_seconds, 'g'))}: "
                f"{self.scheduler} resizes no job",
                hint=f"leave it out; {option('restart_seconds')} is what a start there costs",
            )
        if self.early_rounds and self.scheduler != "rounds":
            raise ProblemError(
                f"{option('early_rounds')} is for the scheduler rounds, {self.scheduler} "
                "would ignore it; "
                "leave it out"
            )
        if self.mechanism.is_in_rounds:
            return
        unheard = {f"policy {self.policy}": self.policy != "las", "agnostic": self.agnostic}
        for what, is_given in unheard.items():
            if is_given:
                raise ProblemError(
                    f"{what}: is for rounds only, {self.scheduler} would ignore it; leave it out"
                )


def run_case(
    case: Case,
    jobs: Iterable[Job] | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run a case; the same case gives the same result to the last digit.

    Raises:
        ProblemError: The trace or the case makes no sense.
    """
    if jobs is None:
        if case.trace is None:
            raise ProblemError("a case needs a trace: jobs, or a recipe to draw them")
        jobs = draw_jobs(case.trace, case.throughputs)
    mixed = case.placement == "mixed" and case.servers is not None
    pool = ClusterPool(
        throughputs=case.throughputs,
        num_devices=case.num_devices,
        dollars_per_hour=case.dollars_per_hour,
        uses_mixes=case.scheduler == "rounds" and bool(case.throughputs.mixes),
        consolidated=consolidated_devices(case.throughputs, case.servers or ()) if mixed else None,
    )
    return case.mechanism.run(case, jobs, pool, on_progress)


def _on_a_market(case: Case, jobs: Iterable[Job], pool: ClusterPool, told: Progress) -> Simulation:
    assert case.market is not None
    return simulate_market(jobs, pool, case.market, case.market_options, told)


_RENTING = SimulatedScheduler(run=_on_a_market, resizes=False)


def _events(case: Case) -> dict[str, Any]:
    """What a case says to the schedulers that act at events: costs of changes, failures, spans."""
    return {
        "resize_seconds": case.moving_seconds,
        "restart_seconds": case.restart_seconds,
        "failures": case.failures,
        "layout": case.layout,
        "records_spans": case.records_spans,
    }


def by_proposals(
    variant: Variant | None = None,
    simulate: Callable[
        [Iterable[Job], ClusterPool, ProposalOptions, Progress], Simulation
    ] = simulate_proposals,
) -> Run:
    """How one of EasyScale's schedulers runs a case, or what ``simulate`` does instead of it."""
    return lambda case, jobs, pool, told: simulate(
        jobs, pool, ProposalOptions(variant=variant or Variant(), **_events(case)), told
    )


def _by_fair_share(scheduler: Literal["elastic", "static_priority"]) -> Run:
    return lambda case, jobs, pool, told: simulate_fair_share(
        jobs, pool, FairShareOptions(scheduler=scheduler, **_events(case)), told
    )


def allocator_of(
    case: Case, pool: ClusterPool, *, blind: bool = False, warm: bool = True
) -> Allocator:
    """The case's policy; for ``blind`` and ``warm`` see ``allocator_named``.

    Raises:
        ProblemError: There is no such policy, or it needs throughputs of pairs that there are not.
    """
    if (case.space_sharing or always_pairs(case.policy)) and not pool.has_pairs():
        raise ProblemError("space sharing needs throughputs of pairs, and the file has none")
    return allocator_named(
        case.policy,
        agnostic=case.agnostic,
        warm=warm,
        columns=len(pool.columns) > len(pool.types),
        blind=blind,
        shares_space=case.space_sharing,
        seed=case.seed,
        entities=case.entities,
    )


def round_options(case: Case, allocator: Allocator) -> RoundOptions:
    """How the case's rounds run."""
    return RoundOptions(
        round_seconds=case.round_seconds,
        reset_seconds=case.reset_seconds,
        restart_seconds=case.restart_seconds,
        resize_seconds=case.resize_seconds,
        ends_early=case.early_rounds,
        failures=case.failures,
        fills_idle=not allocator.leaves_idle,
        records_spans=case.records_spans,
        layout=case.layout,
        servers=case.servers,
        selection=case.selection,
        seed=case.seed,
    )


def _in_rounds(case: Case, jobs: Iterable[Job], pool: ClusterPool, told: Progress) -> Simulation:
    allocator = allocator_of(case, pool, warm=case.optimum == "vertex")
    return simulate_rounds(jobs, pool, allocator, round_options(case, allocator), told)


for _name, _scheduler in {
    "rounds": SimulatedScheduler(run=_in_rounds, is_in_rounds=True),
    "elastic": SimulatedScheduler(run=_by_fair_share("elastic")),
    "static-priority": SimulatedScheduler(run=_by_fair_share("static_priority"), resizes=False),
    "easyscale": SimulatedScheduler(run=by_proposals()),
}.items():
    SCHEDULERS.add(_name, _scheduler, __name__)


def report(case: Case, run: Simulation, trace: str, *, with_jobs: bool = False) -> SimulationRun:
    """A run as a record, its metrics over the case's window."""
    kept = run.jobs
    if case.window is not None:
        arrived = sorted(run.jobs, key=lambda job: job.arrival_seconds)
        kept = tuple(arrived[case.window[0] : case.window[1]])
    return SimulationRun(
        trace=trace,
        scheduler=case.scheduler,
        policy=case.policy if case.mechanism.is_in_rounds else None,
        heterogeneity="agnostic" if case.agnostic else "aware",
        space_sharing=case.space_sharing,
        num_devices=dict(case.num_devices),
        seed=case.seed,
        jobs_per_hour=None if case.trace is None else case.trace.jobs_per_hour,
        market_start=None if case.market is None else utc_text(float(case.market.edges[0])),
        num_rounds=run.num_rounds,
        num_allocations=run.num_allocations,
        num_failures=run.num_failures,
        num_server_failures=run.num_server_failures,
        left_out=run.left_out,
        metrics=summarise(run, kept),
        jobs=run.jobs if with_jobs else (),
        spans=run.spans,
    )


def sweep(cases: Sequence[Case], processes: int = 1) -> Iterator[SimulationRun]:
    """Run cases that draw their own traces, in order, in parallel processes where asked.

    No process is left behind when it is interrupted or killed.

    Raises:
        BackendError: A process died, perhaps for lack of memory.
    """
    if processes <= 1 or len(cases) == 1:
        yield from map(_reported, cases)
        return
    number, before = min(processes, len(cases)), multiprocessing.active_children()
    executor: ProcessPoolExecutor | None = None
    try:
        with _later_interrupts():
            executor = ProcessPoolExecutor(number, initializer=_die_with_parent)
            futures = [executor.submit(_reported, case) for case in cases]
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        raise BackendError(
            "a process of the sweep died, perhaps for lack of memory; use fewer processes"
        ) from None
    except BaseException:
        for child in multiprocessing.active_children():
            if child not in before:
                child.terminate()
        raise
    finally:
        if executor is not None:
            executor.shutdown(cancel_futures=True)


@contextmanager
def _later_interrupts() -> Iterator[None]:
    """Delay ctrl-C while an executor starts: in the middle of its start it cannot be shut down."""
    # Processes that are started meanwhile ignore it; their parent ends them. Blocking the signal
    # in this thread is not enough: a thread of a library (numpy's) may take it instead, and Python
    # then interrupts the main thread all the same.
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts only the main thread
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


def _die_with_parent() -> None:
    """End this process when its parent has ended, since nobody would read its results."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _reported(case: Case) -> SimulationRun:
    recipe: Any = case.trace
    return report(case, run_case(case), recipe.kind)


def simulate_rounds(
    jobs: Iterable[Job],
    pool: ClusterPool,
    allocator: Allocator,
    options: RoundOptions | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run jobs to their end.

    Raises:
        ProblemError: The trace makes no sense.
        InfeasibleError: No job fits the pool, or devices fail so often that no job ends.
    """
    options = options or RoundOptions()
    if options.servers is not None and pool.uses_mixes:
        raise ProblemError("mixes of device types are not placed on servers; give a flat pool")
    if pool.consolidated is not None and (options.servers is None or allocator.shares_space):
        raise ProblemError("placement counts where jobs run alone on several servers")
    cluster = _kind_of_rounds(pool, allocator, options)(Queue(jobs, pool), pool, allocator, options)
    while cluster.step():
        if on_progress is not None:
            on_progress(cluster.num_done, cluster.now)
    cluster.settle()
    return cluster.result()


def _kind_of_rounds(pool: ClusterPool, allocator: Allocator, options: RoundOptions) -> type[Rounds]:
    if allocator.shares_space or len(pool.columns) > len(pool.types):
        return CombinedRounds
    if can_compile() and options.is_plain:
        from .compiled_rounds import CompiledRounds

        return CompiledRounds
    return Rounds
