"""Water filling: lexicographic max-min over a tree of weights (thesis 5.4.3).

All unsaturated jobs rise together, each in proportion to its share of the tree, until some
can rise no further; these keep their level, their share passes to their siblings, and the rest
rises on. The thesis finds saturated jobs by a MILP; the prices of the level's own program tell
them at no cost: a job with a positive price is at its level in every optimum. The interior
point method ends inside the face of optimal prices, so all of them show at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...schema.errors import BackendError
from ...schema.jobs import Entity
from . import shared
from .engine import Outcome, solve_alone, spread, tighten
from .instance import Instance
from .program import Bools, Floats, Ints, Program, Solution, merge
from .shared import Pairing

# A job with a share s of the program's whole price can rise by gap / s at most: one whose
# share is above gap / LEVEL_ERROR is stuck, to that relative error.
LEVEL_ERROR = 1e-7
ACCEPTED_GAP = 1e-9
# Saturated jobs keep their level but for this part, so that programs have room; the later
# parts are tried only where the numbers span so many decades that errors add up to as much.
KEPT = (1e-9, 1e-8, 1e-7, 1e-6)

Shares = Callable[[Bools], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Give each job ``unit`` [jobs] * its level of throughput, levels rising together.

    ``shares(active)`` [jobs] says how fast each active job's level rises (0: not now). Equal
    jobs must have equal shares; ``group`` [jobs] numbers what else tells jobs apart.
    """

    unit: Floats
    shares: Shares
    group: Ints


def constant_shares(weight: Floats) -> Shares:
    """Shares that never pass on: plain weighted max-min, one level after the other."""

    def shares(active: Bools) -> Floats:
        return np.where(active, weight, 0.0)

    return shares


class TreeShares:
    """Shares through a tree of entities of any depth.

    A fair node splits its share over its active children by weight; a FIFO node gives all of
    it to the first active child in order of arrival (entities: of their first job).
    """

    def __init__(
        self, entities: tuple[Entity, ...], entity: Ints, weight: Floats, count: Floats
    ) -> None:
        number = len(entities)
        names = {node.name: i for i, node in enumerate(entities)}
        self.parent = np.array(
            [number if node.parent is None else names[node.parent] for node in entities], int
        )
        self.weight = np.array([node.weight for node in entities])
        self.fifo = np.array([node.policy == "fifo" for node in entities] + [False])
        self.entity = np.where(entity < 0, number, entity)
        self.job_weight, self.count = weight, count
        self.order = self._top_down()

    def _top_down(self) -> list[int]:
        depth: dict[int, int] = {len(self.parent): 0}
        for node in range(len(self.parent)):
            path = [node]
            while path[-1] not in depth:
                path.append(int(self.parent[path[-1]]))
            for i, visited in enumerate(reversed(path)):
                depth.setdefault(visited, depth[path[-1]] + i)
        return sorted(range(len(self.parent) + 1), key=lambda node: depth[node])

    def __call__(self, active: Bools) -> Floats:
        """Each active job's share [jobs]; one member's, where rows hold several."""
        top = len(self.parent)
        first = np.full(top + 1, len(active))
        np.minimum.at(first, self.entity[active], np.flatnonzero(active))
        for node in reversed(self.order):
            if node != top:
                first[self.parent[node]] = min(first[self.parent[node]], first[node])
        share = np.zeros(top + 1)
        share[top] = 1.0
        answer = np.zeros(len(active))
        for node in self.order:
            if first[node] < len(active):
                self._pass_on(node, share, answer, first, active)
        return answer

    def _pass_on(
        self, node: int, share: Floats, answer: Floats, first: Ints, active: Bools
    ) -> None:
        jobs = np.flatnonzero((self.entity == node) & active)
        children = np.flatnonzero(self.parent == node)
        children = children[first[children] < len(active)]
        if self.fifo[node]:
            head = first[node]
            answer[jobs[jobs == head]] = share[node]
            share[children[first[children] == head]] = share[node]
            return
        total = float(self.job_weight[jobs] @ self.count[jobs] + self.weight[children].sum())
        answer[jobs] = share[node] * self.job_weight[jobs] / total
        share[children] = share[node] * self.weight[children] / total

    @property
    def first_come(self) -> Bools:
        """Jobs that wait in a FIFO entity [jobs]; each is a row of its own."""
        return self.fifo[self.entity]


def fill(instance: Instance, goal: Fill) -> tuple[Outcome, Floats]:
    """Water-fill: the unique lexicographic max-min levels.

    Returns:
        The allocation, and the level each job ends at [jobs]. The outcome's objective, bound
        and prices are those of the first program: the least level over shares.
    """
    program = instance.program(level=goal.unit)
    key = goal.group if instance.pair_rate is None else goal.group * len(instance.rate) + (
        instance.kind
    )  # fmt: skip
    small, row_of = merge(program, key)
    pool = _Pool(instance, small, np.unique(row_of, return_index=True)[1])
    level = np.zeros(len(small.count))
    active = small.demands.copy()
    first: Solution | None = None
    rounds = 0
    while active.any():
        rounds += 1
        share = goal.shares(active[row_of])
        small_share = np.zeros(len(level))
        small_share[row_of] = share
        found, rise, stuck = _raise(pool, level, small_share)
        level = level + rise * small_share
        active &= ~stuck
        first = found if first is None else first
    assert first is not None
    return _outcome(instance, program, pool, row_of, found, first, rounds), level[row_of]


@dataclass(slots=True)
class _Pool:
    instance: Instance
    program: Program
    first: Ints
    pairs: shared.PairTimes | None = None

    def solve(self, program: Program) -> Solution:
        if self.instance.pair_rate is None:
            return solve_alone(program, ACCEPTED_GAP)
        kind = self.instance.kind[self.first]
        pairing = self.pairing(kind)
        found, self.pairs = shared.solve(program, pairing, self.pairs)
        return found

    def pairing(self, kind: Ints) -> Pairing:
        assert self.instance.pair_rate is not None
        return Pairing(
            kind=kind,
            rate=self.instance.pair_rate,
            worth=np.zeros_like(self.program.rate),
            charge=np.zeros(len(self.instance.columns)),
        )


def _raise(pool: _Pool, level: Floats, share: Floats) -> tuple[Solution, float, Bools]:
    """One program: how far all may rise, and who is stuck then."""
    base, rising = pool.program, share > 0
    # Levels are measured from the deepest point at which all rising jobs would start together,
    # so that z has the size of the levels and small rises lose no digits.
    depth = float((level[rising] / share[rising]).min())
    start = np.where(rising, np.maximum(level - depth * share, 0.0), level)
    program = replace(base, level=base.level * share, demands=rising | (level > 0))
    found = _with_room(pool, program, base.level * start, rising)
    price = program.count * found.job_prices * program.level
    enough = min(max(1e-6, found.gap / LEVEL_ERROR), 0.5)
    stuck = rising & (price >= enough * price.max(where=rising, initial=0.0))
    return found, max(found.z - depth, 0.0), stuck


def _with_room(pool: _Pool, program: Program, floor: Floats, rising: Bools) -> Solution:
    """Solve with the floors of saturated jobs loosened as little as the numbers allow."""
    for kept in KEPT[:-1]:
        try:
            loosened = np.where(rising, floor, floor * (1.0 - kept))
            return pool.solve(replace(program, floor=loosened))
        except BackendError:
            continue
    return pool.solve(replace(program, floor=floor * (1.0 - KEPT[-1])))


def _outcome(
    instance: Instance,
    program: Program,
    pool: _Pool,
    row_of: Ints,
    last: Solution,
    first: Solution,
    rounds: int,
) -> Outcome:
    if pool.pairs is None:
        x, pairs = tighten(program, last.x[row_of]), None
        throughput = (instance.rate * x).sum(axis=1)
    else:
        pairing = pool.pairing(instance.kind[pool.first])
        throughput = shared.reach(pool.program, pairing, last.x, pool.pairs)[0][row_of]
        x, pairs = last.x[row_of], spread(pool.pairs, row_of, pool.program.count)
    return Outcome(
        x=x,
        pairs=pairs,
        throughput=throughput,
        objective=first.objective,
        bound=first.bound,
        gap=first.gap,
        job_prices=first.job_prices[row_of],
        resource_prices=first.resource_prices,
        time_prices=None if first.time_prices is None else first.time_prices[row_of],
        method=f"{first.method}; water filling, {rounds} levels",
    )
