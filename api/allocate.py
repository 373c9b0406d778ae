"""``hetflow.allocate``."""

from ..planning.allocate import allocate as allocate_problem
from ..planning.allocate import allocation_problem
from ..planning.inputs import pool_of
from ..planning.limits import SolveLimits, TimeShares
from ..schema.jobs import Allocation
from ..schema.requests.allocate import AllocateRequest
from .calls import takes
from .files import jobs_of, priced_pool, throughputs_of


@takes(AllocateRequest)
def allocate(request: AllocateRequest) -> Allocation:
    """Share a pool among jobs according to a policy (thesis 5.3); the allocation carries its proof.

    Returns:
        The time fractions of each job on each device type, with a certificate of their optimality.

    Raises:
        ProblemError: There is no such policy, the jobs do not fit the pool, or a device type has
            no price in the market.
        InfeasibleError: No allocation satisfies the policy's constraints.
        FileError: A file is missing or has faults.
        TooLittleTimeError: The limit of time came before there was an allocation.
        BackendError: The solver's allocation fails its check, which is a bug.

    Example:
        >>> import hetflow
        >>> jobs = hetflow.Jobs(
        ...     jobs=(
        ...         hetflow.Job(id="a", model="m", steps=100),
        ...         hetflow.Job(id="b", model="m", steps=100),
        ...     )
        ... )
        >>> rates = hetflow.ModelThroughput(model="m", scale_factor=1, steps_per_second={"V100": 2})
        >>> shares = hetflow.allocate(jobs, hetflow.Throughputs(models=(rates,)), "V100")
        >>> {job: round(row["V100"], 6) for job, row in shares.x.items()}
        {'a': 0.5, 'b': 0.5}
    """
    clock = TimeShares(SolveLimits(time_limit_seconds=request.time_limit_seconds))
    devices, _ = priced_pool(pool_of(request.pool), request.market, request.at)
    problem = allocation_problem(
        jobs_of(request.jobs),
        throughputs_of(request.throughputs, pairs=request.space_sharing),
        devices,
        heterogeneity="agnostic" if request.agnostic else "aware",
        space_sharing=request.space_sharing,
        placement=request.placement,
        budget_dollars=request.budget_dollars,
    )
    return allocate_problem(problem, request.policy, fills=request.fill, clock=clock)
