"""The dynamic program over cuts and device states: any graph, any count of workers.

f(state, cut) is the least time of the slowest stage that runs everything behind ``cut`` on the
devices of ``state``. One array of cuts a state; each move folds one stage in.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..schema.pipeline import PipelineProblem
from .pipeline_cuts import Floats
from .pipeline_prices import Prices
from .pipeline_space import Move, Space

PlacedStage = tuple[int, int, Move]


class Search(Protocol):
    """A method: the best placement under limits raised by some bytes, or None."""

    def __call__(
        self, problem: PipelineProblem, prices: Prices, space: Space, extra_bytes: float
    ) -> list[PlacedStage] | None:
        """Stages in the model's order."""


def search(
    problem: PipelineProblem, prices: Prices, space: Space, extra_bytes: float = 0.0
) -> list[PlacedStage] | None:
    """Find the best placement, first stage first; None where nothing fits the memory."""
    size = prices.cuts.size
    best = np.full((len(space.states), size), np.inf)
    move_of = np.full((len(space.states), size), -1, np.int32)
    next_cut = np.zeros((len(space.states), size), np.int32)
    best[0, -1] = 0.0
    table = _Table(problem, prices, extra_bytes)
    rows = np.arange(size)
    for number, move in enumerate(space.moves):
        behind = np.maximum(best[move.source], prices.boundary_seconds[move.gap])
        if not np.isfinite(behind).any():
            continue
        total = np.maximum(table.price(move), behind[None, :])
        following = total.argmin(axis=1)
        value = total[rows, following]
        better = value < best[move.target]
        best[move.target][better] = value[better]
        move_of[move.target][better] = number
        next_cut[move.target][better] = following[better]
    final = final_states(problem, space)
    state = final[int(np.argmin(best[final, 0]))]
    if not np.isfinite(best[state, 0]):
        return None
    return _walk(space, state, move_of, next_cut)


def final_states(problem: PipelineProblem, space: Space) -> NDArray[np.int64]:
    """The states in which a plan may end, by workers and stages asked for."""
    wanted = [
        index
        for index, state in enumerate(space.states)
        if (problem.workers == "at_most" or sum(state.used) == problem.num_devices)
        and (problem.num_stages is None or state.stages == problem.num_stages)
    ]
    return np.array(wanted or [0], np.int64)


def _walk(
    space: Space, state: int, move_of: NDArray[np.int32], next_cut: NDArray[np.int32]
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

    def __init__(self, problem: PipelineProblem, prices: Prices, extra_bytes: float) -> None:
        self.problem, self.prices, self.extra_bytes = problem, prices, extra_bytes
        self.seconds: dict[tuple[int, int, int], Floats] = {}
        self.limited: dict[tuple[int, int, int, int, int], Floats] = {}

    def price(self, move: Move) -> Floats:
        key = (move.pool, move.num_replicas, move.span)
        if key not in self.seconds:
            self.seconds[key] = self.prices.matrix(*key)
        limit = self.problem.pools[move.pool].limit_bytes
        if limit is None:
            return self.seconds[key]
        stash = self.prices.stashed(move.num_replicas, move.workers)
        if (*key, *stash) not in self.limited:
            seconds = self.seconds[key].copy()
            seconds[self.prices.own_bytes(*stash) > limit + self.extra_bytes] = np.inf
            self.limited[(*key, *stash)] = seconds
        return self.limited[(*key, *stash)]
