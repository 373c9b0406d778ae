"""Rounds on a flat pool, compiled by numba: the same choices and digits as ``Rounds``.

From event to event the rounds run in one call of ``run_stretch``. Jobs that end keep
their places until an allocation needs these.
"""

from typing import Any

import numpy as np

from ...solvers.compiling import compiled
from ..mechanisms.pool import NOWHERE, Floats, Ints
from ..mechanisms.round_state import ANY_SHARE
from ..mechanisms.rounds import type_order
from .rounds import STEPS_LEFT, Rounds

# Rows of the blocks of ``Active``.
RATE, RELATIVE, RECEIVED, SHARE, DEFICIT, HELD = range(6)
LEFT, STARTED = 0, 3
SCALE, LAST_TYPE, RESTARTS = 0, 1, 3


@compiled
def _goes_first(a: Any, b: Any, priority: Any, deficit: Any, by_deficit: Any) -> Any:
    """Whether place a goes before place b: higher priority, larger deficit, first to stand."""
    if priority[a] != priority[b]:
        return priority[a] > priority[b]
    if by_deficit and deficit[a] != deficit[b]:
        return deficit[a] > deficit[b]
    # First to stand: numpy's stable sorts decide alike.
    return a < b


@compiled
def _sink(heap: Any, at: Any, number: Any, priority: Any, deficit: Any, by_deficit: Any) -> None:
    """Let the entry at a place of a heap sink to where it belongs."""
    place = heap[at]
    while True:
        child = 2 * at + 1
        if child >= number:
            break
        if child + 1 < number and _goes_first(
            heap[child + 1], heap[child], priority, deficit, by_deficit
        ):
            child += 1
        if not _goes_first(heap[child], place, priority, deficit, by_deficit):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = place


@compiled
def _take(
    wanted: Any, number: Any, kind: Any, free: Any, scale: Any, chosen: Any,
    priority: Any, deficit: Any, by_deficit: Any,
) -> None:  # fmt: skip
    """Give a type's devices to the jobs that want them, in order, skipping jobs that do not fit."""
    # Only as many entries leave the heap as get devices: a sort of all would cost more.
    for at in range(number // 2 - 1, -1, -1):
        _sink(wanted, at, number, priority, deficit, by_deficit)
    while number and free:
        place = wanted[0]
        number -= 1
        wanted[0] = wanted[number]
        _sink(wanted, 0, number, priority, deficit, by_deficit)
        if scale[place] <= free:
            chosen[place] = kind
            free -= scale[place]


@compiled
def _choose(
    pairs: Any, scale: Any, number: Any, free: Any, order: Any, published: Any, fills_idle: Any,
    any_share: Any, chosen: Any, wanted: Any, priority: Any,
) -> None:  # fmt: skip
    """Write the type that each job runs on into ``chosen`` (``priorities.choose_by_type``)."""
    least = 0.0 if fills_idle else any_share
    for place in range(number):
        chosen[place] = NOWHERE
    # Types one after another, each to jobs that have none yet.
    for kind in order:
        wanting = needed = 0
        for place in range(number):
            if chosen[place] != NOWHERE:
                continue
            # X / f without the type's own sum, which orders nothing within it.
            rank = pairs[SHARE, kind, place] / pairs[RECEIVED, kind, place]
            if fills_idle and not published:
                relative = pairs[RELATIVE, kind, place]
                if relative <= 0.0:
                    continue
                # Behind all with a share, by speed: shares are > 0, this is < 0.
                if not rank > 0.0:
                    rank = relative - 2.0
            elif not (pairs[RATE, kind, place] > 0.0 and rank >= least):
                continue
            priority[place] = rank
            wanted[wanting] = place
            wanting += 1
            needed += scale[place]
        # All fit: no order is needed.
        if needed <= free[kind]:
            for at in range(wanting):
                chosen[wanted[at]] = kind
        else:
            _take(
                wanted, wanting, kind, free[kind], scale, chosen, priority, pairs[DEFICIT, kind],
                published,
            )  # fmt: skip


@compiled
def run_stretch(
    pairs: Any, floats: Any, ints: Any, number: Any, free: Any, orders: Any, draws_orders: Any,
    worker_seconds: Any, busy: Any, now: Any, until: Any, due: Any, most: Any,
    round_seconds: Any, lost_seconds: Any, ends: Any, fills_idle: Any, limits: Any,
    chosen: Any, wanted: Any, priority: Any, ended: Any, finish: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Run rounds until a job ends or arrives, an allocation is due, or ``most`` are run.

    ``pairs``, ``floats`` and ``ints`` are the blocks of ``Active`` with ``number`` places in use,
    written in place. ``orders`` [rounds, types] is the order in which types are served; without
    ``draws_orders`` its first row is every round's. ``worker_seconds`` and ``busy`` [types] are
    added to. ``due`` is the time of the last allocation, and how long after it the next is due.
    ``lost_seconds`` is what a restart and a resize cost; ``ends`` whether the convention is
    published, and rounds end early. ``chosen``, ``wanted`` and ``priority`` [places] are scratch;
    ``ended`` and ``finish`` [places] receive who ends, and when.

    Returns:
        The time, the rounds run, and how many jobs ended.
    """
    types = len(free)
    left, started = floats[LEFT], floats[STARTED]
    scale, last_type, restarts = ints[SCALE], ints[LAST_TYPE], ints[RESTARTS]
    (reset, wait), (any_share, steps_left) = due, limits
    (restart_seconds, resize_seconds), (published, ends_early) = lost_seconds, ends
    rounds = done = 0
    while True:
        order = orders[rounds if draws_orders else 0]
        _choose(
            pairs, scale, number, free, order, published, fills_idle, any_share, chosen, wanted,
            priority,
        )  # fmt: skip
        rounds += 1
        longest, anybody = 0.0, False
        for kind in range(types):
            worked = spent = 0.0
            for place in range(number):
                if chosen[place] != kind:
                    continue
                rate, moved = pairs[RATE, kind, place], last_type[place] != kind
                lost = 0.0
                if moved:
                    lost = restart_seconds if last_type[place] == NOWHERE else resize_seconds
                possible = rate * (round_seconds - lost)
                if published:
                    possible = max(np.floor(possible), 1.0)
                steps = min(possible, left[place])
                seconds = steps / rate + lost
                left[place] -= steps
                pairs[HELD, kind, place] += seconds
                pairs[RECEIVED, kind, place] += seconds
                worked += seconds
                spent += seconds * scale[place]
                # ``priority`` is free by now and keeps the seconds of this round.
                priority[place] = seconds
                if not anybody or seconds > longest:
                    longest, anybody = seconds, True
                if moved:
                    if started[place] < 0.0:
                        started[place] = now
                    else:
                        restarts[place] += 1
            worker_seconds[kind] += worked
            busy[kind] += spent
        goes_on = False
        for place in range(number):
            last_type[place] = chosen[place]
            if chosen[place] == NOWHERE:
                continue
            if left[place] <= steps_left:
                ended[done], finish[done] = place, now + priority[place]
                done += 1
            else:
                goes_on = True
        # As ``Rounds.end``: at the last job by the published convention, else in time or early.
        end = now + round_seconds
        if published and anybody:
            end = now + longest
        elif ends_early and anybody:
            end = end if goes_on else min(end, now + longest)
        elif ends_early:
            end = min(end, until)
        now = end
        # What ends a stretch is what Python has to see: an end, an arrival, an allocation.
        if done or now >= until or rounds >= most or now - reset >= wait:
            return now, rounds, done


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
        # Nobody can interrupt compiled code.
        most = min(_MOST, options.max_rounds - self.num_rounds + 1)
        if draws:
            if not len(self.orders):
                orders = np.tile(np.arange(len(self.pool.types)), (_AHEAD, 1))
                # Drawn ahead, in the order in which ``Rounds`` would draw them.
                self.orders = state.random.permuted(orders, axis=1)
            most = min(most, len(self.orders))
        elif state.order is None or not len(self.orders):
            self.orders = np.array([type_order(state, self.allocator)])
        # No allocation is due before there was one, or while nothing changed.
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
        # One round was counted by the caller.
        self.num_rounds += rounds - 1
        if draws:
            self.orders = self.orders[rounds:]
        if done:
            self._end(ended[:done].tolist(), finish[:done].tolist())

    def _end(self, places: list[int], finish: list[float]) -> None:
        self.ended.extend(zip(places, finish, strict=True))
        self.active.leave(places)
        # A rate of 0 keeps a gap from ever being chosen.
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
