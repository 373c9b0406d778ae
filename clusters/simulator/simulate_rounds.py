"""Choose the implementation of rounds for a run: plain, compiled, or with pairs and mixes."""

from collections.abc import Callable, Iterable

from ...schema.errors import ProblemError
from ...schema.jobs import Job
from ...solvers.compiling import can_compile
from ..mechanisms.allocators import Allocator
from ..mechanisms.cluster.pool import ClusterPool
from .arrivals import Queue
from .metrics import Simulation
from .rounds import CombinedRounds, RoundOptions, Rounds


def simulate_rounds(
    jobs: Iterable[Job],
    pool: ClusterPool,
    allocator: Allocator,
    options: RoundOptions | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run jobs to their end.

    Args:
        jobs: In order of arrival; may be a stream.
        pool: Devices and throughputs.
        allocator: The policy.
        options: The mechanism's.
        on_progress: Called now and then with jobs done and the time in seconds.

    Raises:
        ProblemError: The trace makes no sense.
        InfeasibleError: No job fits the pool, or devices fail so often that no job ends.
    """
    options = options or RoundOptions()
    if options.servers is not None and pool.uses_mixes:
        raise ProblemError("mixes of device types are not placed on servers; give a flat pool")
    if pool.consolidated is not None and (options.servers is None or allocator.shares_space):
        raise ProblemError("placement counts where jobs run alone on several servers")
    cluster = _kind(pool, allocator, options)(Queue(jobs, pool), pool, allocator, options)
    while cluster.step():
        if on_progress is not None:
            on_progress(cluster.num_done, cluster.now)
    cluster.settle()
    return cluster.result()


def _kind(pool: ClusterPool, allocator: Allocator, options: RoundOptions) -> type[Rounds]:
    if allocator.shares_space or len(pool.columns) > len(pool.types):
        return CombinedRounds
    if can_compile() and options.is_plain:
        from .compiled_rounds import CompiledRounds

        return CompiledRounds
    return Rounds
