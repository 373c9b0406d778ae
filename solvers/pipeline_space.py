"""Which devices a stage may get: states of the pools, and moves between them.

Stages are placed from the model's end to its start, as a stage's memory depends on the workers
behind it. Each takes a run of devices of one type in the order of the topology, right behind the
type's previous run or at the start of the next component (the devices between stay idle). A run
never gains from starting anywhere else: shifted left to such a place it spans no more levels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ..costs.pipeline import shared_level, slowest_links
from ..schema.pipeline import DevicePool, PipelineProblem


class State(NamedTuple):
    """Devices consumed so far, by pool; and what else the future depends on.

    ``workers`` counts devices in use, ``last_pool`` names the pool of the stage placed last,
    ``stages`` counts stages; each stays -1 where nothing depends on it.
    """

    used: tuple[int, ...]
    workers: int = -1
    last_pool: int = -1
    stages: int = -1


class Move(NamedTuple):
    """One stage placed: ``num_replicas`` devices of ``pool`` from ``first`` (from the end) on.

    ``span`` and ``gap`` index ``Space.bandwidths``: the slowest link among the replicas, and
    the one between the run and the stage that follows in the model. ``workers`` counts devices
    from this stage to the model's end.
    """

    source: int
    target: int
    pool: int
    num_replicas: int
    first: int
    span: int
    gap: int
    workers: int


@dataclass(frozen=True, slots=True)
class Space:
    """States in the order they can be filled; every move's source comes before its target.

    ``bandwidths`` starts with infinity (one device and itself), then falls.
    """

    states: tuple[State, ...]
    moves: tuple[Move, ...]
    bandwidths: tuple[float, ...]


Run = tuple[int, int, int]
"""First device, replicas, and the class of the slowest link among them."""


class _Pool:
    """One pool's geometry."""

    def __init__(self, pool: DevicePool, bandwidths: list[float]) -> None:
        self.levels = pool.levels
        self.size = pool.num_devices
        self.classes = (0, *(bandwidths.index(b) for b in slowest_links(pool.levels)))

    def link(self, one: int, other: int) -> int:
        return self.classes[shared_level(self.levels, one, other)]

    def runs(self, position: int, may_skip: bool, replication: bool) -> tuple[Run, ...]:
        """Runs that may follow the devices before ``position``, by start, then length."""
        starts = self._starts(position) if may_skip else [position]
        found = []
        for first in starts:
            longest = self.size - first if replication else min(1, self.size - first)
            for replicas in range(1, longest + 1):
                found.append((first, replicas, self.link(first, first + replicas - 1)))
        return tuple(found)

    def _starts(self, position: int) -> list[int]:
        """Where a run may begin: right here, or at the next component of each level."""
        found, width = {position}, 1
        for level in self.levels[:-1]:
            width *= level.num_components
            found.add(-(-position // width) * width)
        return sorted(start for start in found if start < self.size)


def build(problem: PipelineProblem) -> Space:
    """List the states and moves of a problem's pools."""
    builder = _Builder(problem, list(bandwidths_of(problem)))
    return builder.space()


def bandwidths_of(problem: PipelineProblem) -> tuple[float, ...]:
    """Infinity (a device and itself), then every link's bytes per second, falling."""
    links = {b for pool in problem.pools for b in slowest_links(pool.levels)}
    if len(problem.pools) > 1 and problem.inter_bytes_per_second is not None:
        links.add(problem.inter_bytes_per_second)
    return (float("inf"), *sorted(links, reverse=True))


class _Builder:
    def __init__(self, problem: PipelineProblem, bandwidths: list[float]) -> None:
        self.problem = problem
        self.bandwidths = bandwidths
        self.pools = [_Pool(pool, bandwidths) for pool in problem.pools]
        limited = any(pool.memory_bytes is not None for pool in problem.pools)
        exactly = problem.workers == "exactly"
        self.may_skip = not exactly
        self.by_stage = problem.num_stages is not None
        has_gaps = any(len(pool.levels) > 1 for pool in problem.pools) and self.may_skip
        self.by_worker = limited and problem.schedule != "gpipe" and has_gaps
        self.by_pool = len(self.pools) > 1
        self._runs = cache(self._runs_of)

    def _runs_of(self, number: int, position: int) -> tuple[Run, ...]:
        return self.pools[number].runs(position, self.may_skip, self.problem.replication)

    def space(self) -> Space:
        start = State(
            used=(0,) * len(self.pools),
            workers=0 if self.by_worker else -1,
            stages=0 if self.by_stage else -1,
        )
        index, states, moves = {start: 0}, [start], []
        by_total: dict[int, list[State]] = {0: [start]}
        for total in range(sum(pool.size for pool in self.pools)):
            for state in by_total.get(total, []):
                for target, move in self._moves(state):
                    if target not in index:
                        index[target] = len(states)
                        states.append(target)
                        by_total.setdefault(sum(target.used), []).append(target)
                    moves.append((index[state], index[target], *move))
        order = sorted(range(len(states)), key=lambda s: (sum(states[s].used), s))
        rank = {old: new for new, old in enumerate(order)}
        found = [Move(rank[source], rank[target], *rest) for source, target, *rest in moves]
        found.sort(key=lambda move: (move.target, move.source, move.pool, move.num_replicas))
        return Space(tuple(states[s] for s in order), tuple(found), tuple(self.bandwidths))

    def _moves(self, state: State) -> Iterator[tuple[State, tuple[int, int, int, int, int, int]]]:
        if self.by_stage and state.stages == self.problem.num_stages:
            return
        workers = state.workers if self.by_worker else sum(state.used)
        used = state.used
        for number in range(len(self.pools)):
            gaps: dict[int, int] = {}
            for first, replicas, span in self._runs(number, used[number]):
                if first not in gaps:
                    gaps[first] = self._gap(state, number, first)
                target = State(
                    (*used[:number], first + replicas, *used[number + 1 :]),
                    workers + replicas if self.by_worker else -1,
                    number if self.by_pool else -1,
                    state.stages + 1 if self.by_stage else -1,
                )
                yield target, (number, replicas, first, span, gaps[first], workers + replicas)

    def _gap(self, state: State, number: int, first: int) -> int:
        if not any(state.used):
            return 0
        if self.by_pool and state.last_pool != number:
            return self.bandwidths.index(self.problem.inter_bytes_per_second or 0.0)
        return self.pools[number].link(state.used[number] - 1, first)
