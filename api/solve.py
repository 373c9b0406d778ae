"""``hetflow.solve`` and ``hetflow.check``."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ..planning.inputs import pool_of, profiles_of, under_todays_names
from ..planning.judging import faults_of_plan
from ..planning.limits import SolveLimits, TimeShares
from ..planning.request import question_of
from ..planning.solve import solve as best_plan
from ..schema.errors import ProblemError
from ..schema.optimizer import named_optimizer
from ..schema.options import options
from ..schema.plan import Plan
from ..schema.requests.solve import CheckRequest, SolveRequest
from .calls import takes
from .files import claim_of, jobs_of, priced_pool, throughputs_of

if TYPE_CHECKING:
    from ..planning.market_prices import DevicePrice


@takes(SolveRequest)
def solve(request: SolveRequest) -> Plan:
    """Find the best plan for a model on a pool; the plan carries its proof and has been checked.

    An option that no kind of plan in question reads is refused, also if it is given the value that
    it has by default.

    Returns:
        A plan that ``hetflow.check`` accepts for these profiles and this pool.

    Raises:
        ProblemError: Profiles, pool and options do not fit together, or a device type of the pool
            has no price in the market.
        InfeasibleError: No plan exists; the message says what to relax.
        FileError: A file is missing or has faults.
        BackendError: A solver's plan fails its check, which is a bug.

    Example:
        >>> import hetflow
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=1 << 30)
        >>> v100 = hetflow.Profile(
        ...     model="m", device_type="V100", device_memory_bytes=16 << 30,
        ...     weight_bytes=4, update_seconds=0.0, batch_curve=(point,),
        ... )
        >>> plan = hetflow.solve([v100], "V100", batch_size=16)
        >>> plan.groups[0].virtual_nodes, plan.predicted.step_seconds, plan.proof.gap
        (2, 0.2, 0.0)
    """
    clock = TimeShares(SolveLimits(request.time_limit_seconds, request.gap))
    pool = pool_of(request.pool)
    offers: dict[str, DevicePrice] = {}
    if request.market is not None or request.at is not None or request.spot is not None:
        from .files import priced_pool

        pool, offers = priced_pool(pool, request.market, request.at, spot=request.spot)
    plan = best_plan(question_of(request, pool), clock)
    if not offers:
        return plan
    prices = {
        name: {"dollars_per_hour": one.dollars_per_hour, "machine": one.title}
        for name, one in offers.items()
    }
    return replace(plan, provenance={**(plan.provenance or {}), "prices": prices})


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
    if isinstance(claim, Plan):
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
