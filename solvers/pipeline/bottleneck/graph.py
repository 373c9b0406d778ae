"""The dynamic program over cuts and device states: any graph, any count of workers.

f(state, cut) is the least time of the slowest stage that runs everything behind ``cut`` on the
devices of ``state``. One array of cuts a state; each move folds one stage in.
"""

import numpy as np
from numpy.typing import NDArray

from ....schema.pipeline import PipelineProblem
from ...effort import DEFAULT, Effort
from ..cuts import Floats
from ..placements import Move, PlacedStage, PlacementSpace, final_states
from ..search import StoppedError
from ..stage_costs import StageCosts

_CLOSE = 1 + 1e-9


def search(
    problem: PipelineProblem,
    costs: StageCosts,
    space: PlacementSpace,
    extra_bytes: float = 0.0,
    *,
    below: float = np.inf,
    effort: Effort = DEFAULT,
) -> list[PlacedStage] | None:
    """Find the best placement, first stage first; None where nothing fits the memory.

    Args:
        problem: What is asked.
        costs: Seconds of stages and boundaries.
        space: The pools' states and moves.
        extra_bytes: Raises every limit of memory.
        below: Only placements of at most so many seconds are looked for. A state and cut whose
            work ahead takes longer even spread over all devices left is passed over.
        effort: Says when to stop.

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
        hopeful = behind < np.inf
        if below < np.inf:
            left = problem.num_devices - used[move.source]
            hopeful = (behind <= below) & (ahead <= below * left * _CLOSE)
        cuts = np.flatnonzero(hopeful)
        if not len(cuts):
            continue
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
    return _walk(space, state, move_of, next_cut)


def _least_ahead(problem: PipelineProblem, costs: StageCosts, space: PlacementSpace) -> Floats:
    """[cuts] device seconds per input that the layers before a cut need at the least."""
    kinds, _ = space.moves.numbered("pool", "num_replicas", "span")
    found = np.full(costs.cuts.size, np.inf)
    for pool in range(len(problem.pools)):
        rates = [
            m * costs.slopes(own, m, span).per_compute for own, m, span in kinds if own == pool
        ]
        if rates and len(problem.pools) == 1:
            work = costs.compute_seconds[pool] + costs.own_seconds[pool]
            found = np.minimum(found, min(rates) * work)
    found[0] = 0.0
    return np.where(np.isfinite(found), found, 0.0)


def _walk(
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
        self.limited: dict[tuple[int, int, int, int, int], Floats] = {}

    def cost(self, move: Move) -> Floats:
        key = (move.pool, move.num_replicas, move.span)
        if key not in self.seconds:
            self.seconds[key] = self.costs.matrix(*key)
        limit = self.problem.pools[move.pool].limit_bytes
        if limit is None:
            return self.seconds[key]
        stash = self.costs.stashed(move.num_replicas, move.workers)
        if (*key, *stash) not in self.limited:
            seconds = self.seconds[key].copy()
            seconds[self.costs.own_bytes(*stash) > limit + self.extra_bytes] = np.inf
            self.limited[(*key, *stash)] = seconds
        return self.limited[(*key, *stash)]
