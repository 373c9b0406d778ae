"""Judges of policies: each policy's objective and bound, from the definition.

A policy states its objective for the solver. Its judge states the objective a second time, by
the thesis's formula for a single job, and shares no code with the solver. Without a judge, an
allocation is checked only against the constraints that every allocation must keep.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import fsum
from typing import Literal, NamedTuple

from ...schema.errors import ProblemError
from ...schema.jobs import Allocation, Certificate, Entity, Job
from ...schema.plugins import Registry
from .allocation_policies import Pool, inverse

# The tree of shares of thesis 5.4.3, by definition: first shares, and when each job stops rising.
#
# Water filling raises the levels of jobs over time. Times are measured in volumes: the volume of a
# node is its share of the resources, summed over the time since the start.


TOP = ""
SAME_VOLUME = 1e-9


class Tree:
    """Jobs under their entities, in order of arrival; jobs without an entity are at the root."""

    def __init__(self, jobs: Iterable[Job], entities: Iterable[Entity]) -> None:
        self.nodes = {TOP: Entity(name="top")} | {e.name: e for e in entities}
        self.jobs: dict[str, dict[str, Job]] = {name: {} for name in self.nodes}
        self.children: dict[str, list[str]] = {name: [] for name in self.nodes}
        self.place: dict[str, int] = {}
        for place, job in enumerate(jobs):
            self.jobs[job.entity or TOP][job.id] = job
            self.place[job.id] = place
        for name, node in self.nodes.items():
            if name != TOP:
                self.children[node.parent or TOP].append(name)
        self.downwards = [TOP]
        for name in self.downwards:
            self.downwards.extend(self.children[name])
        self.first: dict[str, int] = {}
        for name in reversed(self.downwards):
            own = [self.place[job] for job in self.jobs[name]]
            below = [self.first[child] for child in self.children[name] if child in self.first]
            if own or below:
                self.first[name] = min(own + below)

    def first_shares(self) -> dict[str, float]:
        """Return each job's fraction of the whole before any job has stopped; 0 if it waits."""
        share, answer = {TOP: 1.0}, dict.fromkeys(self.place, 0.0)
        for name in self.downwards:
            below = [child for child in self.children[name] if child in self.first]
            if self.nodes[name].policy == "fifo":
                for job in self.jobs[name]:
                    answer[job] = share[name] if self.place[job] == self.first[name] else 0.0
                for child in below:
                    share[child] = share[name] * (self.first[child] == self.first[name])
                continue
            total = sum(job.priority_weight for job in self.jobs[name].values())
            total += sum(self.nodes[child].weight for child in below)
            for job, entry in self.jobs[name].items():
                answer[job] = share[name] * entry.priority_weight / total
            for child in below:
                share[child] = share[name] * self.nodes[child].weight / total
        return answer

    def times(self, level: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Compute when each job reaches its level, and when it stops there, in volumes of the root.

        A job in a FIFO node may reach its level and then wait for its next turn. It stops only when
        that turn comes and does not raise it.

        Args:
            level: The level that each job has in the end.

        Returns:
            Job id -> volume when it reaches its level, and job id -> volume when it stops.
        """
        ends: dict[str, list[_End]] = {}
        for name in reversed(self.downwards):
            below = {c: ends.pop(c) for c in self.children[name] if c in self.first}
            is_fifo = self.nodes[name].policy == "fifo"
            pour = self._in_turn if is_fifo else self._together
            ends[name] = pour(name, level, below)
        return {e.job: e.has for e in ends[TOP]}, {e.job: e.stops for e in ends[TOP]}

    def _together(
        self, name: str, level: dict[str, float], below: dict[str, list["_End"]]
    ) -> list["_End"]:
        """Raise all members by weight: at height h a member holds weight * min(h, its height)."""
        own = {job: level[job] / entry.priority_weight for job, entry in self.jobs[name].items()}
        tops = [(height, self.jobs[name][job].priority_weight) for job, height in own.items()]
        for child, inner in below.items():
            weight = self.nodes[child].weight
            tops.append((max(end.stops for end in inner) / weight, weight))
        tops.sort()
        heights = [height for height, _ in tops]
        full = [*accumulate((height * weight for height, weight in tops), initial=0.0)]
        rising = [*accumulate((weight for _, weight in reversed(tops)), initial=0.0)][::-1]

        def volume(height: float) -> float:
            done = bisect_right(heights, height)
            return full[done] + height * rising[done]

        ends = [_End(job, volume(height), volume(height)) for job, height in own.items()]
        for child, inner in below.items():
            weight = self.nodes[child].weight
            ends += [_End(e.job, volume(e.has / weight), volume(e.stops / weight)) for e in inner]
        return ends

    def _in_turn(
        self, name: str, level: dict[str, float], below: dict[str, list["_End"]]
    ) -> list["_End"]:
        """Fill members in FIFO order: the one whose earliest running job arrived first gets all."""
        left = {job: [_End(job, level[job], level[job])] for job in self.jobs[name]} | below
        ends, has = [], dict[str, float]()
        poured, held = 0.0, dict.fromkeys(left, 0.0)
        while left:
            head = min(left, key=lambda member: min(self.place[e.job] for e in left[member]))
            first = min(left[head], key=lambda end: self.place[end.job])
            until = max(first.stops, held[head])
            for end in left[head]:
                if end.has <= until * (1 + SAME_VOLUME):
                    has.setdefault(end.job, poured + max(min(end.has, until) - held[head], 0.0))
            # A job that stops at the same volume as the first may only be waiting for its turn.
            done = [e for e in left[head] if e is first or e.stops < until * (1 - SAME_VOLUME)]
            for end in done:
                stops = poured + max(end.stops - held[head], 0.0)
                ends.append(_End(end.job, has[end.job], stops))
            poured, held[head] = poured + until - held[head], until
            left[head] = [end for end in left[head] if end not in done]
            if not left[head]:
                del left[head]
        return ends


class _End(NamedTuple):
    """The volumes of a node at which a job reaches its level (``has``) and at which it stops."""

    job: str
    has: float
    stops: float


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
