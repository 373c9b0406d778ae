"""``hetflow.check``."""

from pathlib import Path

from ..planning.inputs import (
    pool_of,
    profiles_of,
    types_of,
    under_todays_names,
)
from ..planning.judging import faults_of_plan
from ..schema.choices import Placement
from ..schema.errors import ProblemError
from ..schema.files import Plan
from ..schema.jobs import Allocation
from ..schema.optimizer import OptimizerState, named_optimizer
from ..schema.options import options
from ..schema.records import Bytes, Dollars, PositiveRate
from ..schema.requests.kinds import JobsTable, Markets, Pool, Profiles, ThroughputsTable
from .calls import checks
from .files import claim_of, jobs_of, throughputs_of


@checks
def check(
    claim: Plan | Allocation | Path | str,
    profiles: Profiles | None = None,
    pool: Pool | None = None,
    *,
    model: str | None = None,
    link_bytes_per_second: PositiveRate | None = None,
    optimizer: OptimizerState | str | None = None,
    memory_reserve_bytes: Bytes | None = None,
    jobs: JobsTable | None = None,
    throughputs: ThroughputsTable | None = None,
    space_sharing: bool | None = None,
    placement: Placement | None = None,
    budget_dollars: Dollars | None = None,
    market: Markets | None = None,
    at: str | None = None,
) -> list[str]:
    """Check a plan or an allocation with code that is independent of the solvers.

    Plans and allocations state the options that they were made with. An option that is given here
    takes precedence.

    Args:
        claim: A plan or an allocation, or its file.
        profiles: For a plan: its profiles, or their folder. None checks only whether the plan's own
            values agree with each other; this works for split plans only.
        pool: The devices. None takes the pool that a plan states, else the devices that it uses; an
            allocation needs a pool.
        model: For a plan: the profiles' model, if it has another name in the plan.
        link_bytes_per_second: For a pipeline: bandwidth of links that the pool does not state.
        optimizer: For a plan: the optimizer that will train, by name or by its state.
        memory_reserve_bytes: For a plan: bytes of each device that must stay free; None takes the
            plan's.
        jobs: For an allocation: its jobs, their DataFrame or file.
        throughputs: For an allocation: its throughputs, their DataFrame or file.
        space_sharing: For an allocation: whether pairs of jobs may share devices.
        placement: For an allocation: which throughputs count (see ``allocate``).
        budget_dollars: For an allocation: its budget.
        market: For an allocation: the markets whose prices it was made with, or their files.
        at: For an allocation: the time of those prices; None takes the last known.

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
    claim = claim_of(claim)
    devices = None if pool is None else pool_of(pool)
    if not isinstance(claim, Allocation):
        found = None
        if profiles is not None:
            types = types_of(claim)
            found = under_todays_names(profiles_of(profiles, model or claim.model), types)
        asked = named_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
        return faults_of_plan(
            claim, found, devices, link_bytes_per_second, asked, memory_reserve_bytes
        )
    if jobs is None or throughputs is None or devices is None:
        raise ProblemError(
            "an allocation is judged against its jobs, throughputs and pool",
            hint=f"add {options(jobs='FILE', throughputs='FILE', pool='SPEC')}",
        )
    from ..checks.allocation import check as faults_of
    from ..planning.allocate import allocation_problem
    from ..planning.market_prices import priced_by

    shares = claim.space_sharing if space_sharing is None else space_sharing
    problem = allocation_problem(
        jobs_of(jobs),
        throughputs_of(throughputs, pairs=shares or False),
        priced_by(devices, market, at),
        heterogeneity=claim.heterogeneity,
        space_sharing=shares or False,
        placement=placement or claim.placement or "consolidated",
        budget_dollars=claim.budget_dollars if budget_dollars is None else budget_dollars,
    )
    return faults_of(claim, problem)
