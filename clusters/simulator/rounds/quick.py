"""Rounds on a flat pool, compiled: the same choices and the same digits as ``Rounds``.

From event to event the rounds run in one call of ``quick_stretch.run_stretch``. Jobs that end keep
their places until an allocation needs these.
"""

import numpy as np

from ...mechanisms.arrays import Floats, Ints
from ...mechanisms.rounds.decide import type_order
from ...mechanisms.rounds.rules import ANY_SHARE
from .base import Rounds
from .options import STEPS_LEFT
from .quick_stretch import run_stretch

_AHEAD = 256  # orders of types drawn at once
_MOST = 100_000  # rounds in one call, some 0.1 s: nothing interrupts it


class CompiledRounds(Rounds):
    """Rounds of a stretch in one call.

    ``ended`` are jobs that are done, by place, and their finish; ``orders`` [rounds, types] those
    in which types are served in the rounds to come.
    """

    def begin(self) -> None:
        """Start with no ended job and no drawn order."""
        self.ended: list[tuple[int, float]] = []
        self.orders: Ints = np.zeros((0, len(self.pool.types)), dtype=np.int64)
        self.places: Ints = np.zeros((3, 0), dtype=np.int64)
        self.seconds: Floats = np.zeros((2, 0))

    def run_round(self) -> None:
        """Run rounds until a job ends or arrives, or an allocation is due."""
        state, active, options = self.state, self.active, self.options
        if self.places.shape[1] < active.room:
            self.places = np.zeros((3, active.room), dtype=np.int64)
            self.seconds = np.zeros((2, active.room))
        draws = self.allocator.agnostic
        most = min(_MOST, options.max_rounds - self.num_rounds + 1)
        if draws:
            if not len(self.orders):
                orders = np.tile(np.arange(len(self.pool.types)), (_AHEAD, 1))
                self.orders = state.random.permuted(orders, axis=1)
            most = min(most, len(self.orders))
        elif state.order is None or not len(self.orders):
            self.orders = np.array([type_order(state, self.allocator)])
        waits = state.changed and state.last_reset is not None
        # Floats all: numba compiles anew for other types.
        reset, due = (state.last_reset or 0.0), (float(options.reset_seconds) if waits else np.inf)
        chosen, wanted, ended = self.places
        priority, finish = self.seconds
        self.now, rounds, done = run_stretch(
            active.pairs, active.floats, active.ints, len(active), state.up, self.orders, draws,
            state.worker_seconds, self.busy, self.now, float(self.queue.next_seconds),
            (reset, due), most, float(options.round_seconds),
            (float(options.restart_seconds), float(options.moving_seconds)),
            (options.convention == "published", options.ends_early), options.fills_idle,
            (ANY_SHARE, STEPS_LEFT),
            chosen, wanted, priority, ended, finish,
        )  # fmt: skip
        self.num_rounds += rounds - 1
        if draws:
            self.orders = self.orders[rounds:]
        if done:
            self._end(ended[:done].tolist(), finish[:done].tolist())

    def _end(self, places: list[int], finish: list[float]) -> None:
        self.ended.extend(zip(places, finish, strict=True))
        self.active.leave(places)
        self.active.pairs[:2, :, places] = 0.0  # runs nowhere
        self.num_done += len(places)
        self.state.lost_jobs()

    def settle(self) -> None:
        """Record the outcomes of ended jobs, and close the gaps that they leave in the blocks."""
        if self.ended:
            self.outcomes.extend(
                self.active.outcome(place, finish, self.hourly) for place, finish in self.ended
            )
            self.ended = []
            self.active.sweep()
