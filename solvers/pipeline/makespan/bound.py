"""A lower bound of a flushing step that adds up over stages: a sum and one maximum.

The first microbatch goes through all stages and back. When its gradient arrives at a stage, that
stage's replica has g seconds of passes left. The last gradient that it makes still has to go
through the stages before it. So for every stage the step takes at least

    sum over stages (C + 2c)  +  g of that stage  +  all-reduce and update of the first stage

with C forward + backward of a microbatch and c a transfer, both with their fixed costs. A replica
of R microbatches that admits k before its first backward pass has g = (R-1) b + (R-k) f left under
1F1B. Equal stages without transfers attain the bound: (p + M - 1) C.

Two more hold for each stage, and need the sum of the stages behind it, T = sum (C + 2c):

- It admits microbatch i + k only when the gradient of i is back. So R - 1 = q k + r microbatches
  behind the first take q T and r passes.
- It ends with its own all-reduce and update, where these outlast the way back and the first
  stage's.

They do not add up over stages. So tables use them to leave out what a known step excludes, and the
tree search to bound what follows the stages that it has placed.
"""

from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....planning.costs.comm import Wire, collective_seconds
from ....planning.schedules.replay import StepStage, flush_step_seconds
from ....schema.pipeline import PipelineProblem
from ..cuts import Floats, Mask
from ..placements import PlacedStage
from ..stage_costs import StageCosts


class MoveKind(NamedTuple):
    """All that a move's costs depend on; moves of one kind differ in their target only."""

    pool: int
    num_replicas: int
    span: int
    in_flight: int
    versions: int
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
        self.between: Mask | None = None if self.is_line else costs.between()
        self._rows: dict[tuple[MoveKind, int], Mask] = {}
        self._rooms: dict[tuple[int, int, int], Mask] = {}
        self._later: dict[MoveKind, list[tuple[int, Floats]]] = {}

    def kind(self, pool: int, num_replicas: int, span: int, workers: int, is_last: int) -> MoveKind:
        """The kind of a move's stage; ``workers`` from it on, ``is_last`` if no stage follows."""
        problem, count = self.problem, self.problem.num_microbatches
        in_flight, versions = self.costs.stashed(num_replicas, workers)
        share = ceil(count / num_replicas)
        left = max(share - in_flight, 0)
        if problem.traits.order == "forward-first":
            behind = workers - num_replicas
            left = share - 1 if is_last else max((count - behind) // num_replicas, 0)
        if self.pessimistic:
            left = share - 1
        return MoveKind(pool, num_replicas, span, in_flight, versions, left, max(share - 1, 0))

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
        times = follow // kind.in_flight
        if self.pessimistic or not times or self.problem.traits.order == "forward-first":
            return None
        back = self.backward[kind.pool] - self.backward[kind.pool, first]
        back = back + self.costs.overheads.backward_seconds[kind.pool]
        longer = np.maximum(self.forward_of(kind, first), back)
        return times, (follow - times * kind.in_flight) * longer

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
        """[cuts] of which the difference is what a stage alone takes, and the most for that.

        Its first microbatch, the passes that are left then, its reductions and its update.
        """
        curve = self.compute[kind.pool] + self.left(kind) + self.end(kind) * self.weights
        own = float(self.costs.own_seconds[kind.pool]) + self.own_left(kind) + self.end_start(kind)
        return curve, self.most_seconds * (1 + 1e-9) - own

    def stash(self, kind: MoveKind) -> tuple[Floats, Floats, float]:
        """[cuts] of which the difference is a stage's own memory, [cuts] of inputs, and the limit.

        The limit is infinite where the pool sets none.
        """
        cuts, limit = self.costs.cuts, self.problem.pools[kind.pool].limit_bytes
        state, stashes = self.costs.memory_terms(kind.in_flight, kind.versions)
        own: Floats = state * cuts.weight_bytes + stashes * cuts.activation_bytes
        return own, kind.in_flight * cuts.crossing_bytes, np.inf if limit is None else float(limit)

    def room(self, kind: MoveKind) -> Mask:
        """[cuts, cuts] where a stage may lie between two cuts, within the memory."""
        limit = self.problem.pools[kind.pool].limit_bytes
        assert self.between is not None
        if limit is None:
            return self.between
        key = (kind.pool, kind.in_flight, kind.versions)
        if key not in self._rooms:
            used = self.costs.own_bytes(kind.in_flight, kind.versions)
            self._rooms[key] = self.between & (used <= limit)
        return self._rooms[key]

    def row(self, kind: MoveKind, first: int) -> Mask:
        """[cuts] where a stage that begins at a cut may end: behind it, within the memory."""
        key = (kind, first)
        if key not in self._rows:
            own, inputs, limit = self.stash(kind)
            used = own - own[first] + inputs[first]
            if self.costs.cuts.copied_bytes is not None:
                state, _ = self.costs.memory_terms(kind.in_flight, kind.versions)
                used = used + state * self.costs.cuts.copied_bytes[first]
            found: Mask = used <= limit
            if self.between is None:
                found[: first + 1] = False
            else:
                found &= self.between[first]
            self._rows[key] = found
        return self._rows[key]

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


Ints = NDArray[np.int64]
