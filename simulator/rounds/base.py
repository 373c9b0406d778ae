"""Gavel's mechanism: time in rounds, each given to the jobs furthest behind (thesis 5.5).

Two conventions. ``text`` is the thesis: rounds of equal length, devices that nobody has a share
of given to the jobs that are relatively fastest there. ``published`` is what Gavel's simulator
does: whole steps, a round that ends with its last job, ties by accumulated deficit. Both start a
job's time at half a round after each allocation, count it once for all its devices, and serve
device types one after another, fastest first (at random under agnostic policies);
``selection="joint"`` ranks all pairs of job and type together, the other reading of algorithm 2.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from ...mechanisms.allocators.shares import Allocator
from ...mechanisms.arrays import NOWHERE, Bools, Floats, Ints
from ...mechanisms.cluster.active import Active
from ...mechanisms.cluster.layout import Layout
from ...mechanisms.cluster.pool import Pool
from ...mechanisms.cluster.seats import Placement
from ...mechanisms.cluster.servers import Servers
from ...mechanisms.rounds.priorities import choose, choose_by_type, fill_idle, priorities
from ...schema.errors import ProblemError
from ...schema.jobs import Job
from ...schema.simulation import JobOutcome
from ..cluster.failures import Seats
from ..cluster.span_book import SpanBook
from ..outcomes import Simulation
from ..traces.arrivals import Queue
from .options import ANY_SHARE, STEPS_LEFT, RoundOptions
from .outages import Outages, shares_of_fitting

_NOBODY: Ints = np.zeros(0, dtype=np.int64)
_NEAR = 1e-6  # apart, so that sums kept from job to job tell types' order


class Rounds:
    """The state between two rounds."""

    def __init__(
        self, queue: Queue, pool: Pool, allocator: Allocator, options: RoundOptions
    ) -> None:
        self.queue, self.pool, self.allocator, self.options = queue, pool, allocator, options
        self.active = Active(pool)
        self.now = 0.0
        self.last_reset: float | None = None
        self.changed = False
        self.worker_seconds = np.zeros(len(pool.columns))
        self.busy = np.zeros(len(pool.types))
        self.hourly = pool.hourly()
        self.outcomes: list[JobOutcome] = []
        self.book: SpanBook | None = None
        if options.records_spans:
            layout = options.layout
            if layout is None and options.servers is not None:
                layout = Layout.apart(options.servers)
            self.book = SpanBook(pool.types, pool.capacity.tolist(), layout)
        self.num_rounds = self.num_allocations = 0
        self.up = pool.capacity
        self.outages = None if options.failures is None else Outages(options, pool)
        self.random = np.random.default_rng(options.seed)
        self.servers: Servers | None = None
        if options.servers is not None:
            self.servers = Servers([list(sizes) for sizes in options.servers])
        # Half a round to begin with: else f = 0, and a job with next to no share goes before
        # one with a large share that has had its first round.
        self.head_start = options.round_seconds / 2.0
        self.order: list[int] | None = None
        self.num_done = 0
        self.begin()

    def begin(self) -> None:
        """What a kind of rounds keeps besides."""

    def step(self) -> bool:
        """One round; False when all jobs are done."""
        if not self.active.present:
            if self.queue.next is None:
                return False
            self.now = max(self.now, self.queue.next_seconds)
        arrived = self.queue.until(self.now)
        if arrived:
            self.admit(arrived)
        if self.outages is not None:
            self._look_at(self.outages)
        self._allocate()
        if self.num_rounds >= self.options.max_rounds:
            raise ProblemError(f"not done after {self.options.max_rounds} rounds; check the load")
        self.num_rounds += 1
        self.run_round()
        return True

    def _look_at(self, outages: Outages) -> None:
        """See what is up; what changed is a reason to allocate anew."""
        outages.refuse_to_stall(self.active, self.now, self.num_done)
        up = outages.up(self.now)
        if (up != self.up).any():  # else the same array, by which policies know what they solved
            self.up = self.active.capacity = up
            self.active.consolidated = outages.consolidated(self.pool)
            self.changed = True

    def admit(self, jobs: list[Job]) -> None:
        """Let jobs in; they have no share before the next allocation."""
        self.active.add(jobs, self.head_start)
        self.order = None
        self.worker_seconds += self.head_start * len(jobs)
        self.changed = True

    def settle(self) -> None:
        """Bring all books up to date, where a kind of rounds puts that off."""

    def _allocate(self) -> None:
        due = self.last_reset is None or self.now - self.last_reset >= self.options.reset_seconds
        if not (self.changed and due):
            return
        self.settle()
        active = self.active
        if self.options.convention == "published":  # by the text nobody asks for it
            passed = 0.0 if self.last_reset is None else self.now - self.last_reset
            active.deficit[:] = (
                active.deficit + active.share * passed - active.received + self.head_start
            )
        self.take_shares()
        active.received[:] = self.head_start
        self.worker_seconds[:] = active.received.sum(axis=1)
        self.last_reset, self.changed = self.now, False
        self.num_allocations += 1

    def take_shares(self) -> None:
        """Let the policy share the pool."""
        self.active.share = shares_of_fitting(self.allocator, self.active, self.now).x

    def _choose(self) -> Ints:
        active, free = self.active, self.up
        joint = self.options.selection == "joint"
        # All of one type have the same sum of t, so it orders types among each other only.
        worked = self.worker_seconds if joint else np.ones(len(active.share))
        ranked = priorities(active.share, active.received, worked)
        if self.options.fills_idle and self.options.convention == "text":
            ranked = fill_idle(ranked, active.relative)
        else:
            least = 0.0 if self.options.fills_idle else ANY_SHARE
            ranked = np.where((active.rate > 0) & (ranked >= least), ranked, -np.inf)
        if joint:
            return choose(ranked, active.scale, free)
        ties = active.deficit if self.options.convention == "published" else None
        return choose_by_type(ranked, ties, active.scale, free, self.type_order())

    def type_order(self) -> list[int]:
        """Fastest first, by the mean rate of the jobs present relative to each one's best."""
        if self.allocator.agnostic:
            return self._with_apart(self.random.permutation(len(self.pool.types)).tolist())
        if self.order is None:
            speed = self.active.speed[: len(self.pool.types)]
            ranked = sorted(range(len(speed)), key=speed.__getitem__, reverse=True)
            if any(speed[a] - speed[b] < _NEAR for a, b in itertools.pairwise(ranked)):
                exact = self.active.exact_speed()[: len(speed)]
                ranked = np.argsort(-exact, kind="stable").tolist()
            self.order = self._with_apart(ranked)
        return self.order

    def _with_apart(self, order: list[int]) -> list[int]:
        """Each type's unconsolidated column right after it."""
        if self.pool.consolidated is None:
            return order
        return [column for kind in order for column in (kind, kind + len(order))]

    def run_round(self) -> None:
        """Choose who runs, and let them work for a round."""
        chosen = self._choose()
        active, options = self.active, self.options
        runs = (chosen != NOWHERE).nonzero()[0]
        kind = chosen[runs]
        rate = active.rate[kind, runs]
        moved = active.last_type[runs] != kind
        if self.servers is not None:
            ids = [(active.jobs[i].id,) for i in runs.tolist()]
            close, relocated = self.seat(ids, kind, active.scale[runs])
            rate, moved = rate * self.spread_rate(runs, kind, close), moved | relocated
        lost = options.restart_seconds * moved
        seconds, steps = self.work(rate, active.left[runs], lost)
        scale = active.scale[runs]
        struck = _NOBODY
        if self.outages is not None:
            usage = np.where(np.arange(len(self.up))[:, None] == kind, scale, 0)
            ids = [(active.jobs[i].id,) for i in runs.tolist()]
            struck = self.strike(ids, usage, self.outages)
        steps[struck] = 0.0
        left = active.left[runs] - steps
        done = left <= STEPS_LEFT
        active.left[runs] = left
        active.held[kind, runs] += seconds
        spent = seconds * scale
        active.received[kind, runs] += seconds
        self.worker_seconds += np.bincount(kind, weights=seconds, minlength=len(self.busy))
        self.busy += np.bincount(kind, weights=spent, minlength=len(self.busy))
        self.note(runs, moved)
        if self.book is not None:
            ids = [(active.jobs[i].id,) for i in runs.tolist()]
            self.hold(self.book, ids, kind, scale, seconds[:, None].tolist(), struck)
        chosen[runs[struck]] = NOWHERE  # it restarts
        active.last_type[:] = chosen
        start = self.now
        self.now = start + self.length(seconds)
        if done.any():
            gone = active.remove(runs[done], start + seconds[done], self.hourly)
            self.outcomes.extend(gone)
            self.num_done += len(gone)
            self.changed, self.order = True, None

    def seat(
        self,
        ids: Sequence[tuple[str, ...]],
        kind: Ints,
        scale: Ints,
        apart: Sequence[bool] = (),
    ) -> tuple[Bools, Bools]:
        """Place jobs on servers: who is consolidated, and who moved."""
        assert self.servers is not None
        standing = self.servers.sizes if self.outages is None else self.outages.standing
        close, kept = self.servers.place(ids, kind.tolist(), scale.tolist(), standing, apart)
        return np.array(close, dtype=bool), ~np.array(kept, dtype=bool)

    def spread_rate(self, runs: Ints, kind: Ints, close: Bools) -> Floats:
        """The part of their rate that jobs keep, 1 where they are consolidated [jobs]."""
        kept = np.ones(len(runs))
        for place in (~close).nonzero()[0].tolist():
            job, type_ = int(runs[place]), int(kind[place])
            apart = self.pool.apart_rate(self.active.jobs[job])[type_]
            kept[place] = apart / self.active.rate[type_, job]
        return kept

    def strike(self, ids: Sequence[tuple[str, ...]], usage: Ints, outages: Outages) -> Ints:
        """Let devices fail in this round; which holders they hit.

        Args:
            ids: The jobs of each holder [holders].
            usage: Devices that each holds of each type [types, holders].
            outages: What fails.
        """
        seats: list[Seats] = [
            [(kind, 0, number) for kind, number in enumerate(column) if number]
            for column in usage.T.tolist()
        ]
        if self.servers is not None:
            held = [self.servers.held[names[0]] for names in ids]
            seats = [[(kind, *seat) for seat in at.items()] for kind, at in held]
        return outages.failures.strike(seats, self.now, self.options.round_seconds)

    def work(self, rate: Floats, left: Floats, lost: Floats) -> tuple[Floats, Floats]:
        """Seconds each job works in a round, restart included, and the steps it makes."""
        possible = rate * (self.options.round_seconds - lost)
        if self.options.convention == "published":
            possible = np.maximum(np.floor(possible), 1.0)
        steps = np.minimum(possible, left)
        return steps / rate + lost, steps

    def length(self, seconds: Floats) -> float:
        """How long the round lasts: until its last job ends, or its full length."""
        if self.options.convention == "published" and len(seconds):
            return float(seconds.max())
        return self.options.round_seconds

    def note(self, runs: Ints, moved: Bools) -> None:
        """Keep the books of starts and restarts."""
        active = self.active
        movers = runs[moved]
        if len(movers):
            had = active.started[movers]
            active.started[movers] = np.where(had < 0, self.now, had)
            active.restarts[movers] += had >= 0

    def hold(
        self,
        book: SpanBook,
        ids: Sequence[tuple[str, ...]],
        column: Ints,
        often: Ints,
        seconds: Sequence[Sequence[float]],
        struck: Ints,
    ) -> None:
        """Keep who holds what in this round.

        Args:
            book: What to keep it in.
            ids: The jobs of each placement [placements].
            column: Where each is.
            often: How many times the devices of its column each holds.
            seconds: How long each job works [placements][jobs].
            struck: Placements that a failure hits in this round.
        """
        held = (self.pool.resources[:, column] * often).T.tolist()
        placements = [
            Placement(
                names,
                tuple((kind, int(number)) for kind, number in enumerate(counts) if number),
                None if self.servers is None else self.servers.held[names[0]][1],
            )
            for names, counts in zip(ids, held, strict=True)
        ]
        ends = [[self.now + time for time in each] for each in seconds]
        standing = None if self.outages is None else self.outages.standing
        book.hold(placements, self.now, ends, standing)
        book.strike(name for place in struck.tolist() for name in ids[place])

    def result(self) -> Simulation:
        """What the run leaves behind; it ends when its last job does."""
        end = max((job.finish_seconds for job in self.outcomes), default=0.0)
        return Simulation(
            jobs=tuple(self.outcomes),
            num_devices=dict(self.pool.num_devices),
            busy_seconds=dict(zip(self.pool.types, self.busy.tolist(), strict=True)),
            end_seconds=end,
            num_rounds=self.num_rounds,
            num_allocations=self.num_allocations,
            num_failures=0 if self.outages is None else self.outages.fleet.num_devices_failed,
            num_server_failures=(
                0 if self.outages is None else self.outages.fleet.num_servers_failed
            ),
            left_out=dict(self.queue.left_out),
            spans=() if self.book is None else self.book.spans(),
        )
