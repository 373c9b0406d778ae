"""Judges of policies: each policy's objective and bound, from the definition.

A policy states its objective for the solver. Its judge states the objective a second time, by
the thesis's formula for a single job, and shares no code with the solver. Without a judge, an
allocation is checked only against the constraints that every allocation must keep.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import fsum
from typing import Literal

from ...schema.errors import ProblemError
from ...schema.jobs import Allocation, Certificate, Job
from ...schema.plugins import Registry
from .allocation_policies import Pool, inverse
from .allocation_tree import Tree

Reached = Mapping[str, float]
"""The effective throughput of every job, in steps per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The definition of a policy, for the checker.

    State ``level`` for a max-min policy, or ``worth`` for a policy whose objective is a sum over
    jobs and columns. Objective and bound then follow. Any other policy states both
    ``objective`` and ``bound``.

    Attributes:
        sense: Whether the objective is maximised (``max``) or minimised (``min``). The objective
            of a max-min policy with ``min`` is 1 / the lowest level.
        level: Pool -> the throughput that each job needs per unit of the objective, steps per
            second.
        worth: Pool -> (job, column) -> what one step contributes to the objective.
        objective: The objective's value at an allocation.
        bound: The bound that the certificate's prices prove, by weak duality.
        rises: For filling after the optimum: the throughput that each job needs per unit of
            level, and the tree in which levels rise. None uses ``level`` with equal weights.
        fills_itself: Whether the policy continues after the first bottleneck (thesis 5.4.3).
        sees: Pool -> the pool limited to the columns that the policy lets jobs use; None allows
            all.
        counts_dollars: Whether every device type needs a price.
        keeps_slos: Whether the policy must meet every job's SLO.
        keeps_budget: Whether the policy must keep the problem's budget.

    Raises:
        ProblemError: Neither ``level`` nor ``worth`` is given, and objective or bound is missing.
    """

    sense: Literal["max", "min"] = "max"
    level: Callable[[Pool], dict[str, float]] | None = None
    worth: Callable[[Pool], Callable[[str, str], float]] | None = None
    objective: Callable[[Allocation, Pool, Reached], float] | None = None
    bound: Callable[[Certificate, Pool], float] | None = None
    rises: Callable[[Allocation, Pool], tuple[dict[str, float], Tree]] | None = None
    fills_itself: bool = False
    sees: Callable[[Pool], Pool] | None = None
    counts_dollars: bool = False
    keeps_slos: bool = False
    keeps_budget: bool = False

    def __post_init__(self) -> None:
        adds_up = self.level is not None or self.worth is not None
        if not adds_up and (self.objective is None or self.bound is None):
            raise ProblemError(
                "a judge needs the policy's level or worth, or both its objective and its bound"
            )

    def worths(self, pool: Pool) -> dict[tuple[str, str], float] | None:
        """Tabulate (job, column) -> worth of a step; None if the objective is not such a sum."""
        if self.worth is None:
            return None
        of = self.worth(pool)
        return {(m, c): of(m, c) for m in pool.jobs for c in pool.columns}


JUDGES: Registry[Judge] = Registry(
    "judge of a policy",
    group="hetflow.policies",  # the module that registers a policy registers its judge too
    own=("hetflow.planning.checks.own_judges",),
    is_optional=True,
)


def judge(policy: str, definition: Judge, *, module: str) -> None:
    """Register the judge of a policy.

    Args:
        policy: The policy's name.
        definition: The policy's definition, which its allocations are checked against.
        module: The module that registers it (``__name__``).

    Raises:
        ProblemError: Another module has registered a judge of that name.
    """
    JUDGES.add(policy, definition, module)


def judge_of(policy: str) -> Judge | None:
    """Return the judge of a policy; None if none is registered."""
    return JUDGES.find(policy)


def objective_of(allocation: Allocation, pool: Pool, reached: Reached) -> float | None:
    """Compute the policy's objective at an allocation; None if the policy has no judge.

    For water filling this is the objective of the first level.

    Args:
        allocation: The allocation; names the policy.
        pool: The problem as the policy sees it.
        reached: Effective throughput of each job, steps per second.
    """
    known = judge_of(allocation.policy)
    if known is None:
        return None
    if known.objective is not None:
        return known.objective(allocation, pool, reached)
    if known.level is not None:
        level = known.level(pool)
        least = min(reached[name] / level[name] for name in pool.jobs if level[name] > 0)
        return least if known.sense == "max" else inverse(least)
    worth = known.worths(pool)
    return None if worth is None else _total(allocation, pool, worth)


def has_levels(allocation: Allocation) -> bool:
    """Whether an allocation was filled beyond the first bottleneck (thesis 5.4.3)."""
    known = judge_of(allocation.policy)
    return allocation.fill is not None or (known is not None and known.fills_itself)


def rising(allocation: Allocation, pool: Pool) -> tuple[dict[str, float], Tree] | None:
    """Describe how levels rise when an allocation is filled.

    Returns:
        The throughput that each job needs per unit of level (steps per second), and the tree in
        which levels rise. None if the policy's judge does not define them.
    """
    known = judge_of(allocation.policy)
    if known is None:
        return None
    if known.rises is not None:
        return known.rises(allocation, pool)
    return None if known.level is None else (known.level(pool), tree_of_equals(pool))


def tree_of_equals(pool: Pool) -> Tree:
    """Build a tree with all jobs at the root and with equal weights."""
    jobs: list[Job] = [replace(job, entity=None, priority_weight=1.0) for job in pool.jobs.values()]
    return Tree(jobs, ())


def _total(allocation: Allocation, pool: Pool, worth: dict[tuple[str, str], float]) -> float:
    terms = [
        worth[name, column] * pool.rate(name, column) * time
        for name, shares in allocation.x.items()
        for column, time in shares.items()
    ]
    for pair in allocation.pairs:
        for column, time in pair.shares.items():
            rates = pool.pair_rates(pair.jobs, column)
            terms += [
                worth[m, column] * rate * time for m, rate in zip(pair.jobs, rates, strict=True)
            ]
    return fsum(terms)
