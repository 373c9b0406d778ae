"""What the checker must know of a policy: its objective and its bound, from the definition.

A policy states its goal once for the solver; its judge states it a second time, in the thesis's
words and over one job at a time, and shares no code with the solver. A policy without a judge is
held only to what every allocation must keep.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import fsum
from typing import Literal

from ..schema.errors import ProblemError
from ..schema.jobs import Allocation, Certificate, Job
from ..schema.plugins import Registry
from .allocation_policies import Pool, inverse
from .allocation_tree import Tree

Reached = Mapping[str, float]
"""The effective throughput of every job, in steps per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A policy by definition.

    Give ``level`` for a max-min policy, ``worth`` for one that adds up; objective and bound then
    follow. Any other policy gives both itself.

    Attributes:
        sense: Whether the objective is a ``max`` or a ``min``; of a max-min policy that is a
            ``min`` it is 1 / the least level.
        level: The throughput that one unit of the objective asks of each job.
        worth: What a step of a job on a column is worth.
        objective: The objective at an allocation.
        bound: What the certificate's prices prove, by weak duality.
        rises: What one unit of level asks of each job, and the tree through which levels rise,
            where an optimum is filled; by default ``level``, for all jobs alike.
        fills_itself: Whether the policy goes on after the first bottleneck (thesis 5.4.3).
        sees: The part of a pool that the policy lets jobs use; None is all of it.
        counts_dollars: Whether every device type needs a price.
        keeps_slos: Whether every job's SLO is kept.
        keeps_budget: Whether the problem's budget is kept.
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
        """What a step of each job on each column is worth; None where nothing is added up."""
        if self.worth is None:
            return None
        of = self.worth(pool)
        return {(m, c): of(m, c) for m in pool.jobs for c in pool.columns}


JUDGES: Registry[Judge] = Registry(
    "judge of a policy",
    group="hetflow.policies",  # the module that registers a policy registers its judge too
    own=("hetflow.checks.own_judges",),
    is_optional=True,
)


def judge(policy: str, definition: Judge, *, module: str) -> None:
    """Register the judge of a policy.

    Args:
        policy: Its name.
        definition: What its allocations are held to.
        module: The module that says so (``__name__``).
    """
    JUDGES.add(policy, definition, module)


def judge_of(policy: str) -> Judge | None:
    """The judge of a policy; None if its definition is not stated."""
    return JUDGES.find(policy)


def objective_of(allocation: Allocation, pool: Pool, reached: Reached) -> float | None:
    """The policy's objective at an allocation, by its formula; None if none is stated.

    Of water filling it is that of the first level.
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
    """Whether an allocation goes on after the first bottleneck (5.4.3)."""
    known = judge_of(allocation.policy)
    return allocation.fill is not None or (known is not None and known.fills_itself)


def rising(allocation: Allocation, pool: Pool) -> tuple[dict[str, float], Tree] | None:
    """What one unit of level asks of each job, and the tree through which levels rise.

    Where an optimum was filled: the throughputs that the policy's objective asks for, risen
    together. None where the checker does not know these.
    """
    known = judge_of(allocation.policy)
    if known is None:
        return None
    if known.rises is not None:
        return known.rises(allocation, pool)
    return None if known.level is None else (known.level(pool), tree_of_equals(pool))


def tree_of_equals(pool: Pool) -> Tree:
    """All jobs side by side with one weight."""
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
