"""Best-first search over placements for the step as the timer times it.

A node is the first stages of a plan. A lower bound for all plans below it adds up its own sum, the
least sum of the other stages, and the larger maximum: its own or the least of the others. The
tables for several caps give these: a plan whose maximum lies between two caps has at least the
least sum under the upper one. Leaves are timed. The search ends when the best open node is no
better than the best plan, which is then optimal, or when its limit of work is reached.
"""

import heapq
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import numpy as np

from ....schema.pipeline import PipelineProblem
from ...effort import Effort
from ..cuts import Floats
from ..packing import NoSeatsError, Seats, seat
from ..placements import PlacedStage, PlacementSpace
from ..stage_costs import StageCosts
from .bound import step_of
from .tables import Sums, Tables

EXACT = 1e-9
_CALL = 3000  # entries that looking at a move costs beside its own
_DIVE = 16  # nodes to a dive
_MOST_NODES = 3_000_000  # about a gigabyte


class Incumbent:
    """The fastest plan so far, its costs, and its step."""

    def __init__(self) -> None:
        self.seats: Seats | None = None
        self.costs: StageCosts | None = None
        self.seconds = np.inf
        self._seen: set[tuple[int, bool, tuple[PlacedStage, ...]]] = set()

    @property
    def placed(self) -> list[PlacedStage] | None:
        """The plan's stages."""
        return None if self.seats is None else self.seats.placed

    def offer(
        self,
        problem: PipelineProblem,
        costs: StageCosts,
        space: PlacementSpace,
        placed: list[PlacedStage],
    ) -> bool:
        """Seat and time a plan, and keep it if it is faster; whether it was new.

        Raises:
            NoSeatsError: The devices that it counts are nowhere together: it is no plan.
        """
        key = (int(costs.recompute), space.is_ordered, tuple(placed))
        if key in self._seen:
            return False
        self._seen.add(key)
        self.offer_seated(problem, costs, seat(problem, space, placed))
        return True

    def offer_seated(self, problem: PipelineProblem, costs: StageCosts, seats: Seats) -> None:
        """Time a plan whose devices are named, and keep it if it is faster."""
        seconds = step_of(problem, costs, seats.placed)
        fewer = self.placed is None or len(seats.placed) < len(self.placed)
        if seconds < self.seconds * (1 - EXACT) or (
            fewer and seconds <= self.seconds * (1 + EXACT)
        ):
            self.seats, self.costs, self.seconds = seats, costs, seconds

    def consider(
        self,
        problem: PipelineProblem,
        costs: StageCosts,
        space: PlacementSpace,
        placed: list[PlacedStage],
    ) -> None:
        """Offer a placement that may have no devices."""
        with suppress(NoSeatsError):
            self.offer(problem, costs, space, placed)


class Round(NamedTuple):
    """What a stage of q k + r + 1 microbatches, k of them in flight, adds to the sum.

    It admits microbatch i + k when the gradient of i is back: q times the sum from it on, beside r
    more passes.
    """

    times: int
    before: float
    """The sum of the stages before it, and of the first stage's all-reduce and update."""
    rest: float
    """Seconds of the r passes."""


class Node(NamedTuple):
    """The first stages of a plan; ordered by the bound, then by age."""

    bound: float
    """Seconds that no plan which begins so beats."""
    number: int
    """No two nodes have the same, so a comparison ends here."""
    total: float
    """The sum of the stages so far."""
    ahead: float
    """Their forward part, without the first stage's all-reduce and update."""
    most: float
    """Their maximum: seconds left when the first gradient is back."""
    placed: list[PlacedStage]
    state: int
    """Of the space: the devices left."""
    cut: int
    """Where the next stage begins."""
    link: int
    """The slowest that the boundary before it may be on."""
    rounds: tuple[Round, ...] = ()
    """Of stages that take more microbatches than they admit at once."""


class PlanTree:
    """Plans of one set of tables, by their first stages."""

    def __init__(
        self, problem: PipelineProblem, tables: Tables, sums: Sequence[Sums], best: Incumbent
    ) -> None:
        self.problem, self.tables, self.best = problem, tables, best
        self.space = tables.space
        ordered = sorted(sums, key=lambda entry: -entry.limit)
        self.behind = np.array([entry.behind for entry in ordered])
        self.whole = np.array([entry.whole for entry in ordered])
        # A plan whose maximum is above the next limit down.
        self.above = np.array([*(entry.limit for entry in ordered[1:]), 0.0])
        self.order = count()
        self.entries = self.passes = 0.0  # that the search may still look at, and replay

    def search(self, budget: Effort) -> float:
        """Look for better plans; a step that no plan of these tables can beat."""
        heap: list[Node] = []
        for state in self.tables.final.tolist():
            bound = float((self.whole[:, state] + self.above).min())
            if np.isfinite(bound):
                heapq.heappush(heap, Node(bound, next(self.order), 0.0, 0.0, 0.0, [], state, 0, 0))
        self.entries, self.passes, unseated = budget.tree_work, budget.tree_passes, np.inf
        looked = 0
        while heap and self.entries > 0 and self.passes > 0 and len(heap) < _MOST_NODES:
            node = heap[0]
            if budget.accepts(self.best.seconds, node.bound):
                break
            if budget.should_stop():
                break
            heapq.heappop(heap)
            if node.state == 0:
                unseated = min(unseated, self._leaf(node))
                if self.space.kind == "blind":
                    # The devices found may lie farther apart than others of the same numbers.
                    unseated = min(unseated, node.bound)
                    break
                continue
            children = self._all_children(node)
            for child in children:
                heapq.heappush(heap, child)
            looked += 1
            # Down the best child of each node there soon is a plan, often a better one.
            while looked % _DIVE == 0 and children and self.space.kind != "blind":
                child = min(children)
                if child.state == 0:
                    self._leaf(child)
                    break
                children = self._all_children(child)
        left = heap[0].bound if heap else np.inf
        return float(min(left, unseated, self.best.seconds))

    def _leaf(self, node: Node) -> float:
        """Time a whole plan; its bound where it may have devices that were not found."""
        self.passes -= self.problem.num_microbatches * len(node.placed) * 2
        try:
            self.best.offer(self.problem, self.tables.model.costs, self.space, node.placed)
        except NoSeatsError as error:
            return np.inf if error.is_proved else node.bound
        return np.inf

    def _all_children(self, node: Node) -> list[Node]:
        first, last = self.tables.into[node.state], self.tables.into[node.state + 1]
        self.entries -= (last - first) * (_CALL + self.behind.shape[0] * self.behind.shape[-1])
        return [child for number in range(first, last) for child in self._children(node, number)]

    def _children(self, node: Node, number: int) -> list[Node]:
        """The nodes one stage further, by one of the space's moves."""
        tables, model = self.tables, self.tables.model
        move, kind = tables.space.moves[number], tables.kind_of(number)
        need = max(move.span, move.gap)
        cut, link = node.cut, node.link
        own = tables.options(move, kind, cut, link, np.zeros(model.size), np.inf)
        # The sum before the stage, the way to it included, and its part on the way back.
        way = float(model.transfer[max(link, move.span), cut]) if cut else 0.0
        before = node.total + way if cut else model.step_end(kind)
        over: Floats = np.zeros(model.size)  # what its reductions take beyond the way back
        if cut:
            over = np.maximum(model.reduce_seconds(kind, cut) - (before - node.ahead - way / 2), 0)
        left = np.maximum(model.left_of(kind, cut, max(link, move.span)) + over, node.most)
        # [limits, cuts]
        totals = self.behind[:, move.source, need, :] + own + node.total
        least = np.maximum(self.above[:, None], left[None, :])
        for each in node.rounds:
            least = np.maximum(least, each.times * (totals - each.before) + each.rest)
        admitted = model.round_of(kind, cut)
        if admitted is not None:
            times, rests = admitted
            rests = rests + over
            least = np.maximum(least, times * (totals - before) + rests)
        bounds: Floats = (totals + least).min(axis=0)
        ahead = node.ahead + way / 2 + model.forward_of(kind, cut)
        found = np.flatnonzero(bounds < self.best.seconds * (1 - EXACT))
        return [
            Node(
                bound=float(bounds[last]),
                number=next(self.order),
                total=node.total + float(own[last]),
                ahead=float(ahead[last]),
                most=float(left[last]),
                placed=[*node.placed, (cut, last, move)],
                state=move.source,
                cut=last,
                link=need,
                rounds=node.rounds
                if admitted is None
                else (
                    *node.rounds,
                    Round(
                        times,
                        float(np.broadcast_to(before, model.size)[last]),
                        float(rests[last]),
                    ),
                ),
            )
            for last in found.tolist()
        ]
