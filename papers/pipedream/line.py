"""Nested levels over cuts in one line, by parametric search.

A(i -> j, at most m) does not fall when j grows and does not rise when i grows. So for a time limit
only the furthest j that can be reached from each i matters. It is found level by level: a block of
q components at level k ends where the level below, given q times the limit, ends, or where
synchronising its weights takes too long. Every question is a bisection on prefix sums; answers are
kept for the limit at hand.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from ...planning.costs.pipeline import overheads
from ...schema.pipeline import PipelineProblem
from ...solvers.pipeline.cuts import Cuts
from .states import Block, Nested, Ranges, ranges_of

_TOLERANCE = 1e-12
_HALVINGS_BEFORE_PROBING = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """The best nested partition."""

    ranges: Ranges
    nested: tuple[Nested, ...]
    seconds: float


def applies(problem: PipelineProblem, cuts: Cuts) -> bool:
    """Whether the search is exact for a problem."""
    return (
        problem.stage_cost != "published"
        and problem.workers == "at_most"
        and problem.replication
        and cuts.before is None
    )


def search(problem: PipelineProblem, cuts: Cuts) -> Answer:
    """Find the best nested partition, exact up to one part in 10^12."""
    line = _Line(problem, cuts)
    low = (line.compute[-1] + line.own) / problem.num_devices * (1 - _TOLERANCE)
    limit = low
    while not line.fits(limit):
        low, limit = limit, limit * 1.1 if limit > 0 else line.smallest()
    parts = line.unfold(limit)
    high, halvings, probe = min(limit, line.attained(parts)), 0, False
    while high > low * (1 + _TOLERANCE):
        limit = high * (1 - _TOLERANCE) if probe else (low + high) / 2
        halvings += 1
        if line.fits(limit):
            parts = line.unfold(limit)
            high = min(limit, line.attained(parts))
            probe = halvings > _HALVINGS_BEFORE_PROBING
        else:
            low, probe = limit, False
    return Answer(ranges_of(cuts), _nested(parts), line.attained(parts))


def _nested(parts: "tuple[_Part, ...]") -> tuple[Nested, ...]:
    """Ranges of cuts become blocks of states, which count from the cut behind them."""
    return tuple(
        (Block(part.first, part.last - 1, part.num_replicas), _nested(part.inside))
        for part in parts
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The layers between two cuts on some components, and how those are split inside."""

    first: int
    last: int
    num_replicas: int
    inside: "tuple[_Part, ...]"


@dataclass(slots=True)
class _Fronts:
    """Furthest cuts with 1, 2, ... components: of the last block, and where one may split.

    ``choices[p]`` is the block that reached ``ends[p]``: its components, and those before it.
    """

    ends: list[int]
    splits: list[int]
    choices: list[tuple[int, int]]


class _Line:
    def __init__(self, problem: PipelineProblem, cuts: Cuts) -> None:
        self.levels = problem.pools[0].levels
        self.thesis = problem.stage_cost == "thesis"
        self.counts_boundaries = problem.count_boundaries
        self.compute: list[float] = (cuts.forward_seconds + cuts.backward_seconds)[0].tolist()
        own = overheads(problem)
        self.own, self.message = own.stage_seconds[0], own.message_seconds
        self.weights: list[float] = cuts.weight_bytes.tolist()
        self.crossing = cuts.crossing_bytes
        self.positions = np.arange(cuts.size)
        self.last = cuts.size - 1
        self.below = [1]
        for level in self.levels:
            self.below.append(self.below[-1] * level.num_components)
        self.kept: dict[tuple[int, int, float], _Fronts] = {}
        self.allowed: dict[tuple[int, float], list[int]] = {}

    def smallest(self) -> float:
        """A first limit where compute is free: the time to synchronise all weights."""
        return max(self.weights[-1], 1.0) / self.levels[0].bytes_per_second

    def fits(self, limit: float) -> bool:
        self.kept.clear()
        self.allowed.clear()
        return self._fronts(len(self.levels) - 1, 0, limit).ends[-1] == self.last

    def _fronts(self, number: int, start: int, limit: float) -> _Fronts:
        key = (number, start, limit)
        if key not in self.kept:
            self.kept[key] = self._advance(number, start, limit)
        return self.kept[key]

    def _advance(self, number: int, start: int, limit: float) -> _Fronts:
        allowed = self._splits(number, limit)
        fronts = _Fronts([start], [start], [(0, 0)])
        furthest, choice = start, (0, 0)
        caps = self._weight_caps(number, limit)
        for workers in range(1, self.levels[number].num_components + 1):
            for replicas in range(1, workers + 1):
                begin = fronts.splits[workers - replicas]
                end = self._block_end(number, begin, replicas, limit, furthest, caps[replicas])
                if end > furthest:
                    furthest, choice = end, (replicas, workers - replicas)
            fronts.ends.append(furthest)
            fronts.choices.append(choice)
            if furthest == self.last:
                break
            fronts.splits.append(allowed[furthest])
        return fronts

    def _weight_caps(self, number: int, limit: float) -> list[float]:
        """Bytes of weights that 0, 1, 2, ... components synchronise within the limit."""
        level, below = self.levels[number], self.below[number]
        caps = [0.0, float("inf")]
        for replicas in range(2, level.num_components + 1):
            inputs = replicas if self.thesis else replicas * replicas * below
            caps.append(limit * inputs * level.bytes_per_second / (2 * (replicas - 1)))
        return caps

    def _block_end(
        self, number: int, begin: int, replicas: int, limit: float, furthest: int, cap: float
    ) -> int:
        """Where a block ends at the latest; anything up to ``furthest`` may stand for itself."""
        time = replicas * limit
        # Every block has a stage, whose passes cost something themselves.
        work = time * self.below[number] - self.own
        end = bisect_right(self.compute, self.compute[begin] + work) - 1
        if end <= furthest:
            return furthest
        if replicas > 1:
            end = min(end, bisect_right(self.weights, self.weights[begin] + cap) - 1)
            if end <= furthest:
                return furthest
        return end if number == 0 else min(end, self._fronts(number - 1, begin, time).ends[-1])

    def _splits(self, number: int, limit: float) -> list[int]:
        """The last cut up to each whose boundary is in time at a level."""
        key = (number, limit)
        if key not in self.allowed:
            bytes_in_time = (limit / 2 - self.message) * self.levels[number].bytes_per_second
            inside = self.crossing <= (bytes_in_time if self.counts_boundaries else np.inf)
            found = np.maximum.accumulate(np.where(inside, self.positions, 0))
            self.allowed[key] = found.tolist()
        return self.allowed[key]

    def unfold(self, limit: float) -> tuple[_Part, ...]:
        """The partition behind the latest limit that fits."""
        return self._unfold(len(self.levels) - 1, 0, self.last, limit)

    def _unfold(self, number: int, start: int, end: int, limit: float) -> tuple[_Part, ...]:
        if number < 0:
            return ()
        fronts = self._fronts(number, start, limit)
        parts: list[_Part] = []
        while end > start:
            workers = next(p for p, reached in enumerate(fronts.ends) if reached >= end)
            replicas, before = fronts.choices[workers]
            begin = fronts.splits[before]
            inside = self._unfold(number - 1, begin, end, replicas * limit)
            parts.append(_Part(begin, end, replicas, inside))
            end = begin
        return tuple(reversed(parts))

    def attained(self, parts: tuple[_Part, ...]) -> float:
        """The slowest block or boundary of a partition."""
        return self._slowest(len(self.levels) - 1, parts)

    def _slowest(self, number: int, parts: tuple[_Part, ...]) -> float:
        bandwidth, slowest = self.levels[number].bytes_per_second, 0.0
        for part in parts:
            time = self.compute[part.last] - self.compute[part.first]
            time += self.own
            if number > 0:
                time = self._slowest(number - 1, part.inside)
            sync = (
                2
                * (part.num_replicas - 1)
                * (self.weights[part.last] - self.weights[part.first])
                / bandwidth
            )
            if not self.thesis:
                sync /= part.num_replicas * self.below[number]
            sent = 2 * float(self.crossing[part.first]) / bandwidth + 2 * self.message
            if part is parts[0] or not self.counts_boundaries:
                sent = 0.0
            slowest = max(slowest, max(time, sync) / part.num_replicas, sent)
        return slowest
