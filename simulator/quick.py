"""Rounds on a flat pool, fast: the same choices and the same digits as ``Rounds``.

What a round needs lies ready until jobs come or an allocation is made: rates, what a whole round
brings, who fills idle devices. Starts and moves are written into the books when these are needed.
Where nobody is passed over, the choice is kept, and a long stretch of such rounds is one addition
each; all additions are those of ``Rounds``, in the same order.
"""

from dataclasses import dataclass

import numpy as np

from ..schema.jobs import Job
from .priorities import NOWHERE, Floats, Ints
from .rounds import STEPS_LEFT, RoundOptions, Rounds

_LOG = 64  # rounds whose books may wait
_MOST = 1e9
_AHEAD = 256  # orders of types drawn at once
_NOBODY: Ints = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Choice:
    """Who runs [running jobs], by column, then place; what a whole round brings to each.

    ``change`` is all of that in a row, once it has been asked for.
    """

    runs: Ints
    column: Ints
    flat: Ints
    steps: Floats
    seconds: Floats
    busy: Floats
    change: Floats | None = None


def is_plain(options: RoundOptions) -> bool:
    """Whether no servers, failures or spans have to be watched round by round."""
    return (
        options.selection == "by_type"
        and options.servers is None
        and options.failures is None
        and not options.records_spans
    )


def _whole(rounds: float) -> int:
    """How many rounds are whole for certain, though sums of so many err in their last digits."""
    return int(max(-1.0, min(rounds, _MOST) - (1e-6 if rounds < 1000.0 else 2.0)) // 1.0)


class QuickRounds(Rounds):
    """Rounds over flat arrays.

    A place in a [columns, places] array counts as column * room + place. ``where`` holds who ran
    where in the rounds whose starts and moves are not yet in the books [rounds, places], the
    first row what was before; ``ended`` jobs that are done and their finish; ``again`` the choice
    that the next round would make once more.
    """

    def begin(self) -> None:
        """Nothing lies ready yet."""
        self.starts: list[float] = []
        self.where = np.zeros((0, 0), dtype=np.int16)
        self.ended: list[tuple[int, float]] = []
        self.stale = self.alike = True
        self.free = self.pool.capacity.tolist()
        self.kinds = 0
        self.counts: tuple[int, ...] = ()
        self.column = self.offset = np.zeros(0, dtype=np.int64)
        self.orders: list[list[int]] = []
        self.scales: list[int] = []
        self.again: _Choice | None = None
        self.logged: _Choice | None = None
        self.published = self.options.convention == "published"

    def admit(self, jobs: list[Job]) -> None:
        """Let jobs in."""
        active, before = self.active, len(self.active)
        if not active.has_room(len(jobs)):
            self._write()
            self.stale = True
        super().admit(jobs)
        self.again = None
        if len(active.kinds) > self.kinds:
            self._learn()
        if self.stale:
            return
        for place, kind in enumerate(active.kind[before:].tolist(), start=before):
            self.ready[:, :, place] = self.of_kind[1:, :, kind]
            self.least_first[:, place] = 0.0
        self.scales.extend(job.scale_factor for job in jobs)
        self.alike = self.alike and all(job.scale_factor == 1 for job in jobs)
        if self.published:
            self._take_turns()

    def take_shares(self) -> None:
        """Let the policy share the pool."""
        super().take_shares()
        self.stale = True

    def _learn(self) -> None:
        """What a kind of jobs makes in a whole round, and its rank without a share."""
        active, options = self.active, self.options
        fresh = [active.fresh(kind) for kind in range(len(active.kinds))]
        rate, relative = (np.array(side).T for side in zip(*fresh, strict=True))
        scale = np.array([key[1] for key in active.kinds])
        runs = rate > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds, steps = self.work(rate, np.full(rate.shape, np.inf), np.zeros(rate.shape))
        with_share = np.where(runs, 0.0, np.inf)
        fills = np.where(runs, 2.0 - relative, np.inf)
        if not options.fills_idle:
            fills[:] = np.inf
        elif self.published:
            fills = with_share
        self.of_kind = np.array((with_share, fills, rate, steps, seconds, seconds * scale))
        self.kinds = len(active.kinds)

    def _prepare(self) -> None:
        active, number = self.active, len(self.active)
        everything = self.of_kind.take(active.ints[2], axis=2)
        self.ready = everything[1:]
        self.rank = self.ready[0]
        share = active.pairs[3]
        np.copyto(self.rank, everything[0], where=share > 0)
        self.rank[:, number:] = np.inf
        self.rank[:, active.gone] = np.inf
        self.least_first = -share
        self.rate, self.steps, self.seconds, self.spent = self.ready[1:].reshape(4, -1)
        self.received, self.held = active.pairs[2], active.pairs[5].reshape(-1)
        self.had = self.received.reshape(-1)
        self.urgency = np.empty_like(self.rank)
        self.rows = list(self.urgency)
        self.scales = active.scale.tolist()
        self.alike = max(self.scales, default=1) == 1
        self.counts = ()
        self.turn: Ints | None = None
        if self.published:
            self._take_turns()
        if self.where.shape[1] != active.room:
            self.where = np.full((_LOG + 1, active.room), NOWHERE, dtype=np.int16)
        self.where[0] = NOWHERE
        self.where[0, :number] = active.last_type
        self.again, self.stale = None, False

    def _take_turns(self) -> None:
        """Of equal priorities the larger deficit goes first, then the place."""
        self.turn = np.tile(np.arange(self.active.room), (len(self.rows), 1))
        number = len(self.active)
        self.turn[:, :number] = (-self.active.deficit).argsort(axis=1, kind="stable")

    def run_round(self) -> None:
        """Choose who runs, and let them work for a round."""
        if self.stale:
            self._prepare()
        choice = self.again
        if choice is None:
            choice = self._choose_anew()
        elif self.allocator.agnostic:
            self.type_order()  # keeps its place in the random stream
        active, options, runs, flat = self.active, self.options, choice.runs, choice.flat
        left_of = active.floats[0]
        had = left_of[runs]
        left = had - choice.steps
        seconds, busy = choice.seconds, choice.busy
        done: Ints | None = None
        if options.restart_seconds or np.minimum.reduce(left, initial=np.inf) <= STEPS_LEFT:
            moved = self.where[len(self.starts)][runs] != choice.column
            seconds, steps = self.work(self.rate[flat], had, options.restart_seconds * moved)
            left = had - steps
            busy = self._sums(choice.column, seconds * active.scale[runs])
            done = (left <= STEPS_LEFT).nonzero()[0]
        left_of[runs] = left
        self.had[flat] += seconds
        self.held[flat] += seconds
        self.busy += busy
        start = self.now
        if choice is not self.logged:
            self.logged = choice
            self.starts.append(start)
            self.where[len(self.starts)][runs] = choice.column
        self.now = start + self.length(seconds)
        if len(self.starts) >= _LOG:
            self._write()
        if done is not None and len(done):
            self._end(runs[done], start + seconds[done])
        elif self.again is not None:
            self._repeat(choice)

    def _sums(self, column: Ints, values: Floats) -> Floats:
        return np.bincount(column, weights=values, minlength=len(self.busy)).astype(
            np.float64, copy=False
        )

    def _choose_anew(self) -> "_Choice":
        urgency = self.urgency  # minus X / t: the least goes first
        np.divide(self.least_first, self.received, out=urgency)
        np.add(urgency, self.rank, out=urgency)
        order = self.type_order()
        if self.alike:
            contested, counts, runs = self._take_any(order)
        else:
            contested, counts, runs = self._take_fitting(order)
        if counts != self.counts:
            self.counts, self.column = counts, np.arange(len(counts)).repeat(counts)
            self.offset = self.column * self.active.room
        column, flat = self.column, self.offset + runs
        busy = self._sums(column, self.spent[flat])
        choice = _Choice(runs, column, flat, self.steps[flat], self.seconds[flat], busy)
        if not contested and self._order_is_fixed():
            self.again = choice
        return choice

    def _ranked(self, kind: int) -> Ints:
        row = self.rows[kind]
        if self.turn is None:
            answer: Ints = row.argsort(kind="stable")
            return answer
        turn = self.turn[kind]
        answer = turn[row[turn].argsort(kind="stable")]
        return answer

    def _take_any(self, order: list[int]) -> tuple[bool, tuple[int, ...], Ints]:
        """Jobs of one device: whether some had to wait, how many run on each type, and who."""
        rows, contested = self.rows, False
        parts: list[Ints] = [_NOBODY] * len(order)
        for turn, kind in enumerate(order, start=1):
            row, free = rows[kind], self.free[kind]
            chosen = (row < np.inf).nonzero()[0]
            if len(chosen) > free:
                chosen = self._ranked(kind)[:free]
                chosen.sort()
                contested = True
            for later in order[turn:]:
                rows[later][chosen] = np.inf
            parts[kind] = chosen
        return contested, tuple(map(len, parts)), np.concatenate(parts)

    def _take_fitting(self, order: list[int]) -> tuple[bool, tuple[int, ...], Ints]:
        """The same for jobs of several devices: each in turn that still fits."""
        scales, contested = self.scales, False
        parts: list[list[int]] = [[]] * len(order)
        taken = set[int]()
        for kind in order:
            free, chosen = self.free[kind], list[int]()
            wants = (self.rows[kind] < np.inf).nonzero()[0]
            wanted = len(wants)
            places = wants.tolist() if wanted <= free else []
            if wanted > free or sum(map(scales.__getitem__, places)) > free:
                places = self._ranked(kind)[:wanted].tolist()
            for place in places:
                if place in taken:
                    continue
                need = scales[place]
                if need <= free:
                    chosen.append(place)
                    free -= need
                else:
                    contested = True
                    if not free:
                        break
            taken.update(chosen)
            chosen.sort()
            parts[kind] = chosen
        counts = tuple(map(len, parts))
        return contested, counts, np.array(sum(parts, []), dtype=np.int64)

    def type_order(self) -> list[int]:
        """As for plain rounds; orders drawn at random are drawn many at once."""
        if not self.allocator.agnostic:
            return self.order or super().type_order()
        if not self.orders:
            self.orders = self._drawn(_AHEAD).tolist()[::-1]
        return self.orders.pop()

    def _drawn(self, number: int) -> Ints:
        orders: Ints = np.tile(np.arange(len(self.pool.types)), (number, 1))
        return self.random.permuted(orders, axis=1)

    def _end(self, places: Ints, finish: Floats) -> None:
        order = places.argsort()
        ended = places[order].tolist()
        self.ended.extend(zip(ended, finish[order].tolist(), strict=True))
        self.active.leave(ended)
        for place in ended:
            self.rank[:, place] = np.inf
            self.least_first[:, place] = 0.0
        self.num_done += len(ended)
        self.changed, self.order, self.again = True, None, None

    def settle(self) -> None:
        """Bring all books up to date, and say what became of the jobs that are done."""
        self._write()
        if self.ended:
            self.outcomes.extend(
                self.active.outcome(place, finish, self.hourly) for place, finish in self.ended
            )
            self.ended = []
            self.active.sweep()
            self.stale = True

    def _write(self) -> None:
        """Write who started or moved when into the books."""
        number, active = len(self.starts), self.active
        if not number:
            return
        where = self.where[: number + 1, : len(active)]
        after = where[1:]
        rounds, places = ((after != where[:-1]) & (after != NOWHERE)).nonzero()
        times = np.bincount(places, minlength=len(active))
        for place in ((active.started < 0) & (times > 0)).nonzero()[0].tolist():
            active.started[place] = self.starts[rounds[places == place][0]]
            times[place] -= 1
        active.restarts += times
        active.last_type = after[-1]
        self.where[0] = self.where[number]
        self.where[1 : number + 1] = NOWHERE
        self.starts = []

    def _order_is_fixed(self) -> bool:
        """Whether types may be served in any order: where it is drawn anew each time."""
        if not self.allocator.agnostic:
            return True
        return bool(((self.rank < np.inf).sum(axis=0) <= 1).all())

    def _repeat(self, choice: "_Choice") -> None:
        """Run the round that was just run again and again, as long as nothing can differ.

        Nobody was passed over, so the next round chooses the same; until a job arrives or ends,
        or an allocation is due, only the books go on: one addition a round to all of them.
        """
        until, length = self.queue.next_seconds, self.length(choice.seconds)
        if self.changed and self.last_reset is not None:
            until = min(until, self.last_reset + self.options.reset_seconds)
        sure = min(
            _whole((until - self.now) / length) + 1, self.options.max_rounds - self.num_rounds
        )
        if sure < 1:
            return
        runs, flat = choice.runs, choice.flat
        left = self.active.floats[0][runs]
        rounds = (left - 2.0 * STEPS_LEFT) / choice.steps
        sure = min(sure, _whole(float(np.minimum.reduce(rounds, initial=_MOST))))
        if sure < 1:
            return
        if choice.change is None:
            each = (-choice.steps, choice.seconds, choice.seconds, choice.busy, (length,))
            choice.change = np.concatenate(each)
        change, number = choice.change, len(runs)
        books = np.concatenate(
            (left, self.held[flat], self.had[flat], self.busy, (self.now,))
        )  # fmt: skip
        for _ in range(sure):
            books += change
        if self.allocator.agnostic:  # the orders that so many rounds would have drawn
            waiting = len(self.orders)
            del self.orders[max(0, waiting - sure) :]
            if sure > waiting:
                self._drawn(sure - waiting)
        self.num_rounds += sure
        self.active.floats[0][runs] = books[:number]
        self.held[flat] = books[number : 2 * number]
        self.had[flat] = books[2 * number : 3 * number]
        self.busy[:] = books[3 * number : -1]
        self.now = float(books[-1])
