"""A lower bound of a flushing step that adds up over stages, and tables of its least sums.

The first microbatch goes through all stages and back. When its gradient arrives at a stage, that
stage's replica has g seconds of passes left. The last gradient that it makes still has to go
through the stages before it. So for every stage the step takes at least

    sum over stages (C + 2c)  +  g of that stage  +  all-reduce and update of the first stage

with C forward + backward of a microbatch and c a transfer, both with their fixed costs. A replica
of R microbatches that admits k before its first backward pass has g = (R-1) b + (R-k) f left under
1F1B. Equal stages without transfers attain the bound: (p + M - 1) C.

    two stages of f = 1 and b = 2 s, 4 microbatches, no transfers: the sum is 3 + 3 = 6
    the first stage admits 2: g = 3 x 2 + 2 x 1 = 8; the last admits 1: g = 3 x 2 + 3 x 1 = 9
    the step takes at least 6 + 9 = 15 s, and takes them: (2 + 4 - 1) x 3

Two more hold for each stage, and need the sum of the stages behind it, T = sum (C + 2c):

- It admits microbatch i + k only when the gradient of i is back. So R - 1 = q k + r microbatches
  behind the first take q T and r passes.
- It ends with its own all-reduce and update, where these outlast the way back and the first
  stage's.

They do not add up over stages. So tables use them to leave out what a known step excludes, and the
tree search (makespan.py) to bound what follows the stages that it has placed.

The tables: S(state, link, cut) is the least sum over stages of everything behind ``cut`` on the
devices of ``state``. Its first boundary is at least as slow as ``link``, and no stage has more than
``limit`` seconds left. Cuts in one line: a stage's end is a window, so a range-minimum table for
each source answers all cuts at once, O(moves x cuts) for a limit. Otherwise O(moves x cuts^2).

Moves are taken in batches by how many devices their targets use, so every source is complete before
its moves are looked at. A row is a source with the pool and the link of what comes next; moves that
differ in replicas alone share it.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...planning.costs.comm import Wire, collective_seconds
from ...planning.costs.pipeline import StageHeld
from ...planning.schedules.replay import StepStage, flush_step_seconds
from ...schema.pipeline import PipelineProblem
from ..effort import DEFAULT, Effort
from .cuts import Floats, Mask
from .placements import Move, PlacedStage, PlacementSpace
from .stage_costs import StageCosts

Ints = NDArray[np.int64]


class MoveKind(NamedTuple):
    """All that a move's costs depend on; moves of one kind differ in their target only."""

    pool: int
    num_replicas: int
    span: int
    held: StageHeld
    left_forward: int
    """Forward passes in g."""
    left_backward: int


class StepModel:
    """Sums and maxima of one problem's stages, with or without recomputation.

    ``pessimistic`` takes g as (R-1)(C + 2c) + all-reduce + update instead: every transfer holds
    its stage up. That bounds nothing, but its optimum is often a better plan where links are slow.
    Stages that alone take ``most_seconds``, a step that is known, are left out.
    """

    def __init__(
        self,
        problem: PipelineProblem,
        costs: StageCosts,
        *,
        pessimistic: bool,
        most_seconds: float = np.inf,
    ) -> None:
        self.problem, self.costs, self.pessimistic = problem, costs, pessimistic
        self.most_seconds = most_seconds
        self.size = costs.cuts.size
        self.is_line = costs.is_line
        self.forward = costs.cuts.forward_seconds
        self.compute = costs.compute_seconds
        # Of a stage that ends at a cut, ``closing`` there less ``compute`` where it begins.
        self.closing: Floats = self.compute + costs.own_seconds[:, None]
        self.backward = self.compute - self.forward
        rates = np.array(costs.bandwidths)[:, None]
        self.transfer: Floats = 2 * costs.cuts.crossing_bytes[None, :] / rates
        self.transfer = self.transfer + 2 * costs.message_seconds
        self.weights = costs.cuts.weight_bytes
        self._ends = np.arange(self.size)
        self._last_in_memory: dict[tuple[int, int, StageHeld], Ints] = {}
        self._rooms: dict[tuple[int, int, StageHeld], Mask] = {}
        self._later: dict[MoveKind, list[tuple[int, Floats]]] = {}

    def kind(self, pool: int, num_replicas: int, span: int, workers: int, is_last: int) -> MoveKind:
        """The kind of a move's stage; ``workers`` from it on, ``is_last`` if no stage follows."""
        problem, count = self.problem, self.problem.num_microbatches
        held = self.costs.stashed(num_replicas, workers)
        share = ceil(count / num_replicas)
        left = max(share - held.in_flight, 0)
        if problem.traits.order == "forward-first":
            behind = workers - num_replicas
            left = share - 1 if is_last else max((count - behind) // num_replicas, 0)
        if self.pessimistic:
            left = share - 1
        return MoveKind(pool, num_replicas, span, held, left, max(share - 1, 0))

    def end(self, kind: MoveKind) -> float:
        """Seconds of all-reduce and update for each byte of a stage's weights."""
        update = self.problem.pools[kind.pool].update_seconds / max(self.costs.total_weight, 1.0)
        rate = self.costs.reductions[kind.pool].rate(self.costs.bandwidths[kind.span])
        ring = collective_seconds("all-reduce", 1.0, kind.num_replicas, Wire(0.0, rate))
        return ring + update

    def end_start(self, kind: MoveKind) -> float:
        """Seconds of a stage's all-reduce beside its bytes."""
        return self.costs.reductions[kind.pool].start_seconds(kind.num_replicas)

    def step_end(self, kind: MoveKind) -> Floats:
        """[cuts] reductions and update of a first stage that ends at each cut."""
        found: Floats = self.end(kind) * self.weights + self.end_start(kind)
        split = self.costs.cuts.split_bytes
        if split is not None:
            found = found + self.costs.tied_seconds_per_byte(kind.num_replicas) * split[0]
        return found

    def own_left(self, kind: MoveKind) -> float:
        """The part of g that every stage has: what its passes cost themselves."""
        own = self.costs.overheads
        left = (
            kind.left_forward * own.forward_seconds[kind.pool]
            + kind.left_backward * own.backward_seconds[kind.pool]
        )
        return left + self.end_start(kind) if self.pessimistic else left

    def left(self, kind: MoveKind) -> Floats:
        """[cuts] of which the difference between two is the rest of g."""
        found: Floats = (
            kind.left_forward * self.forward[kind.pool]
            + kind.left_backward * self.backward[kind.pool]
        )
        return found + self.end(kind) * self.weights if self.pessimistic else found

    def later(self, kind: MoveKind) -> list[tuple[int, Floats]]:
        """What a step takes at least from a stage's first pass to its update, in two ways.

        Returns:
            Each way's number of times the sum from the stage on, and [cuts, cuts] its other
            seconds for a stage between two cuts.
        """
        if kind in self._later:
            return self._later[kind]
        left = self.left(kind) + self.end(kind) * self.weights
        own = self.own_left(kind) + self.end_start(kind)
        found = self._later[kind] = [(1, left[None, :] - left[:, None] + own)]
        rounds = [self.round_of(kind, first) for first in range(self.size)]
        rests = [each[1] + self.reduce_seconds(kind, k) for k, each in enumerate(rounds) if each]
        # Whether it waits depends on the kind alone: all begins wait, or none does.
        if rounds[0] is not None:
            found.append((rounds[0][0] + 1, np.array(rests)))
        return found

    def round_of(self, kind: MoveKind, first: int) -> tuple[int, Floats] | None:
        """How often a stage waits until what it has in flight is back, and its passes beside that.

        Returns:
            q, and [cuts] the seconds of r passes of a stage that begins at ``first``; None where it
            waits for none. Behind its first microbatch come q k + r, and k are in flight.
        """
        follow = ceil(self.problem.num_microbatches / kind.num_replicas) - 1
        times = follow // kind.held.in_flight
        if self.pessimistic or not times or self.problem.traits.order == "forward-first":
            return None
        back = self.backward[kind.pool] - self.backward[kind.pool, first]
        back = back + self.costs.overheads.backward_seconds[kind.pool]
        longer = np.maximum(self.forward_of(kind, first), back)
        return times, (follow - times * kind.held.in_flight) * longer

    def forward_of(self, kind: MoveKind, first: int) -> Floats:
        """[cuts] a forward pass of a stage that begins at a cut."""
        curve = self.forward[kind.pool]
        found: Floats = curve - curve[first] + self.costs.overheads.forward_seconds[kind.pool]
        return found

    def reduce_seconds(self, kind: MoveKind, first: int) -> Floats:
        """[cuts] reductions and update of a stage that begins at a cut, without tied weights."""
        found: Floats = self.end(kind) * (self.weights - self.weights[first])
        return found + self.end_start(kind)

    def alone(self, kind: MoveKind) -> tuple[Floats, float]:
        """[cuts] of which the difference is what a stage alone takes, and the most for that."""
        # Its first microbatch, the passes that are left then, its reductions and its update.
        curve = self.compute[kind.pool] + self.left(kind) + self.end(kind) * self.weights
        own = float(self.costs.own_seconds[kind.pool]) + self.own_left(kind) + self.end_start(kind)
        # The known plan's own stages must stay allowed, whatever rounding does.
        return curve, self.most_seconds * (1 + 1e-9) - own

    def last_in_memory(self, kind: MoveKind) -> Ints:
        """[cuts] the last end of a stage that begins at each cut, of cuts in one line."""
        key = self._held(kind)
        if key not in self._last_in_memory:
            found = np.full(self.size, self.size - 1)
            if self.problem.pools[kind.pool].limit_bytes is not None:
                found = self._ends + self.room(kind).sum(axis=1)
            self._last_in_memory[key] = found
        return self._last_in_memory[key]

    @staticmethod
    def _held(kind: MoveKind) -> tuple[int, int, StageHeld]:
        """What the memory of a move's stage depends on: one replica, or with others."""
        return kind.pool, min(kind.num_replicas, 2), kind.held

    @cached_property
    def between(self) -> Mask:
        """[cuts, cuts] where a stage may lie between two cuts, but for memory."""
        return self.costs.between()

    def room(self, kind: MoveKind) -> Mask:
        """[cuts, cuts] where a stage may lie between two cuts, within the memory."""
        limit = self.problem.pools[kind.pool].limit_bytes
        if limit is None:
            return self.between
        key = self._held(kind)
        if key not in self._rooms:
            used = self.costs.own_bytes(*key)
            self._rooms[key] = self.between & (used <= limit)
        return self._rooms[key]

    def row(self, kind: MoveKind, first: int) -> Mask:
        """[cuts] where a stage that begins at a cut may end: behind it, within the memory."""
        found: Mask
        if self.is_line:
            found = (self._ends > first) & (self._ends <= self.last_in_memory(kind)[first])
        else:
            found = self.room(kind)[first]
        return found

    def left_of(self, kind: MoveKind, first: int, link: int) -> Floats:
        """[cuts] g of the stages that begin at a cut."""
        curve = self.left(kind)
        found: Floats = curve - curve[first] + self.own_left(kind)
        if self.pessimistic:
            found = found + kind.left_backward * self.transfer[link, first]
        return found


def step_of(problem: PipelineProblem, costs: StageCosts, placed: list[PlacedStage]) -> float:
    """The step of a placement as the schedule's timer times it, in seconds."""
    return flush_step_seconds(
        problem.schedule, stages_of(problem, costs, placed), problem.num_microbatches
    )


def stages_of(
    problem: PipelineProblem, costs: StageCosts, placed: list[PlacedStage]
) -> tuple[StepStage, ...]:
    """The stages of a placement as the timer takes them, tied weights with the update."""
    found = []
    for number, (first, last, move) in enumerate(placed):
        weight = float(costs.cuts.weight_bytes[last] - costs.cuts.weight_bytes[first])
        ahead = costs.stage_forward(first, last, move.pool)
        found.append(
            StepStage(
                num_replicas=move.num_replicas,
                forward_seconds=ahead,
                backward_seconds=costs.stage_compute(first, last, move.pool) - ahead,
                transfer_seconds=output_seconds(costs, placed, number) / 2,
                reduce_seconds=costs.reductions[move.pool].seconds(
                    weight, move.num_replicas, costs.bandwidths[move.span]
                ),
                update_seconds=problem.pools[move.pool].update_seconds
                * (weight / max(costs.total_weight, 1.0))
                + costs.tied_seconds(first, last, move.num_replicas),
            )
        )
    return tuple(found)


def output_seconds(costs: StageCosts, placed: list[PlacedStage], number: int) -> float:
    """Both transfers of a microbatch behind a stage, over the slowest link to the next."""
    if number + 1 == len(placed):
        return 0.0
    _, last, move = placed[number]
    slowest = max(move.span, move.gap, placed[number + 1][2].span)
    return costs.output_seconds(last, costs.bandwidths[slowest])


_SLACK = 1e-12
_ENTRIES = 1 << 18  # of a batch's tables: they stay in a core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveBatch:
    """Moves whose targets use equally many devices, by target; some of them where they are many.

    ``row``, ``kind``, ``pool``, ``span``: [moves]; ``heads``: where each of ``targets`` begins;
    ``rows`` are those with one of the targets as their source.
    """

    row: Ints
    kind: Ints
    pool: Ints
    span: Ints
    heads: Ints
    targets: Ints
    rows: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """All moves of a space; ``row_source``, ``row_pool``, ``row_need``: [rows]."""

    batches: tuple[MoveBatch, ...]
    kinds: tuple[MoveKind, ...]
    first_rows: Ints
    row_source: Ints
    row_pool: Ints
    row_need: Ints

    @classmethod
    def of(
        cls, space: PlacementSpace, kinds: list[MoveKind], kind: Ints, num_cuts: int
    ) -> "Batches":
        """Number the rows, and cut the moves into batches; ``kind`` is each move's."""
        moves = space.moves
        rows, row = moves.numbered("source", "pool", "need")
        source, pool, need = np.array(rows, np.int64).reshape(-1, 3).T
        target = moves.target
        # A move uses up devices, so its target has more in use than its source: by that number all
        # sources come first.
        totals = np.array([sum(state.used) for state in space.states], np.int64)
        most = max(_ENTRIES // num_cuts, 1)
        batches = []
        for total in np.unique(totals[target]).tolist():
            of_total = np.flatnonzero(totals[target] == total)
            rows_of_total = np.flatnonzero(totals[source] == total)
            for part in _parts(of_total, target[of_total], most):
                # ``np.minimum.reduceat`` takes the runs of equal targets by their first places.
                heads = np.flatnonzero(np.diff(target[part], prepend=-1))
                targets = target[part][heads]
                ends = np.searchsorted(source[rows_of_total], [targets[0], targets[-1] + 1])
                batches.append(
                    MoveBatch(
                        row=row[part],
                        kind=kind[part],
                        pool=moves.pool[part],
                        span=moves.span[part],
                        heads=heads,
                        targets=targets,
                        rows=rows_of_total[slice(*ends)],
                    )
                )
        return cls(
            batches=tuple(batches),
            kinds=tuple(kinds),
            first_rows=np.flatnonzero(source == 0),
            row_source=source,
            row_pool=pool,
            row_need=need,
        )

    def values(self, model: StepModel, behind: Floats, rows: Ints) -> Floats:
        """[rows, cuts] all behind a stage that ends at a cut, and the stage's own part there."""
        found: Floats = behind[self.row_source[rows], self.row_need[rows]]
        return found + model.closing[self.row_pool[rows]]


def _parts(moves: Ints, target: Ints, most: int) -> list[Ints]:
    """Cut moves between targets into parts of about ``most``."""
    begins = np.flatnonzero(np.diff(target, prepend=-1))
    # The first target that begins in each stretch of ``most`` moves.
    _, first = np.unique(begins // most, return_index=True)
    return np.split(moves, begins[first][1:])


class _StepEnds:
    """``StepModel.step_end`` of the first stages of many moves."""

    def __init__(self, model: StepModel, kinds: tuple[MoveKind, ...]) -> None:
        costs, split = model.costs, model.costs.cuts.split_bytes
        self.curves = [model.weights] if split is None else [model.weights, split[0]]
        # [kinds, curves] and [kinds]
        self.slopes = np.array(
            [[model.end(kind), costs.tied_seconds_per_byte(kind.num_replicas)] for kind in kinds]
        )
        self.starts = np.array([model.end_start(kind) for kind in kinds])

    def of(self, kind: Ints) -> Floats:
        """[moves, cuts] for the kind of each move."""
        found: Floats = self.starts[kind, None]
        for curve, slope in zip(self.curves, self.slopes.T, strict=False):
            found = found + slope[kind, None] * curve
        return found


class Windows:
    """Cuts in one line: the ends of a stage are a window behind its begin."""

    def __init__(self, model: StepModel, batched: Batches, limit: float) -> None:
        self.model, self.batched = model, batched
        size = model.size
        # log[n] = floor(log2(n)); the last column of ``minima`` stays infinite, where empty
        # windows point.
        log = np.zeros(size + 2, np.int64)
        log[1:] = np.floor(np.log2(np.arange(1, size + 2))).astype(np.int64)
        # [levels, rows, cuts + 1] minima of 2^level values from each cut on.
        shape = (int(log[size]) + 1, len(batched.row_source), size + 1)
        self.minima = np.full(shape, np.inf)
        self.window, distinct = _windows(model, batched.kinds)
        links = len(model.transfer) if model.pessimistic else 1
        # [windows, links, cuts]
        last = np.array(
            [[_last(model, kind, link, limit) for link in range(links)] for kind in distinct]
        )
        length = last - np.arange(size)
        level = log[np.maximum(length, 1)]
        # Where the minima of two windows stand for row 0 of the flattened ``minima``: the second
        # window ends at the last allowed end.
        place = level * (shape[1] * shape[2])
        self.left = place + np.where(length <= 0, size, np.arange(size) + 1)
        self.right = place + np.where(length <= 0, size, last - (1 << level) + 1)
        self.first_of_link = last[:, :, 0]
        self.step_ends = _StepEnds(model, batched.kinds)

    def fill(self, behind: Floats, rows: Ints) -> None:
        """Fill the rows whose sources are complete."""
        self.minima[0, rows, :-1] = self.batched.values(self.model, behind, rows)
        for level in range(1, len(self.minima)):
            step = 1 << (level - 1)
            values = np.full((len(rows), self.model.size + 1), np.inf)
            before = self.minima[level - 1, rows]
            values[:, :-step] = np.minimum(before[:, :-step], before[:, step:])
            self.minima[level, rows] = values

    def least(self, batch: MoveBatch, link: Ints) -> Floats:
        """[moves, cuts] the least value at the ends that each begin may have."""
        of_link = link if self.model.pessimistic else np.zeros_like(link)
        window, row = self.window[batch.kind], batch.row[:, None] * (self.model.size + 1)
        # Two windows of 2^level values cover any window of ends; that they overlap does no harm, as
        # a minimum counts nothing twice.
        flat = self.minima.reshape(-1)
        left, right = (flat[each[window, of_link] + row] for each in (self.left, self.right))
        totals: Floats = np.minimum(left, right)
        return totals

    def whole(self, batch: MoveBatch) -> Floats:
        """[moves] the least sum of a plan whose first stage is the move's."""
        model = self.model
        # Ends behind cut 0; the first stage begins there, so its part that depends on the begin is
        # one number.
        totals = self.minima[0, batch.row, 1:-1]
        if not model.pessimistic:
            totals = totals + self.step_ends.of(batch.kind)[:, 1:]
        of_link = batch.span if model.pessimistic else np.zeros_like(batch.span)
        last = self.first_of_link[self.window[batch.kind], of_link] - 1
        # The last allowed end cuts off the running minimum.
        totals = np.minimum.accumulate(totals, axis=1)
        least = totals[np.arange(len(last)), np.maximum(last, 0)]
        found: Floats = np.where(last >= 0, least, np.inf) - model.compute[batch.pool, 0]
        return found


class Suffixes:
    """``Windows`` where a stage may end at every cut behind its begin: one row serves all moves.

    A bound of plans that memory or a limit restricts, too.
    """

    behind: Floats

    def __init__(self, model: StepModel, batched: Batches) -> None:
        self.model, self.batched = model, batched
        # [rows, cuts] the least value behind each cut.
        self.minima = np.full((len(batched.row_source), model.size), np.inf)
        self.step_ends = _StepEnds(model, batched.kinds)

    def fill(self, behind: Floats, rows: Ints) -> None:
        """Fill in the costs, as ``Windows.fill`` says."""
        self.behind = behind
        values = self.batched.values(self.model, behind, rows)
        # Strictly behind each cut, as a stage has a layer at least: the reversed running minimum
        # begins at the last.
        self.minima[rows, :-1] = np.minimum.accumulate(values[:, :0:-1], axis=1)[:, ::-1]

    def least(self, batch: MoveBatch, link: Ints) -> Floats:
        """The least cost, as of ``Windows.least``; equal for all links."""
        found: Floats = self.minima[batch.row]
        return found

    def whole(self, batch: MoveBatch) -> Floats:
        """The cost of all layers, as of ``Windows.whole``."""
        totals = self.batched.values(self.model, self.behind, batch.row)
        totals = totals + self.step_ends.of(batch.kind)
        found: Floats = totals[:, 1:].min(axis=1) - self.model.compute[batch.pool, 0]
        return found


def _windows(model: StepModel, kinds: tuple[MoveKind, ...]) -> tuple[Ints, list[MoveKind]]:
    """Which kinds may end where the same one of them may: [kinds] numbers, and those."""
    number: dict[MoveKind, int] = {}
    found: list[int] = []
    distinct: list[MoveKind] = []
    for kind in kinds:
        # Where a stage may end then depends on its pool and what it holds alone: kinds that differ
        # in replicas or links share windows.
        is_alike = not model.pessimistic and np.isinf(model.most_seconds)
        key = kind._replace(num_replicas=0, span=0) if is_alike else kind
        if key not in number:
            number[key] = len(distinct)
            distinct.append(kind)
        found.append(number[key])
    return np.array(found), distinct


def _last(model: StepModel, kind: MoveKind, link: int, limit: float) -> Ints:
    """[cuts] the last end that memory and limit allow a stage that begins at each cut."""
    # Memory, work and what is left all grow along the line: as differences of sums that never fall,
    # and of memory by tied weights (``StageCosts.is_line``). So a limit allows ends up to a last.
    last = model.last_in_memory(kind)
    if np.isfinite(model.most_seconds):
        curve, most_alone = model.alone(kind)
        last = np.minimum(last, np.searchsorted(curve, curve + most_alone, side="right") - 1)
    if np.isfinite(limit):
        curve = model.left(kind)
        # A limit is a maximum that some plan has exactly; rounding must not exclude that plan.
        most = curve + (limit - model.own_left(kind)) + _SLACK * (limit + curve[-1])
        if model.pessimistic:
            most = most - kind.left_backward * model.transfer[max(link, kind.span)]
        last = np.minimum(last, np.searchsorted(curve, most, side="right") - 1)
    return last


class Squares:
    """Cuts of a branching graph: every pair of cuts is looked at."""

    def __init__(self, model: StepModel, batched: Batches, limit: float) -> None:
        self.model, self.batched, self.limit = model, batched, limit
        self.values = np.full((len(batched.row_source), model.size), np.inf)
        self.barred: dict[tuple[int, int], Floats] = {}
        self.window, self.distinct = _windows(model, batched.kinds)

    def fill(self, behind: Floats, rows: Ints) -> None:
        """Fill in the costs, as ``Windows.fill`` says."""
        self.values[rows] = self.batched.values(self.model, behind, rows)

    def least(self, batch: MoveBatch, link: Ints) -> Floats:
        """The least cost, as of ``Windows.least``; moves of one window and row share an answer."""
        at = link if self.model.pessimistic else np.zeros_like(link)
        asked = np.stack([self.window[batch.kind], at, batch.row])
        distinct, place = np.unique(asked, axis=1, return_inverse=True)
        found = [
            self._totals(window, link, row).min(axis=1) for window, link, row in distinct.T.tolist()
        ]
        answer: Floats = np.array(found)[place.reshape(-1)]
        return answer

    def whole(self, batch: MoveBatch) -> Floats:
        """The cost of all layers, as of ``Windows.whole``."""
        model, found = self.model, []
        rows = zip(batch.kind.tolist(), batch.span.tolist(), batch.row.tolist(), strict=True)
        for kind, link, row in rows:
            at = link if model.pessimistic else 0
            totals = self._totals(int(self.window[kind]), at, row, slice(1))[0]
            if not model.pessimistic:
                totals = totals + model.step_end(self.batched.kinds[kind])
            found.append(float(totals.min()))
        whole: Floats = np.array(found) - model.compute[batch.pool, 0]
        return whole

    def _totals(self, window: int, link: int, row: int, begins: slice = slice(None)) -> Floats:
        """[begins, cuts] the sum from cuts on by a stage that ends at each other one."""
        # Left out are stages that with the least sum from them on take longer than what is known.
        model = self.model
        totals: Floats = self._barred(window, link)[begins] + self.values[row]
        if model.pessimistic or np.isinf(model.most_seconds):
            return totals
        compute = model.compute[self.batched.row_pool[row], begins][:, None]
        for times, seconds in model.later(self.distinct[window]):
            least = times * (totals - compute) + seconds[begins]
            totals[least > model.most_seconds * (1 + 1e-9)] = np.inf
        return totals

    def _barred(self, window: int, link: int) -> Floats:
        """[cuts, cuts] 0 where a stage may lie between two cuts, else infinity."""
        model, kind, key = self.model, self.distinct[window], (window, link)
        if key not in self.barred:
            allowed = model.room(kind)
            if np.isfinite(self.limit):
                curve = model.left(kind)
                left = curve[None, :] - curve[:, None] + model.own_left(kind)
                if model.pessimistic:
                    left = left + kind.left_backward * model.transfer[link][:, None]
                allowed = allowed & (left <= self.limit + _SLACK * (self.limit + curve[-1]))
            self.barred[key] = np.where(allowed, 0.0, np.inf)
        return self.barred[key]


@dataclass(frozen=True, slots=True)
class Sums:
    """The least sums under one limit.

    ``behind``: [states, links, cuts] S; ``whole``: [states] the least sum of a whole plan, the
    first stage's all-reduce and update included.
    """

    limit: float
    behind: Floats
    whole: Floats


class Tables:
    """Tables of one model over one space."""

    def __init__(
        self, model: StepModel, space: PlacementSpace, final: Ints, effort: Effort = DEFAULT
    ) -> None:
        self.model, self.space, self.final, self.effort = model, space, final, effort
        effort.check()
        columns = ("pool", "num_replicas", "span", "workers", "is_last")
        found, self.kind = space.moves.numbered(*columns)
        self.kinds = [model.kind(*row) for row in found]
        self.num_links = len(space.bandwidths)
        self.into = np.searchsorted(space.moves.target, np.arange(len(space.states) + 1)).tolist()
        self._batched = Batches.of(space, self.kinds, self.kind, model.size)

    def kind_of(self, number: int) -> MoveKind:
        """The kind of a move."""
        return self.kinds[int(self.kind[number])]

    def sums(self, limit: float, *, relaxed: bool = False) -> Sums:
        """The least sums where no stage has more than ``limit`` seconds left.

        ``relaxed``, for an infinite limit: without the limits of memory, several times as fast.

        Raises:
            OutOfTimeError: The effort's limit came first.
        """
        states, model, batched = len(self.space.states), self.model, self._batched
        behind = np.full((states, self.num_links, model.size), np.inf)
        # State 0 holds no devices: nothing may be left behind it but the end of the model.
        behind[0, :, -1] = 0.0
        whole = np.full(states, np.inf)
        ranges = self._ranges(limit, relaxed=relaxed)
        ranges.fill(behind, batched.first_rows)
        for batch in batched.batches:
            self.effort.check()
            compute = model.compute[batch.pool]
            least = None
            for link in range(self.num_links):
                self.effort.check()
                slowest = np.maximum(link, batch.span)
                # The link of the boundary only adds to the sum, so one look at the windows serves
                # all links.
                if least is None or model.pessimistic:
                    least = ranges.least(batch, slowest) - compute
                totals = least + model.transfer[slowest]
                # Moves of a batch stand by target, so each target's moves are a run that ``heads``
                # begins.
                behind[batch.targets, link] = np.minimum.reduceat(totals, batch.heads)
            whole[batch.targets] = np.minimum.reduceat(ranges.whole(batch), batch.heads)
            # All moves into these targets have been looked at, so they can be sources now.
            ranges.fill(behind, batch.rows)
        return Sums(limit, behind, whole)

    def _ranges(self, limit: float, *, relaxed: bool) -> Suffixes | Windows | Squares:
        model = self.model
        if not model.is_line:
            return Squares(model, self._batched, limit)
        limits = (pool.limit_bytes for pool in model.problem.pools)
        # Without any limit a stage may end at every later cut: running minima do for windows.
        free = relaxed or (np.isinf(model.most_seconds) and all(limit is None for limit in limits))
        if free and np.isinf(limit) and not model.pessimistic:
            return Suffixes(model, self._batched)
        return Windows(model, self._batched, limit)

    def options(
        self, move: Move, kind: MoveKind, first: int, link: int, behind: Floats, limit: float
    ) -> Floats:
        """[cuts] the sum where the stage of a move begins at a cut and ends at each other one."""
        model, slowest = self.model, max(link, move.span)
        seconds = model.closing[move.pool] - model.compute[move.pool, first]
        totals: Floats = behind + (seconds + model.transfer[slowest, first])
        if first == 0 and not model.pessimistic:
            totals = totals + model.step_end(kind)
        allowed = model.row(kind, first)
        if np.isfinite(limit):
            left = model.left_of(kind, first, slowest)
            # Wider than in the tables, which add in another order: what they found feasible must
            # be found again.
            allowed = allowed & (left <= limit + 1e3 * _SLACK * (limit + left[-1]))
        found: Floats = np.where(allowed, totals, np.inf)
        return found

    def placement(self, sums: Sums) -> list[PlacedStage] | None:
        """A placement of the least whole sum; None where the limit allows nothing."""
        # The tables keep sums without predecessors: the plan is read back from the first stage,
        # each stage the best of the moves into its state.
        state = int(self.final[int(np.argmin(sums.whole[self.final]))])
        if not np.isfinite(sums.whole[state]):
            return None
        placed: list[PlacedStage] = []
        cut, link = 0, 0
        while state != 0:
            best, chosen = np.inf, None
            for number in range(self.into[state], self.into[state + 1]):
                move = self.space.moves[number]
                behind = sums.behind[move.source, max(move.span, move.gap)]
                totals = self.options(move, self.kind_of(number), cut, link, behind, sums.limit)
                last = int(totals.argmin())
                if totals[last] < best:
                    best, chosen = float(totals[last]), (cut, last, move)
            if chosen is None:
                return None
            placed.append(chosen)
            _, cut, move = chosen
            state, link = move.source, max(move.span, move.gap)
        return placed
