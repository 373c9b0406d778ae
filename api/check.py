"""``hetflow.check``."""

from ..planning.inputs import pool_of, profiles_of, under_todays_names
from ..planning.judging import faults_of_plan
from ..schema.errors import ProblemError
from ..schema.jobs import Allocation
from ..schema.optimizer import named_optimizer
from ..schema.options import options
from ..schema.requests.solve import CheckRequest
from .calls import takes
from .files import claim_of, jobs_of, priced_pool, throughputs_of


@takes(CheckRequest)
def check(request: CheckRequest) -> list[str]:
    """Check a plan or an allocation with code that is independent of the solvers.

    Plans and allocations state the options that they were made with. An option that is given here
    takes precedence.

    Returns:
        One sentence per fault; empty if the plan or allocation is valid.

    Raises:
        ProblemError: Something that the check needs is missing, or does not fit the claim.
        FileError: A file is missing or has faults, or holds neither a plan nor an allocation.

    Example:
        >>> import hetflow
        >>> jobs = hetflow.Jobs(jobs=(hetflow.Job(id="a", model="m", steps=100),))
        >>> rates = hetflow.ModelThroughput(model="m", scale_factor=1, steps_per_second={"V100": 2})
        >>> throughputs = hetflow.Throughputs(models=(rates,))
        >>> allocation = hetflow.allocate(jobs, throughputs, "V100")
        >>> hetflow.check(allocation, pool="V100", jobs=jobs, throughputs=throughputs)
        []
    """
    claim = claim_of(request.claim)
    devices = None if request.pool is None else pool_of(request.pool)
    if not isinstance(claim, Allocation):
        found = None
        if request.profiles is not None:
            types = tuple(claim.devices_by_type)
            found = under_todays_names(
                profiles_of(request.profiles, request.model or claim.model), types
            )
        trains = request.optimizer
        asked = named_optimizer(trains) if isinstance(trains, str) else trains
        return faults_of_plan(
            claim,
            found,
            devices,
            request.link_bytes_per_second,
            asked,
            request.memory_reserve_bytes,
        )
    if request.jobs is None or request.throughputs is None or devices is None:
        raise ProblemError(
            "an allocation is judged against its jobs, throughputs and pool",
            hint=f"add {options(jobs='FILE', throughputs='FILE', pool='SPEC')}",
        )
    from ..planning.allocate import allocation_problem
    from ..planning.checks.allocation import check as faults_of

    shares = claim.space_sharing if request.space_sharing is None else request.space_sharing
    problem = allocation_problem(
        jobs_of(request.jobs),
        throughputs_of(request.throughputs, pairs=shares or False),
        priced_pool(devices, request.market, request.at)[0],
        heterogeneity=claim.heterogeneity,
        space_sharing=shares or False,
        placement=request.placement or claim.placement or "consolidated",
        budget_dollars=claim.budget_dollars
        if request.budget_dollars is None
        else request.budget_dollars,
    )
    return faults_of(claim, problem)
