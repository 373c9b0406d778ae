"""The least time of the slowest stage: over cuts in one line, and over any graph of cuts.

In one line (``search_line``): for a limit of time, each state of the devices keeps the least cut
from which it can run everything behind. There is one for each bandwidth that the next boundary may
need. A shorter remainder is never harder to run, so the least cut is all that matters, and one pass
over the moves decides the limit. The answer is among finitely many times: the search halves, jumps
to the time that a found plan attains, and ends when the limit just below it fails. O(moves) a
limit, about twenty limits.

    layers of 3, 1, 2 s on two equal devices, links free
    limit 3: the last device takes from its end 2 + 1, the other is left 3: it fits
    limit just below 3: the last takes 2 (2 + 1 is too long), the other 1; 3 is left over
    so the least is 3

In any graph (``search_graph``): f(state, cut) is the least time of the slowest stage that runs
everything behind ``cut`` on the devices of ``state``. One array of cuts a state; each move folds
one stage in. O(moves x cuts^2).

    the same: f(one device, after 0, 1, 2 layers) = 6, 3, 2
    f(two devices, 0) = min(max(3, 3), max(4, 2)) = 3, cut after the first layer
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...planning.costs.pipeline import StageHeld
from ...schema.pipeline import PipelineProblem
from ..effort import DEFAULT, Effort, OutOfTimeError
from .cuts import Floats
from .placements import Move, PlacedStage, PlacementSpace, final_states
from .stage_costs import StageCosts, StoppedError

TOLERANCE = 1e-12
_HALVINGS_BEFORE_PROBING = 12

Ints = NDArray[np.int64]


def search_line(
    problem: PipelineProblem,
    costs: StageCosts,
    space: PlacementSpace,
    extra_bytes: float = 0.0,
    *,
    below: float = np.inf,
    effort: Effort = DEFAULT,
    improves: bool = True,
) -> list[PlacedStage] | None:
    """Find the best placement, first stage first; None where nothing fits the memory.

    Exact up to one part in 10^12; any placement, where it ``improves`` none. Arguments and errors
    as of ``search_graph``.
    """
    line = MoveLine(problem, costs, space, extra_bytes, effort)
    placed = line.place(below)
    if placed is None or not improves:
        return placed
    high, low, halvings = objective(costs, placed), 0.0, 0
    probe = False
    while high > low * (1 + TOLERANCE) and high > 0:
        limit = high * (1 - TOLERANCE) if probe else _between(low, high)
        try:
            found = line.place(limit)
        except OutOfTimeError:
            raise StoppedError(low, placed) from None
        halvings += 1
        if found is None:
            low, probe = limit, False
        else:
            placed, high = found, min(limit, objective(costs, found))
            # After some halvings the plan in hand is often the best one: to ask just below what it
            # attains proves that at once, where halving would go on to the last digit.
            probe = halvings > _HALVINGS_BEFORE_PROBING
    return placed


def _between(low: float, high: float) -> float:
    # Nothing is proved impossible yet: steps of eight find the magnitude. Then the geometric mean,
    # as the ratio is what has to shrink.
    if low == 0:
        return high / 8
    return float(np.sqrt(low * high)) if high > 2 * low else (low + high) / 2


class MoveLine:
    """The moves of a space as arrays, batched by the devices their targets use."""

    def __init__(
        self,
        problem: PipelineProblem,
        costs: StageCosts,
        space: PlacementSpace,
        extra_bytes: float,
        effort: Effort,
    ) -> None:
        self.costs, self.space, self.effort = costs, space, effort
        self.num_states, self.size = len(space.states), costs.cuts.size
        self.num_classes = len(space.bandwidths)
        self._arrays(problem, extra_bytes)
        self.effort.check()
        self._batches()
        self.effort.check()
        self._curves()

    def _arrays(self, problem: PipelineProblem, extra_bytes: float) -> None:
        moves = self.space.moves
        self.kinds, self.kind = moves.numbered("pool", "num_replicas", "span")
        self.source, self.target = moves.source, moves.target
        self.span, self.need = moves.span, moves.need
        limits = [pool.limit_bytes for pool in problem.pools]
        self.limited = any(limit is not None for limit in limits)
        if not self.limited:
            return
        # Few distinct rows first: rows of moves would take seconds to sort.
        found, of_move = moves.numbered("pool", "num_replicas", "workers")
        most = [np.inf if limit is None else limit + extra_bytes for limit in limits]
        asked = [(pool, min(m, 2), self.costs.stashed(m, workers)) for pool, m, workers in found]
        kinds = list(dict.fromkeys(asked))
        place = {kind: number for number, kind in enumerate(kinds)}
        self.memory_kind = np.array([place[kind] for kind in asked], np.int64)[of_move]
        # [combinations, begins, ends] whether a stage fits.
        self.room = np.zeros((len(kinds), self.size, self.size), bool)
        # The least cut from which a stage up to each one fits; where what it receives makes a later
        # one fail, ``_fit`` looks on.
        self.floor = np.full((len(kinds), self.size + 1), self.size, np.int64)
        for index, kind in enumerate(kinds):
            self.effort.check()
            self.room[index] = self.costs.own_bytes(*kind) <= most[kind[0]]
            fits = self.room[index].any(axis=0)
            self.floor[index, :-1] = np.where(fits, self.room[index].argmax(axis=0), self.size)

    def _batches(self) -> None:
        totals = np.array([sum(state.used) for state in self.space.states], np.int64)
        of_move = totals[self.target]
        # Moves stand by target, and targets by the devices in use: each run is complete before it
        # is a source.
        edges = np.flatnonzero(np.diff(of_move)) + 1
        starts = [0, *edges.tolist()] if len(of_move) else []
        ends = [*edges.tolist(), len(of_move)] if len(of_move) else []
        self.batches: list[tuple[slice, Ints, Ints]] = []
        for start, end in zip(starts, ends, strict=True):
            part = self.target[start:end]
            heads = np.concatenate([[0], np.flatnonzero(np.diff(part)) + 1])
            self.batches.append((slice(start, end), heads, part[heads]))

    def _curves(self) -> None:
        """Each kind's busy time and, in one array, its weights' synchronisation, over cuts."""
        cuts = self.costs.cuts
        slopes = [self.costs.slopes(*kind) for kind in self.kinds]
        self.busy: dict[tuple[float, float, int], Floats] = {}
        self.own: dict[tuple[float, float, int], float] = {}
        self.busy_of: list[tuple[float, float, int]] = []
        for (pool, _, _), slope in zip(self.kinds, slopes, strict=True):
            key = (slope.per_compute, slope.per_weight, pool)
            if key not in self.busy:
                self.busy[key] = (
                    slope.per_compute * self.costs.compute_seconds[pool]
                    + slope.per_weight * cuts.weight_bytes
                )
                self.own[key] = slope.per_compute * float(self.costs.own_seconds[pool])
            self.busy_of.append(key)
        self.sync = [(slope.sync_per_weight, slope.sync_start) for slope in slopes]

    def place(self, limit: float) -> list[PlacedStage] | None:
        """A placement whose every stage and boundary takes at most ``limit``, or None.

        Raises:
            OutOfTimeError: The effort's limit came first.
        """
        reach = self._reach(limit)
        allowed = self._allowed(limit)
        # [states, bandwidths] the least cut behind which all runs in time, by what the boundary
        # needs.
        least = np.full((self.num_states, self.num_classes), self.size, np.int64)
        # ``size`` means not at all; without devices only the end of the model is left.
        least[0] = self.size - 1
        kept: list[list[Ints]] = []
        for part, heads, targets in self.batches:
            self.effort.check()
            results = self._extend(part, least, reach, allowed)
            for index, found in enumerate(results, start=1):
                least[targets, index] = np.minimum.reduceat(found, heads)
            kept.append(results)
        # Nothing is sent into cut 0, so its boundary is in time even over the slowest link.
        done = np.flatnonzero(least[:, -1] == 0)
        if not len(done):
            return None
        return self._walk(int(done[0]), least, kept)

    def _reach(self, limit: float) -> Ints:
        """[kinds, cuts + 1]: the least cut from which a stage up to this one is in time."""
        # Prefix sums never fall, so the least begin is found by bisection for all ends at once.
        weights = self.costs.cuts.weight_bytes
        busy = {
            key: np.searchsorted(curve, curve - (limit * (1 + 1e-15) - self.own[key]), side="left")
            for key, curve in self.busy.items()
        }
        reach = np.full((len(self.kinds), self.size + 1), self.size, np.int64)
        for index, (sync, start) in enumerate(self.sync):
            found = busy[self.busy_of[index]]
            # The all-reduce overlaps with passes: each has to be in time by itself.
            if start > limit:
                found = np.full_like(found, self.size)
            elif sync > 0:
                left = (limit - start) / sync
                found = np.maximum(found, np.searchsorted(weights, weights - left))
            reach[index, :-1] = found
        return reach

    def _allowed(self, limit: float) -> Ints:
        """[bandwidths, cuts + 2]: the first cut from here on whose boundary is in time."""
        positions = np.arange(self.size)
        # A boundary that is too slow at a cut is passed by: the next allowed one, from the last
        # cut back.
        inside = np.where(self.costs.boundary_seconds <= limit, positions[None, :], self.size)
        padded = np.full((self.num_classes, self.size + 2), self.size, np.int64)
        padded[:, : self.size] = np.minimum.accumulate(inside[:, ::-1], axis=1)[:, ::-1]
        return padded

    def _extend(self, part: slice, least: Ints, reach: Ints, allowed: Ints) -> list[Ints]:
        # The stage ends where the rest begins: the least cut behind it, over a link both can have.
        last = least[self.source[part], self.need[part]]
        first = reach[self.kind[part], last]
        if self.limited:
            first = np.maximum(first, self.floor[self.memory_kind[part], last])
        results = []
        # Class 0 is a device and itself, which no boundary is.
        for wanted in range(1, self.num_classes):
            table = np.maximum(self.span[part], wanted)
            found = allowed[table, first]
            if self.limited:
                found = self._fit(part, found, last, table, allowed)
            # A stage holds a layer at least.
            results.append(np.where(found < last, found, self.size))
        return results

    def _fit(self, part: slice, found: Ints, last: Ints, table: Ints, allowed: Ints) -> Ints:
        """Move each first cut on until the stage fits its device's memory."""
        # What crosses into a stage is kept as well, so a later cut may need more memory; hence one
        # cut after another is tried, twice as many at a time.
        found, width = found.copy(), 2
        open_ = np.flatnonzero(found < last)
        while len(open_):
            tried = np.minimum(found[open_, None] + np.arange(width), self.size)
            fits = self._fits(part.start + open_, tried, last[open_])
            fits &= allowed[table[open_, None], tried] == tried
            hit = fits.argmax(axis=1)
            is_hit = fits[np.arange(len(open_)), hit]
            found[open_] = np.where(is_hit, tried[np.arange(len(open_)), hit], tried[:, -1] + 1)
            open_ = open_[~is_hit & (found[open_] < last[open_])]
            width *= 2
        return found

    def _fits(self, moves: Ints, tried: Ints, last: Ints) -> NDArray[np.bool_]:
        first, end = np.minimum(tried, self.size - 1), np.minimum(last, self.size - 1)[:, None]
        found: NDArray[np.bool_] = self.room[self.memory_kind[moves][:, None], first, end]
        return found

    def _walk(self, state: int, least: Ints, kept: list[list[Ints]]) -> list[PlacedStage]:
        placed: list[PlacedStage] = []
        # From the whole model back: the same choices, now by what each state kept.
        wanted = self.num_classes - 1
        cut = 0
        while state != 0:
            move = self._into(state, wanted, cut, kept)
            chosen = self.space.moves[move]
            following = int(least[chosen.source, self.need[move]])
            placed.append((cut, following, chosen))
            state, wanted, cut = chosen.source, int(self.need[move]), following
        return placed

    def _into(self, state: int, wanted: int, cut: int, kept: list[list[Ints]]) -> int:
        lowest = int(np.searchsorted(self.target, state))
        for (part, _, _), results in zip(self.batches, kept, strict=True):
            if part.start <= lowest < part.stop:
                found = results[wanted - 1][lowest - part.start :]
                return lowest + int(np.flatnonzero(found == cut)[0])
        raise AssertionError("every reached state has a move into it")


def objective(costs: StageCosts, placed: list[PlacedStage]) -> float:
    """The slowest stage or boundary of a placement, seconds per input."""
    slowest = 0.0
    for first, last, move in placed:
        stage = costs.stage_seconds(first, last, move.pool, move.num_replicas, move.span)
        gap: Any = costs.boundary_seconds[move.gap, last]
        slowest = max(slowest, stage, float(gap))
    return slowest


_CLOSE = 1 + 1e-9


def search_graph(
    problem: PipelineProblem,
    costs: StageCosts,
    space: PlacementSpace,
    extra_bytes: float = 0.0,
    *,
    below: float = np.inf,
    effort: Effort = DEFAULT,
) -> list[PlacedStage] | None:
    """Find the best placement, first stage first; None where nothing fits the memory.

    ``extra_bytes`` raises every limit of memory. Only placements of at most ``below`` seconds are
    looked for: a state and cut whose work ahead takes longer even spread over all devices left is
    passed over.

    Raises:
        StoppedError: The effort's limit came first.
    """
    size = costs.cuts.size
    best = np.full((len(space.states), size), np.inf)
    move_of = np.full((len(space.states), size), -1, np.int32)
    next_cut = np.zeros((len(space.states), size), np.int32)
    best[0, -1] = 0.0
    table = _Table(problem, costs, extra_bytes)
    ahead = _least_ahead(problem, costs, space)
    rows = np.arange(size)
    used = [sum(state.used) for state in space.states]
    for number, move in enumerate(space.moves):
        if effort.should_stop():
            raise StoppedError(0.0)
        behind = np.maximum(best[move.source], costs.boundary_seconds[move.gap])
        # Only cuts from which the rest can still be run; with a limit, also those whose work ahead
        # fits the devices left even if it could be spread at will.
        hopeful = behind < np.inf
        if below < np.inf:
            left = problem.num_devices - used[move.source]
            hopeful = (behind <= below) & (ahead <= below * left * _CLOSE)
        cuts = np.flatnonzero(hopeful)
        if not len(cuts):
            continue
        # [begins, ends] of stages; the best end for each begin.
        total = np.maximum(table.cost(move)[:, cuts], behind[cuts])
        chosen = total.argmin(axis=1)
        value, following = total[rows, chosen], cuts[chosen]
        better = (value < best[move.target]) & (value <= below)
        best[move.target][better] = value[better]
        move_of[move.target][better] = number
        next_cut[move.target][better] = following[better]
    final = final_states(problem, space)
    state = final[int(np.argmin(best[final, 0]))]
    if not np.isfinite(best[state, 0]):
        return None
    return _placed(space, state, move_of, next_cut)


def _least_ahead(problem: PipelineProblem, costs: StageCosts, space: PlacementSpace) -> Floats:
    """[cuts] device seconds per input that the layers before a cut need at the least."""
    kinds, _ = space.moves.numbered("pool", "num_replicas", "span")
    found = np.full(costs.cuts.size, np.inf)
    for pool in range(len(problem.pools)):
        rates = [
            m * costs.slopes(own, m, span).per_compute for own, m, span in kinds if own == pool
        ]
        # Layers on the pool that is best for them: only of one pool is a set's work known.
        if rates and len(problem.pools) == 1:
            work = costs.compute_seconds[pool] + costs.own_seconds[pool]
            found = np.minimum(found, min(rates) * work)
    found[0] = 0.0
    return np.where(np.isfinite(found), found, 0.0)


def _placed(
    space: PlacementSpace, state: int, move_of: NDArray[np.int32], next_cut: NDArray[np.int32]
) -> list[PlacedStage]:
    placed: list[PlacedStage] = []
    cut = 0
    while state != 0:
        move = space.moves[int(move_of[state, cut])]
        following = int(next_cut[state, cut])
        placed.append((cut, following, move))
        state, cut = move.source, following
    return placed


class _Table:
    """Price matrices with memory limits applied, each made once."""

    def __init__(self, problem: PipelineProblem, costs: StageCosts, extra_bytes: float) -> None:
        self.problem, self.costs, self.extra_bytes = problem, costs, extra_bytes
        self.seconds: dict[tuple[int, int, int], Floats] = {}
        self.limited: dict[tuple[int, int, int, StageHeld], Floats] = {}

    def cost(self, move: Move) -> Floats:
        key = (move.pool, move.num_replicas, move.span)
        if key not in self.seconds:
            self.seconds[key] = self.costs.matrix(*key)
        limit = self.problem.pools[move.pool].limit_bytes
        if limit is None:
            return self.seconds[key]
        stash = self.costs.stashed(move.num_replicas, move.workers)
        if (*key, stash) not in self.limited:
            seconds = self.seconds[key].copy()
            used = self.costs.own_bytes(move.pool, move.num_replicas, stash)
            seconds[used > limit + self.extra_bytes] = np.inf
            self.limited[(*key, stash)] = seconds
        return self.limited[(*key, stash)]
