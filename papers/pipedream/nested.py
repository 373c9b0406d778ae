"""Solve level by level, as thesis 2.4.1 reads; with its costs, the ring's or the published ones.

Level 0 is the layers' compute time. Level k splits a range of cuts into blocks, each on some
components of the level. A block's compute time is the level below's best time on one whole
component. With the ring's costs every stage also has what its passes cost themselves, every
boundary what its messages do. The dynamic program fills A(i -> j, m) with arrays over i; where cuts
are in one line a parametric search gives the same in far less time.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from ...planning.costs.pipeline import (
    StageHeld,
    StageParts,
    boundary_seconds,
    held_moments,
    num_in_flight,
    overheads,
    replica_bytes,
    slowest_links,
    weight_versions,
    worker_bytes,
)
from ...schema.errors import BackendError, InfeasibleError
from ...schema.options import option
from ...schema.pipeline import DevicePool, PipelineProblem
from ...schema.plan import NestedBlock, Plan, Stage
from ...solvers.effort import DEFAULT, Effort
from ...solvers.methods import METHODS
from ...solvers.pipeline.assemble import finish, stage_on
from ...solvers.pipeline.cuts import Cuts, Floats, Mask, cuts_of, layers_of

# The released optimizer's antichains, step by step as it makes them.
#
# Kept for its costs alone, which depend on its order of states and on its reading of what crosses
# a cut: the antichain's members and every ancestor of one that feeds a layer which is not itself
# an ancestor of that same member. Where two members share a parent the parent is counted although
# nothing of it crosses.

Antichain = tuple[int, ...]
Numbers = int | NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AntichainStates:
    """States in the released order: [states] layers as bits, crossing bytes, and ancestry."""

    layer_sets: tuple[int, ...]
    crossing_bytes: Floats
    before: Mask


class _Graph:
    def __init__(self, problem: PipelineProblem) -> None:
        size = len(problem.layers)
        self.children: list[list[int]] = [[] for _ in range(size)]
        self.ancestors = [0] * size
        self.descendants = [0] * size
        parents: list[list[int]] = [[] for _ in range(size)]
        for source, target in problem.links:
            self.children[source].append(target)
            parents[target].append(source)
        for layer in range(size):
            for parent in parents[layer]:
                self.ancestors[layer] |= self.ancestors[parent] | 1 << parent
        for layer in reversed(range(size)):
            for child in self.children[layer]:
                self.descendants[layer] |= self.descendants[child] | 1 << child

    def augmented(self, antichain: Antichain) -> list[int]:
        """The members, and the ancestors that the released code sees crossing."""
        extra: dict[int, None] = {}
        for member in antichain:
            for ancestor in layers_of(self.ancestors[member]):
                for child in self.children[ancestor]:
                    if not self.ancestors[member] >> child & 1 and child != member:
                        extra[ancestor] = None
        return [*(layer for layer in extra if layer not in antichain), *antichain]

    def following(self, antichain: Antichain) -> list[Antichain]:
        members = self.augmented(antichain)
        inside = sum(1 << layer for layer in members)
        found = []
        for member in members:
            for child in self.children[member]:
                if child not in antichain and not self.descendants[child] & inside:
                    found.append(self._replaced(inside ^ 1 << member | 1 << child))
        return found

    def _replaced(self, inside: int) -> Antichain:
        covered = 0
        for layer in layers_of(inside):
            covered |= self.ancestors[layer]
        return tuple(layers_of(inside & ~covered))

    def behind(self, antichain: Antichain) -> int:
        closed = 0
        for layer in self.augmented(antichain):
            closed |= self.ancestors[layer] | 1 << layer
        return closed


def antichain_states(problem: PipelineProblem) -> AntichainStates:
    """Every antichain that replacing one member by a child reaches from the first layer."""
    graph = _Graph(problem)
    start: Antichain = (0,)
    following: dict[Antichain, list[Antichain]] = {}
    known, queue = [start], [start]
    for antichain in queue:
        if antichain in following:
            continue
        following[antichain] = list(dict.fromkeys(graph.following(antichain)))
        known += [entry for entry in following[antichain] if entry not in known]
        queue += following[antichain]
    order = _sorted(known, following)
    sets = tuple(graph.behind(antichain) for antichain in order)
    sent = [
        float(sum(problem.layers[layer].activation_bytes for layer in graph.augmented(antichain)))
        for antichain in order
    ]
    return AntichainStates(
        layer_sets=sets, crossing_bytes=np.array(sent), before=_ancestry(order, following)
    )


def _sorted(known: list[Antichain], following: dict[Antichain, list[Antichain]]) -> list[Antichain]:
    """Topological, by the finishing times of a depth-first search; written without recursion."""
    done: set[Antichain] = set()
    finished: list[Antichain] = []
    for root in known:
        stack = [(root, iter(following[root]))] if root not in done else []
        done.add(root)
        while stack:
            antichain, rest = stack[-1]
            child = next((entry for entry in rest if entry not in done), None)
            if child is None:
                finished.append(antichain)
                stack.pop()
            else:
                done.add(child)
                stack.append((child, iter(following[child])))
    return finished[::-1]


def _ancestry(order: list[Antichain], following: dict[Antichain, list[Antichain]]) -> Mask:
    rank = {antichain: index for index, antichain in enumerate(order)}
    before = np.zeros((len(order), len(order)), bool)
    for antichain in order:
        source = rank[antichain]
        for child in following[antichain]:
            before[:, rank[child]] |= before[:, source]
            before[source, rank[child]] = True
    return before


@dataclass(frozen=True, slots=True)
class Block:
    """States ``first`` (inclusive) to ``last`` on ``num_replicas`` components of a level."""

    first: int
    last: int
    num_replicas: int


Nested = tuple[Block, "tuple[Nested, ...]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """What a range of states sums up to, looked up one at a time.

    Args:
        layer_sets: [states] as bits.
        compute, weights, activations: [states] sums of all that lies in a state.
        crossing: [states].
    """

    layer_sets: tuple[int, ...]
    compute: Floats
    weights: Floats
    activations: Floats
    crossing: Floats

    def between(self, block: Block) -> int:
        """The layers of a block, as bits."""
        return self.layer_sets[block.last] & ~(self.layer_sets[block.first - 1] * (block.first > 0))

    def total(self, values: Floats, block: Block) -> float:
        """The part of a block in one of the sums."""
        return float(values[block.last]) - (float(values[block.first - 1]) if block.first else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """State s is a cut; the range (i, j) holds what lies in j and not in state i - 1.

    Args:
        ranges: The sums that the arrays are the differences of.
        compute, weights, stash: [states, states] sums of ranges; stash is weights + activations.
        crossing: [states].
        valid: [states, states] whether a block may be that range.
        allowed: [states, states] whether a pipeline that starts at i may be split behind k.
        splits: for each state, the states it may be split at.
    """

    ranges: Ranges
    compute: Floats
    weights: Floats
    stash: Floats
    crossing: Floats
    valid: Mask
    allowed: Mask
    splits: tuple[NDArray[np.int64], ...]

    @property
    def size(self) -> int:
        """Number of states."""
        return len(self.ranges.layer_sets)


def ranges_of(cuts: Cuts) -> Ranges:
    """States are all cuts but the empty one."""
    return Ranges(
        layer_sets=cuts.layer_sets[1:],
        compute=(cuts.forward_seconds + cuts.backward_seconds)[0, 1:],
        weights=cuts.weight_bytes[1:],
        activations=cuts.activation_bytes[1:],
        crossing=cuts.crossing_bytes[1:],
    )


def inclusion_states(cuts: Cuts) -> States:
    """States from cuts; a range is what lies between two of which one is in the other."""
    size = cuts.size - 1
    before = np.triu(np.ones((size, size), bool), 1)
    if cuts.before is not None:
        before = cuts.before[1:, 1:]
    starts = np.vstack([np.ones((1, size), bool), before[:-1]])
    return _states(ranges_of(cuts), before, starts, starts)


def published_states(problem: PipelineProblem) -> States:
    """The released optimizer's states, in its order and with its reading of a split.

    A split k of a range (i, j) is any ancestor of j that is no ancestor of i - 1; it need not
    lie behind i - 1, and the range (i, k) is then the difference of two sums all the same.
    """
    found = antichain_states(problem)
    size = len(found.layer_sets)
    allowed = np.ones((size, size), bool)
    allowed[1:] = ~found.before[:, : size - 1].T
    pool = problem.pools[0]
    inside = np.array(
        [[bits >> layer & 1 for layer in range(len(problem.layers))] for bits in found.layer_sets],
        np.float64,
    )
    ranges = Ranges(
        layer_sets=found.layer_sets,
        compute=inside @ (np.array(pool.forward_seconds) + np.array(pool.backward_seconds)),
        weights=inside @ np.array([float(layer.weight_bytes) for layer in problem.layers]),
        activations=inside @ np.array([float(layer.kept_bytes) for layer in problem.layers]),
        crossing=found.crossing_bytes,
    )
    return _states(ranges, found.before, np.triu(np.ones((size, size), bool)), allowed)


def _states(ranges: Ranges, before: Mask, valid: Mask, allowed: Mask) -> States:
    return States(
        ranges=ranges,
        compute=_differences(ranges.compute),
        weights=_differences(ranges.weights),
        stash=_differences(ranges.weights + ranges.activations),
        crossing=ranges.crossing,
        valid=valid,
        allowed=allowed,
        splits=tuple(np.flatnonzero(before[:, last]) for last in range(len(ranges.layer_sets))),
    )


def _differences(values: Floats) -> Floats:
    """[i, j]: the sum in state j less that in state i - 1."""
    starts = np.concatenate([[0.0], values[:-1]])
    found: Floats = values[None, :] - starts[:, None]
    return found


# Nested levels over cuts in one line, by parametric search.
#
# A(i -> j, at most m) does not fall when j grows and does not rise when i grows. So for a time
# limit only the furthest j that can be reached from each i matters. It is found level by level: a
# block of q components at level k ends where the level below, given q times the limit, ends, or
# where synchronising its weights takes too long. Every question is a bisection on prefix sums;
# answers are kept for the limit at hand.


_TOLERANCE = 1e-12
_HALVINGS_BEFORE_PROBING = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """The best nested partition."""

    ranges: Ranges
    nested: tuple[Nested, ...]
    seconds: float


def _line_is_exact(problem: PipelineProblem, cuts: Cuts) -> bool:
    """Whether the search is exact for a problem."""
    return (
        problem.stage_cost != "published"
        and problem.workers == "at_most"
        and problem.replication
        and cuts.before is None
    )


def _search_line(problem: PipelineProblem, cuts: Cuts) -> Answer:
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


_CLOSE = 1 + 1e-12


def solve(problem: PipelineProblem, *, method: str = "auto", effort: Effort = DEFAULT) -> Plan:
    """Minimise the slowest block over nested levels, in seconds per input.

    Exact for the recurrence, with exactly or at most the components of each level: its plans are
    blocks inside blocks, so ``optimal`` is said of those alone. A graph of more than 2,000 cuts
    is cut in its own order only, and the plan claims no bound.

    Raises:
        InfeasibleError: No partition uses what is asked, or passes the published memory test.
    """
    if problem.stage_cost == "published" or problem.cut_rule == "released":
        return _by_tables(problem, published_states(problem), effort)
    cuts = cuts_of(problem, lazy_sources=True)
    if method == "line" or (method == "auto" and _line_is_exact(problem, cuts)):
        answer = _search_line(problem, cuts)
        plan = _plan(problem, answer.ranges, answer.nested, answer.seconds, "parametric search")
        return plan if cuts.complete else _of_own_order(plan)
    plan = _by_tables(problem, inclusion_states(cuts), effort)
    return plan if cuts.complete else _of_own_order(plan)


def _of_own_order(plan: Plan) -> Plan:
    """A plan of one order of the layers out of many, which bounds nothing."""
    method = f"{plan.proof.method}; cuts in the layers' own order only"
    proof = replace(plan.proof, termination="feasible", lower_bound=None, gap=None, method=method)
    return replace(plan, proof=proof)


def _by_tables(problem: PipelineProblem, states: States, effort: Effort) -> Plan:
    tables = _fill(problem, states, effort)
    seconds = float(tables[-1].best[0, -1, -1])
    if not np.isfinite(seconds):
        raise InfeasibleError(
            f"no nested partition of {len(problem.layers)} layers fits {problem.num_devices} "
            "devices under these rules",
            hint="use at_most, allow replication, or give more memory",
        )
    nested = _unfold(problem, states, tables, len(tables) - 1, 0, states.size - 1)
    return _plan(problem, states.ranges, nested, seconds, "dynamic program")


@dataclass(frozen=True, slots=True)
class _Level:
    """One level filled in: compute[i, j] from below, best[i, j, m - 1] here."""

    compute: Floats
    best: Floats
    components: int
    bandwidth: float
    devices_below: int


def _fill(problem: PipelineProblem, states: States, effort: Effort) -> list[_Level]:
    compute, below, tables = states.compute + overheads(problem).stage_seconds[0], 1, []
    levels = problem.pools[0].levels
    for number, level in enumerate(levels):
        is_top = number == len(levels) - 1
        table = _Level(
            compute,
            # For each number of components all ranges lie together in memory.
            np.full((level.num_components, states.size, states.size), np.inf).transpose(1, 2, 0),
            level.num_components,
            level.bytes_per_second,
            below,
        )
        _fill_level(problem, states, table, 1 if is_top else states.size, effort)
        tables.append(table)
        compute = table.best[:, :, -1]
        # The released code divides by the previous level's devices alone.
        below = level.num_components * (1 if problem.stage_cost == "published" else below)
    return tables


def _fill_level(
    problem: PipelineProblem, states: States, table: _Level, rows: int, effort: Effort
) -> None:
    for replicas in range(1, _most(problem, table.components) + 1):
        table.best[:, :, replicas - 1] = _single(problem, states, table, replicas)
    every = np.arange(1, _most(problem, table.components - 1) + 1)[:, None]
    for last, splits in enumerate(states.splits):
        if effort.should_stop():
            raise BackendError(
                "the search was stopped, and nested levels have no plan before their end",
                hint=f"give it more time, or solve flat (leave {option('stage_cost')} "
                "published out)",
            )
        found = table.best[: min(rows, last + 1), last]
        seconds = _block_seconds(problem, states, table, last, every)
        for workers in range(2, table.components + 1):
            if problem.workers == "at_most":
                np.minimum(found[:, workers - 1], found[:, workers - 2], out=found[:, workers - 1])
            if not len(splits):
                continue
            some, free = slice(_most(problem, workers - 1)), table.components - workers
            blocks = _in_memory(problem, states, last, free, every[some], seconds[some])
            _split(states, table, found, last, workers, blocks)


def _most(problem: PipelineProblem, workers: int) -> int:
    return workers if problem.replication else min(1, workers)


def _single(problem: PipelineProblem, states: States, table: _Level, replicas: int) -> Floats:
    """[i, j] time of one block alone."""
    seconds = cost(
        problem, table.compute, states.weights, replicas, table.bandwidth, table.devices_below
    )
    limit = _published_limit(problem)
    if limit is not None:
        stashes = ceil((table.components - replicas) / replicas)
        seconds = np.where(stashes * states.stash > limit, np.inf, seconds)
    found: Floats = np.where(states.valid, seconds, np.inf)
    return found


def _split(
    states: States, table: _Level, found: Floats, last: int, workers: int, blocks: Floats
) -> None:
    """Lower ``found[i, workers - 1]`` to the best of a pipeline up to a split, then one block.

    ``blocks`` [replicas, splits of last] holds the time of each block up to ``last``. Those that
    alone take what every row attains are left out.
    """
    splits, now = states.splits[last], found[:, workers - 1]
    if len(found) == 1:  # the top level needs one row: all replicas at once
        before = table.best[0, splits][:, workers - 1 - np.arange(1, len(blocks) + 1)].T
        total = np.where(states.allowed[0, splits], np.maximum(before, blocks), np.inf)
        now[0] = min(now[0], total.min())
        return
    better = blocks < now.max()
    for row in np.flatnonzero(better.any(axis=1)):
        kept = splits[better[row]]
        total = np.maximum(
            table.best[: len(found), kept, workers - row - 2], blocks[row, better[row]]
        )
        total = np.where(states.allowed[: len(found), kept], total, np.inf)
        np.minimum(now, total.min(axis=1), out=now)


def _block_seconds(
    problem: PipelineProblem, states: States, table: _Level, last: int, replicas: Numbers
) -> Floats:
    """[splits]: a pipeline's last block with its boundaries; [r, splits] for replicas [r, 1]."""
    splits = states.splits[last]
    compute, weights = table.compute[splits + 1, last], states.weights[splits + 1, last]
    below = 1 if problem.stage_cost == "published" else table.devices_below
    seconds = cost(problem, compute, weights, replicas, table.bandwidth, below)
    if problem.count_boundaries:
        sent = states.crossing[splits]
        shared = replicas if problem.stage_cost == "published" else 1
        into = 2 * sent / (table.bandwidth * shared) + 2 * overheads(problem).message_seconds
        seconds = np.maximum(seconds, into)
        if problem.stage_cost == "published" and last < states.size - 1:
            out = 2 * states.crossing[last] / (table.bandwidth * replicas)
            seconds = np.maximum(seconds, out)
    return seconds


def _in_memory(
    problem: PipelineProblem, states: States, last: int, free: int, replicas: Numbers, block: Floats
) -> Floats:
    """The seconds of ``last``'s blocks, infinite where these do not fit beside ``free`` workers."""
    limit = _published_limit(problem)
    if limit is None:
        return block
    stash = np.ceil(free / replicas) * states.stash[states.splits[last] + 1, last]
    return np.where(stash > limit, np.inf, block)


def cost(
    problem: PipelineProblem,
    compute: Floats,
    weights: Floats,
    replicas: Numbers,
    bandwidth: float,
    below: int,
) -> Floats:
    """The formulas of planning/costs/pipeline.py on arrays."""
    sync = (replicas - 1) * weights / bandwidth
    if problem.stage_cost == "published":
        return (compute + 4 * sync / replicas / below) / replicas
    if problem.stage_cost == "thesis":
        return np.maximum(compute, 2 * sync) / replicas
    return np.maximum(compute / replicas, 2 * sync / (replicas * replicas * below))


def _published_limit(problem: PipelineProblem) -> int | None:
    """The released optimizer's memory test.

    It stashes ceil((M - m) / q) times weights and activations for a block of q replicas that
    ends a pipeline of m of M components; none for m = M, so that data parallelism over all
    always passes.
    """
    return problem.pools[0].limit_bytes if problem.stage_cost == "published" else None


def _unfold(
    problem: PipelineProblem,
    states: States,
    tables: list[_Level],
    level: int,
    first: int,
    last: int,
) -> tuple[Nested, ...]:
    """The blocks of a level's best pipeline, each with the blocks inside it."""
    if level < 0:
        return ()
    blocks = _blocks(problem, states, tables[level], first, last)
    return tuple(
        (block, _unfold(problem, states, tables, level - 1, block.first, block.last))
        for block in blocks
    )


def _blocks(
    problem: PipelineProblem, states: States, table: _Level, first: int, last: int
) -> list[Block]:
    blocks: list[Block] = []
    workers = table.components
    while True:
        value = table.best[first, last, workers - 1] * _CLOSE
        if problem.workers == "at_most" and workers > 1:
            if table.best[first, last, workers - 2] <= value:
                workers -= 1
                continue
        if workers <= _most(problem, workers):
            alone = _single_value(problem, states, table, first, last, workers)
            if alone <= value:
                return [Block(first, last, workers), *reversed(blocks)]
        split, replicas = _best_split(problem, states, table, first, last, workers)
        blocks.append(Block(split + 1, last, replicas))
        last, workers = split, workers - replicas


def _single_value(
    problem: PipelineProblem, states: States, table: _Level, first: int, last: int, replicas: int
) -> float:
    limit = _published_limit(problem)
    if limit is not None:
        stashes = ceil((table.components - replicas) / replicas)
        if stashes * states.stash[first, last] > limit:
            return float("inf")
    compute, weights = table.compute[first, last], states.weights[first, last]
    found = cost(problem, compute, weights, replicas, table.bandwidth, table.devices_below)
    return float(found)


def _best_split(
    problem: PipelineProblem, states: States, table: _Level, first: int, last: int, workers: int
) -> tuple[int, int]:
    least, best = float("inf"), (0, 0)
    splits, free = states.splits[last], table.components - workers
    for replicas in range(1, _most(problem, workers - 1) + 1):
        block = _block_seconds(problem, states, table, last, replicas)
        block = _in_memory(problem, states, last, free, replicas, block)
        total = np.maximum(table.best[first, splits, workers - replicas - 1], block)
        total = np.where(states.allowed[first, splits], total, np.inf)
        at = int(np.argmin(total))
        if total[at] < least:
            least, best = float(total[at]), (int(splits[at]), replicas)
    return best


def _plan(
    problem: PipelineProblem,
    ranges: Ranges,
    nested: tuple[Nested, ...],
    seconds: float,
    method: str,
) -> Plan:
    leaves = _leaves(problem, nested, len(problem.pools[0].levels) - 1, (), 0)
    stages = [_stage(problem, ranges, leaves, index) for index in range(len(leaves))]
    return finish(
        problem,
        stages,
        recompute=False,
        objective=seconds,
        bound=None,
        step=problem.num_microbatches * seconds,
        method=f"{method} over {len(ranges.layer_sets) + 1} cuts, nested levels, "
        f"{problem.stage_cost} prices; of nested placements alone",
    )


Path = tuple[NestedBlock, ...]
Leaf = tuple[Path, Block, int]


def _leaves(
    problem: PipelineProblem, nested: tuple[Nested, ...], level: int, path: Path, device: int
) -> list[Leaf]:
    """Every lowest block with its path from the top and its first device."""
    width = 1
    for part in problem.pools[0].levels[:level]:
        width *= part.num_components
    found: list[Leaf] = []
    for index, (block, inside) in enumerate(nested):
        here = (*path, NestedBlock(index=index, num_replicas=block.num_replicas))
        if level == 0:
            found.append((here, block, device))
        else:
            found += _leaves(problem, inside, level - 1, here, device)
        device += block.num_replicas * width
    return found


def _devices(problem: PipelineProblem, path: Path, first: int) -> tuple[int, ...]:
    """The devices of a lowest block: the same ones in each component that its parents take."""
    found, width = [first], problem.pools[0].num_devices
    for block, level in zip(path, reversed(problem.pools[0].levels), strict=True):
        width //= level.num_components
        found = [
            device + width * number for number in range(block.num_replicas) for device in found
        ]
    return tuple(sorted(found))


def _product(path: Path) -> int:
    total = 1
    for block in path:
        total *= block.num_replicas
    return total


def _with_passing(
    problem: PipelineProblem, pool: DevicePool, layers: Sequence[int], parts: StageParts
) -> StageParts:
    """The parts of one stage of layers, with what a whole backward pass takes for a while."""
    kept = gradients = most = with_all = 0.0
    for layer in layers:
        aside = pool.layer_workspace_bytes[layer] if pool.layer_workspace_bytes else 0
        kept += problem.layers[layer].kept_bytes
        own = problem.layers[layer]
        gradients += own.weight_bytes + own.padding_bytes + own.shared_weight_bytes
        most, with_all = max(most, kept + aside), max(with_all, kept + aside - gradients)
    return parts._replace(passing=most - kept, waiting=with_all + gradients - kept)


def _stage(problem: PipelineProblem, ranges: Ranges, leaves: list[Leaf], index: int) -> Stage:
    path, block, device = leaves[index]
    pool, replicas = problem.pools[0], [_product(leaf[0]) for leaf in leaves]
    name, count, own_replicas = problem.schedule, problem.num_microbatches, replicas[index]
    in_flight = num_in_flight(name, sum(replicas[index:]), own_replicas, count)
    versions = weight_versions(name, in_flight)
    moments = held_moments(name, in_flight, own_replicas, count)
    own = overheads(problem)
    compute = ranges.total(ranges.compute, block) + own.stage_seconds[0]
    layers = layers_of(ranges.between(block))
    inside, share = [problem.layers[layer] for layer in layers], ceil(count / own_replicas)
    parts = StageParts(
        weight=ranges.total(ranges.weights, block) + sum(one.padding_bytes for one in inside),
        tied=0.0,
        kept=ranges.total(ranges.activations, block),
        passing=0.0,
        waiting=0.0,
        halved=0.0,
        received=float(ranges.crossing[block.first - 1]) if block.first else 0.0,
        sent=float(ranges.crossing[block.last]),
        buffers=sum(2 * one.buffer_bytes + share * one.statistics_bytes for one in inside),
    )
    if pool.base_memory_bytes is not None:
        parts = _with_passing(problem, pool, layers, parts)
    held = StageHeld(in_flight, versions, moments)
    whole = float(replica_bytes(problem, pool, own_replicas, held, parts, recompute=False))
    return stage_on(
        problem,
        pool,
        _devices(problem, path, device),
        memory_bytes=round(
            whole
            if pool.base_memory_bytes is None
            else worker_bytes(problem, pool, own_replicas, whole)
        ),
        layers=tuple(problem.layers[layer].id for layer in layers),
        num_in_flight=in_flight,
        weight_versions=versions,
        seconds_per_input=_lowest_price(problem, ranges, block, replicas[index]),
        compute_seconds=compute,
        forward_seconds=sum(pool.forward_seconds[layer] for layer in layers)
        + own.forward_seconds[0],
        output_seconds=_output(problem, ranges, leaves, index),
        nesting=path,
    )


def _lowest_price(
    problem: PipelineProblem, ranges: Ranges, block: Block, num_replicas: int
) -> float:
    """The lowest level's cost, shared by the components of the levels above."""
    own = overheads(problem).stage_seconds[0]
    compute = np.array([ranges.total(ranges.compute, block) + own])
    weights = np.array([ranges.total(ranges.weights, block)])
    bandwidth = problem.pools[0].levels[0].bytes_per_second
    alone = cost(problem, compute, weights, block.num_replicas, bandwidth, 1)
    return float(alone[0]) * block.num_replicas / num_replicas


def _output(problem: PipelineProblem, ranges: Ranges, leaves: list[Leaf], index: int) -> float:
    """The boundary to the next stage, at the highest level where their blocks differ."""
    if index + 1 == len(leaves):
        return 0.0
    path, block, _ = leaves[index]
    after = leaves[index + 1][0]
    depth = next(d for d in range(len(path)) if path[d].index != after[d].index)
    links = slowest_links(problem.pools[0].levels)
    crossing = float(ranges.crossing[block.last])
    message = overheads(problem).message_seconds
    return boundary_seconds(crossing, links[len(path) - 1 - depth], message)


METHODS.add("pipedream-nested", solve, __name__)
