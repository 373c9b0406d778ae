"""``hetflow.allocate``."""

from typing import TYPE_CHECKING

from ..planning.allocate import allocate as allocate_problem
from ..planning.allocate import allocation_problem
from ..planning.inputs import Pool, pool_of
from ..schema.jobs import Allocation, Placement
from ..schema.records import Dollars
from .files import JobsTable, ThroughputsTable, jobs_of, throughputs_of
from .naming import names_arguments

if TYPE_CHECKING:
    from ..planning.market_prices import Markets


@names_arguments(gpus="pool", cluster="pool", budget="budget_dollars")
def allocate(
    jobs: JobsTable,
    throughputs: ThroughputsTable,
    pool: Pool,
    *,
    policy: str = "las",
    space_sharing: bool = False,
    agnostic: bool = False,
    placement: Placement = "consolidated",
    budget_dollars: Dollars | None = None,
    fill: bool = True,
    market: "Markets | None" = None,
    at: str | None = None,
) -> Allocation:
    """Share a pool among jobs according to a policy (thesis 5.3); the allocation carries its proof.

    Args:
        jobs: Jobs, their DataFrame, or their file (hetflow.jobs/1, .csv, or a Gavel .trace).
        throughputs: Throughputs, their DataFrame, or their file (hetflow.throughputs/1, .csv, or
            Gavel's table).
        pool: ``"36xV100,36xP100"``, ``{"V100": 36, "P100": 36}``, a ``Cluster``, or the ``Path`` of
            a cluster's file.
        policy: Name of the policy (docs/policies.md).
        space_sharing: Whether pairs of jobs may share devices.
        agnostic: Whether to ignore differences between device types.
        placement: Which throughputs of jobs with several devices count: with the devices on one
            server (``consolidated``), on several (``unconsolidated``), or both (``mixed``).
        budget_dollars: The budget of the policy ``makespan_budget`` (thesis 6.4.3).
        fill: Whether to share out the devices that a max-min policy's optimum leaves idle,
            lexicographically.
        market: Markets, or their files. The cost policies use their cheapest price of each type.
        at: The time of those prices, such as ``2020-03-07T00:00:00Z``; None takes the last known.

    Returns:
        The time fractions of each job on each device type, with a certificate of their optimality.

    Raises:
        ProblemError: There is no such policy, the jobs do not fit the pool, or a device type has
            no price in the market.
        InfeasibleError: No allocation satisfies the policy's constraints.
        FileError: A file is missing or has faults.
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
    devices = pool_of(pool)
    if market is not None or at is not None:
        from ..planning.market_prices import priced_by

        devices = priced_by(devices, market, at)
    problem = allocation_problem(
        jobs_of(jobs),
        throughputs_of(throughputs, pairs=space_sharing),
        devices,
        heterogeneity="agnostic" if agnostic else "aware",
        space_sharing=space_sharing,
        placement=placement,
        budget_dollars=budget_dollars,
    )
    return allocate_problem(problem, policy, fills=fill)
