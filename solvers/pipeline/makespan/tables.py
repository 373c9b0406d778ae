"""The least sum of a step model under a limit on its maximum, for every state and cut.

S(state, link, cut) is the least sum over stages of everything behind ``cut`` on the devices of
``state``, whose first boundary is at least as slow as ``link``, where no stage has more than
``limit`` seconds left. Cuts in one line: a stage's end is a window, so a range-minimum table for
each source answers all cuts at once, O(moves x cuts) for a limit. Otherwise O(moves x cuts^2).
"""

from dataclasses import dataclass

import numpy as np

from ..bottleneck.graph import PlacedStage
from ..cuts import Floats
from ..placements import Move, Space
from .bound import Ints, Kind, StepModel
from .ranges import SLACK, Batches, Squares, Suffixes, Windows


@dataclass(frozen=True, slots=True)
class Sums:
    """What one limit allows.

    ``behind``: [states, links, cuts] S; ``whole``: [states] the least sum of a whole plan, the
    first stage's all-reduce and update included.
    """

    limit: float
    behind: Floats
    whole: Floats


class Tables:
    """Tables of one model over one space."""

    def __init__(self, model: StepModel, space: Space, final: Ints) -> None:
        self.model, self.space, self.final = model, space, final
        columns = ("pool", "num_replicas", "span", "workers", "is_last")
        found, self.kind = space.moves.numbered(*columns)
        self.kinds = [model.kind(*row) for row in found]
        self.num_links = len(space.bandwidths)
        self.into = np.searchsorted(space.moves.target, np.arange(len(space.states) + 1)).tolist()
        self._batched = Batches.of(space, self.kinds, self.kind, model.size)

    def kind_of(self, number: int) -> Kind:
        """The kind of a move."""
        return self.kinds[int(self.kind[number])]

    def sums(self, limit: float, *, relaxed: bool = False) -> Sums:
        """The least sums where no stage has more than ``limit`` seconds left.

        ``relaxed``, for an infinite limit: without the limits of memory, several times as fast.
        """
        states, model, batched = len(self.space.states), self.model, self._batched
        behind = np.full((states, self.num_links, model.size), np.inf)
        behind[0, :, -1] = 0.0
        whole = np.full(states, np.inf)
        ranges = self._ranges(limit, relaxed=relaxed)
        ranges.fill(behind, batched.first_rows)
        for batch in batched.batches:
            compute = model.compute[batch.pool]
            least = None
            for link in range(self.num_links):
                slowest = np.maximum(link, batch.span)
                if least is None or model.pessimistic:
                    least = ranges.least(batch, slowest) - compute
                totals = least + model.transfer[slowest]
                behind[batch.targets, link] = np.minimum.reduceat(totals, batch.heads)
            whole[batch.targets] = np.minimum.reduceat(ranges.whole(batch), batch.heads)
            ranges.fill(behind, batch.rows)
        return Sums(limit, behind, whole)

    def _ranges(self, limit: float, *, relaxed: bool) -> Suffixes | Windows | Squares:
        model = self.model
        if not model.is_line:
            return Squares(model, self._batched, limit)
        limits = (pool.limit_bytes for pool in model.problem.pools)
        free = relaxed or all(limit is None for limit in limits)
        if free and np.isinf(limit) and not model.pessimistic:
            return Suffixes(model, self._batched)
        return Windows(model, self._batched, limit)

    def options(
        self, move: Move, kind: Kind, first: int, link: int, behind: Floats, limit: float
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
            allowed = allowed & (left <= limit + 1e3 * SLACK * (limit + left[-1]))
        found: Floats = np.where(allowed, totals, np.inf)
        return found

    def placement(self, sums: Sums) -> list[PlacedStage] | None:
        """A placement of the least whole sum; None where the limit allows nothing."""
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
