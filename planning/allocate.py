"""Build an allocation problem from jobs, throughputs and a pool, and solve it with a check."""

from dataclasses import replace
from typing import Literal

from ..schema.cluster import Cluster
from ..schema.errors import BackendError, TooLittleTimeError
from ..schema.jobs import Allocation, AllocationProblem, Jobs, Throughputs, consolidated_devices
from ..schema.options import Placement, option
from ..solvers.effort import OutOfTimeError, never
from .checks.allocation import check
from .inputs import spelled_as
from .limits import TimeShares


def allocation_problem(
    jobs: Jobs,
    throughputs: Throughputs,
    pool: Cluster,
    *,
    heterogeneity: Literal["aware", "agnostic"] = "aware",
    space_sharing: bool = False,
    placement: Placement = "consolidated",
    budget_dollars: float | None = None,
) -> AllocationProblem:
    """Build the problem of sharing a pool among jobs (thesis 5.3).

    Args:
        jobs: The jobs that share the pool.
        throughputs: Steps per second of the jobs' models on each device type.
        pool: The devices, with dollars per hour if the policy needs prices.
        heterogeneity: ``aware`` uses each device type's own throughputs; ``agnostic`` gives a job
            one throughput on all types.
        space_sharing: Whether pairs of jobs may share devices.
        placement: Which throughputs of jobs with several devices count: with the devices on one
            server (``consolidated``), on several (``unconsolidated``), or both (``mixed``).
        budget_dollars: The budget of the policy ``makespan_budget`` (thesis 6.4.3).

    Raises:
        ProblemError: Jobs or throughputs do not fit the pool.
    """
    pool = spelled_as(pool, throughputs)
    together: dict[str, int] = {}
    if placement == "mixed" and pool.sizes is not None:
        limits = consolidated_devices(throughputs, pool.sizes)
        together = dict(zip(pool.num_devices, limits, strict=True))
    prices = {n: t.dollars_per_hour for n, t in pool.device_types.items() if t.dollars_per_hour}
    return AllocationProblem(
        jobs=jobs,
        throughputs=throughputs,
        num_devices=pool.num_devices,
        dollars_per_hour=prices,
        heterogeneity=heterogeneity,
        space_sharing=space_sharing,
        consolidated_devices=together,
        placement=placement,
        budget_dollars=budget_dollars,
    )


def allocate(
    problem: AllocationProblem,
    policy: str,
    *,
    fills: bool = True,
    clock: TimeShares | None = None,
) -> Allocation:
    """Share a pool among jobs according to a policy.

    Args:
        problem: Jobs, throughputs and devices.
        policy: Name of the policy (docs/policies.md).
        fills: Whether to share out the devices that a max-min policy's optimum leaves idle.
        clock: The limit of time, if there is one; the check at the end is not counted.

    Returns:
        The allocation, which has passed its check; it records the options of the problem.

    Raises:
        ProblemError: There is no such policy, or the problem lacks what it needs.
        TooLittleTimeError: The limit of time came before there was an allocation.
        InfeasibleError: No allocation satisfies the policy's constraints.
        BackendError: The solver's allocation fails its check, which is a bug.
    """
    from ..solvers.allocation import allocate as solve

    should_stop = never if clock is None else clock.effort().should_stop
    try:
        found = solve(problem, policy, fills=fills, should_stop=should_stop)
    except OutOfTimeError:
        raise _too_short(policy) from None
    allocation = replace(
        found,
        space_sharing=problem.space_sharing,
        placement=problem.placement,
        budget_dollars=problem.budget_dollars,
    )
    faults = check(allocation, problem)
    if faults and should_stop() and allocation.certificate.termination != "optimal":
        raise _too_short(policy)
    if faults:
        raise BackendError(f"the solver's own allocation fails its check: {'; '.join(faults[:3])}")
    return allocation


def _too_short(policy: str) -> TooLittleTimeError:
    return TooLittleTimeError(
        f"{option('time_limit_seconds')} ended before policy {policy} had an "
        "allocation that could be proved",
        hint="allow more seconds, or leave it out",
    )
