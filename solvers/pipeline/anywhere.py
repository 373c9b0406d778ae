"""Placements of stages on any devices of a type, in any order.

The ordered space of placements.py gives each stage a run right behind the previous one. Here
a stage takes any devices of a type. What it costs depends only on the smallest component that
holds it, and on the smallest one that holds it together with the next stage. So states count
devices instead of naming them:

``relaxed``
    remembers, for each level, how many devices the chain of neighbouring stages that ends here
    has in its component: no chain may overflow one. Whether all chains fit the components
    together is left out, so a search over it bounds every placement from below. A placement
    whose chains do fit (``seat``) is a plan.
``blind``
    remembers no chain at all: every stage, and every two neighbours, are taken to share the
    smallest component that could hold them. A bound alone, for pools too large for the others.
``exact``
    also remembers what is taken of every component, equal ones exchanged: servers of devices
    (two levels) at most. Stages that span servers only count, as any devices left will do.

All include every ordered placement, at its own cost or a lower one.

    two servers of two devices, stages of 1, 2 and 1 devices
    in order, stage 2 spans the servers, or a device between stays idle and stage 1 has none
    here stages 1 and 3 count one device each and stage 2 a whole server: seated on (0) (2 3) (1)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from ...schema.pipeline import PipelineProblem
from ..effort import DEFAULT, Effort
from .placements import (
    Moves,
    PlacementSpace,
    State,
    bandwidths_of,
    class_between,
    link_classes,
)

Inside = tuple[int, ...]
"""Devices of the chain in its component of each level below the top; 0 where it spans several."""
Fills = tuple[int, ...]
"""Devices taken of each component below the top, ascending."""


def has_one_order(problem: PipelineProblem) -> bool:
    """Whether every placement costs the same as an ordered one: no pool has several components."""
    return all(
        sum(level.num_components > 1 for level in pool.levels) <= 1 for pool in problem.pools
    )


def relaxed(
    problem: PipelineProblem,
    most_moves: float,
    replicas: int | None = None,
    effort: Effort = DEFAULT,
) -> PlacementSpace | None:
    """States and moves where only chains of neighbouring stages have to fit a component.

    None where there are more moves than that. ``replicas`` gives every stage so many.

    Raises:
        OutOfTimeError: The effort's limit came first; here and in the other spaces.
    """
    builder = _Builder(problem, is_exact=False, most_moves=most_moves, replicas=replicas)
    return builder.space(effort)


def blind(problem: PipelineProblem, effort: Effort = DEFAULT) -> PlacementSpace:
    """States and moves where every stage has the fastest links that its devices could have."""
    space = _Builder(problem, is_exact=False, is_blind=True, most_moves=np.inf).space(effort)
    assert space is not None
    return space


def exact(
    problem: PipelineProblem, most_moves: float, effort: Effort = DEFAULT
) -> PlacementSpace | None:
    """States and moves of every placement; None for three levels, or more moves than that."""
    if any(len(pool.levels) > 2 for pool in problem.pools):
        return None
    return _Builder(problem, is_exact=True, most_moves=most_moves).space(effort)


@dataclass(frozen=True, slots=True)
class _At:
    """A state: devices used, what the last stage's components hold, and what each one's do."""

    used: tuple[int, ...]
    last_pool: int
    stages: int
    inside: Inside
    fills: tuple[Fills, ...]
    here: int = 0
    """What is taken of the component in which the last stage is, by any stages (``exact``)."""

    @property
    def total(self) -> int:
        return sum(self.used)


class _Seat(NamedTuple):
    """One way to seat a stage: level of its component, link behind, and what is held then."""

    span: int
    link: int
    inside: Inside
    fills: tuple[Fills, ...]
    here: int


class _Builder:
    def __init__(
        self,
        problem: PipelineProblem,
        *,
        is_exact: bool,
        most_moves: float,
        is_blind: bool = False,
        replicas: int | None = None,
    ) -> None:
        self.is_blind = is_blind
        self.replicas = replicas
        self.problem, self.is_exact, self.most_moves = problem, is_exact, most_moves
        self.bandwidths = bandwidths_of(problem)
        self.widths = [
            [prod(level.num_components for level in pool.levels[: number + 1])
             for number in range(len(pool.levels))]
            for pool in problem.pools
        ]  # fmt: skip
        self.classes = [link_classes(pool, self.bandwidths) for pool in problem.pools]
        self.inter = class_between(problem, self.bandwidths)
        self.by_pool = len(problem.pools) > 1

    def space(self, effort: Effort) -> PlacementSpace | None:
        """List states by devices in use, each with its moves; None where they are too many."""
        # An estimate first: listing a hundred million states to find that they are too many takes
        # minutes.
        if self._least_moves() > self.most_moves:
            return None
        fills = tuple(
            (0,) * (widths[-1] // widths[0]) if self.is_exact and len(widths) > 1 else ()
            for widths in self.widths
        )
        by_stage = self.problem.stage_limit is not None
        start = _At((0,) * len(self.widths), -1, 0 if by_stage else -1, (), fills)
        number = {start: 0}
        waiting: list[list[_At]] = [[] for _ in range(self.problem.num_devices + 1)]
        waiting[0].append(start)
        rows: list[tuple[int, _At, tuple[int, ...]]] = []
        order: list[_At] = []
        # A move uses devices, so all states of one number are known when their turn comes.
        for states in waiting:
            for state in states:
                effort.check()
                number[state] = len(order)
                order.append(state)
                for target, row in self._moves(state):
                    # Known, but not numbered yet: numbers follow the order of the lists.
                    if target not in number:
                        number[target] = -1
                        waiting[target.total].append(target)
                    rows.append((number[state], target, row))
            if len(rows) > self.most_moves:
                return None
        # Targets have their numbers now.
        columns = [(source, number[target], *rest) for source, target, rest in rows]
        found = np.array(columns, np.int64).reshape(-1, 8).T
        # By target, then source, pool and replicas, as ``Tables`` reads runs of moves.
        found = found[:, np.lexsort((found[3], found[2], found[0], found[1]))]
        states_ = tuple(
            State(
                state.used, -1, state.last_pool if self.by_pool else -1, state.stages, state.inside
            )
            for state in order
        )
        kind: Literal["counted", "blind"] = "blind" if self.is_blind else "counted"
        return PlacementSpace(states_, Moves(*found), self.bandwidths, kind)

    def _least_moves(self) -> float:
        """An estimate of the number of moves, to give up early where they are too many."""
        if self.is_blind:
            return 0.0
        states = prod(widths[-1] + 1 for widths in self.widths)
        held = sum(prod(width + 1 for width in widths[:-1]) for widths in self.widths)
        ways = sum(1 if self.replicas else widths[-1] for widths in self.widths)
        # Half of the pairs of states, as moves only go up.
        return states * held * ways / 2

    def _moves(self, state: _At) -> Iterator[tuple[_At, tuple[int, ...]]]:
        """Each stage that may be placed next: where it leads, and its columns of ``Moves``."""
        problem, limit = self.problem, self.problem.stage_limit
        if limit is not None and state.stages >= limit:
            return
        stages = state.stages + 1 if limit is not None else -1
        for pool, widths in enumerate(self.widths):
            left = min(widths[-1] - state.used[pool], problem.most_workers - state.total)
            most = left if problem.replication else min(1, left)
            counts = range(1, most + 1)
            if self.replicas is not None:
                counts = range(self.replicas, min(self.replicas, most) + 1)
            for replicas in filter(problem.may_replicate, counts):
                used = tuple(
                    count + replicas * (index == pool) for index, count in enumerate(state.used)
                )
                for seat in self._seats(state, pool, replicas):
                    last = pool if self.by_pool else 0
                    target = _At(used, last, stages, seat.inside, seat.fills, seat.here)
                    span = self.classes[pool][seat.span]
                    yield target, (pool, replicas, 0, span, seat.link, state.total + replicas)

    def _seats(self, state: _At, pool: int, replicas: int) -> Iterator[_Seat]:
        """Every way to seat a stage, by the level of its component; one device has none."""
        widths, top = self.widths[pool], len(self.widths[pool])
        is_first, is_same = state.total == 0, state.last_pool in (-1, pool)
        for span in [0] if replicas == 1 else range(1, top + 1):
            if span and widths[span - 1] < replicas:
                continue
            if self.is_blind:
                # The smallest component that could hold the stage and a neighbour: no placement
                # has a faster link.
                wider = next((n for n, width in enumerate(widths, 1) if width > replicas), top)
                same = 0 if is_first else self.classes[pool][wider]
                yield _Seat(span, same if is_same else self.inter, (), state.fills, 0)
                return
            # A chain of its own on each level that can hold the stage.
            fresh = tuple(replicas if level >= span else 0 for level in range(1, top))
            if not is_first and is_same:
                yield from self._beside(state, pool, replicas, span, fresh)
                continue
            link = 0 if is_first else self.inter
            for here, fills in self._opened(state, pool, replicas, span, 0):
                yield _Seat(span, link, fresh, fills, here)

    def _beside(
        self, state: _At, pool: int, replicas: int, span: int, fresh: Inside
    ) -> Iterator[_Seat]:
        """Seats by the smallest component that also holds the stage behind."""
        widths, classes, top = self.widths[pool], self.classes[pool], len(self.widths[pool])
        # From the smallest component that could hold both to the whole pool.
        for joint in range(max(span, 1), top + 1):
            held = state.inside[joint - 1 :]
            limits = widths[joint - 1 : top - 1]
            # 0 says that the chain behind already spans components of that level.
            if not all(n and n + replicas <= most for n, most in zip(held, limits, strict=True)):
                continue
            # Below the joint component the stage begins chains of its own.
            inside = fresh[: joint - 1] + tuple(count + replicas for count in held)
            if joint == top:
                for here, fills in self._opened(state, pool, replicas, span, state.here):
                    yield _Seat(span, classes[joint], inside, fills, here)
            elif not self.is_exact:
                yield _Seat(span, classes[joint], inside, state.fills, 0)
            elif state.here + replicas <= widths[0]:
                here, fills = self._taken(state, pool, state.here, replicas)
                yield _Seat(span, classes[joint], inside, fills, here)

    def _opened(
        self, state: _At, pool: int, replicas: int, span: int, behind: int
    ) -> Iterator[tuple[int, tuple[Fills, ...]]]:
        """What is taken once the stage has a component in which the one behind is not."""
        others = list(state.fills[pool])
        # A stage that spans components takes any devices left, so nothing of it is remembered.
        if not others or span > 1:
            yield 0, state.fills
            return
        # ``behind`` devices are taken of the component of the stage behind, which is no other one.
        if behind:
            others.remove(behind)
        # Components with as much taken are alike: one of them stands for all.
        for held in sorted(set(others)):
            if held + replicas <= self.widths[pool][0]:
                yield self._taken(state, pool, held, replicas)

    def _taken(
        self, state: _At, pool: int, held: int, replicas: int
    ) -> tuple[int, tuple[Fills, ...]]:
        mine = list(state.fills[pool])
        mine.remove(held)
        changed = tuple(sorted([*mine, held + replicas]))
        return held + replicas, tuple(
            changed if index == pool else fills for index, fills in enumerate(state.fills)
        )
