"""Jobs, throughputs and a pool to a checked allocation; and judging one."""

from dataclasses import replace
from typing import Literal

from ..checks.allocation import check
from ..schema.cluster import Cluster
from ..schema.errors import BackendError
from ..schema.jobs import (
    Allocation,
    AllocationProblem,
    Jobs,
    Placement,
    Throughputs,
    consolidated_devices,
)
from .inputs import spelled_as


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
    """What an allocation answers.

    Args:
        jobs: Who shares.
        throughputs: Steps per second of their models on each device type.
        pool: The devices, with prices where policies need them.
        heterogeneity: Whether device types count for what they differ in.
        space_sharing: Whether pairs of jobs may share devices.
        placement: Which throughputs of jobs with several devices count.
        budget_dollars: For the policy ``makespan_budget``.

    Raises:
        ProblemError: Jobs or throughputs that do not fit the pool.
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


def allocate(problem: AllocationProblem, policy: str, *, fills: bool = True) -> Allocation:
    """Share a pool among jobs as a policy asks; the allocation says what it was made for.

    Args:
        problem: Jobs, throughputs and devices.
        policy: Its name.
        fills: Whether what a max-min policy's optimum leaves idle is shared out too.

    Raises:
        ProblemError: No such policy, or one that the problem does not fit.
        InfeasibleError: Nothing satisfies the policy's constraints.
        BackendError: The solver's allocation fails its check.
    """
    from ..solvers.allocation import allocate as solve

    allocation = replace(
        solve(problem, policy, fills=fills),
        space_sharing=problem.space_sharing,
        placement=problem.placement,
        budget_dollars=problem.budget_dollars,
    )
    faults = check(allocation, problem)
    if faults:
        raise BackendError(f"the solver's own allocation fails its check: {'; '.join(faults[:3])}")
    return allocation
