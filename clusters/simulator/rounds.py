"""Rounds in virtual time: carries out what ``mechanisms.rounds`` decides (thesis 5.5).

Two conventions. ``text`` is the thesis: rounds of equal length. ``published`` is what Gavel's
simulator does: whole steps, a round that ends with its last job.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.jobs import consolidated_devices
from ...schema.simulation import JobOutcome
from ..mechanisms.allocators import Allocator
from ..mechanisms.pool import NOWHERE, Active, Bools, ClusterPool, Floats, Ints
from ..mechanisms.round_state import LONGEST_ROUND, SHORTEST_ROUND, Chosen, RoundRules, RoundState
from ..mechanisms.rounds import (
    choose_alone,
    choose_together,
    is_due,
    receive,
    receive_together,
    round_end,
    seat_on_servers,
    share_anew,
)
from ..mechanisms.seats import DeviceLayout, Held, Placement
from .arrivals import Queue
from .failures import FailureOptions, Failures, Fleet, Seats
from .metrics import Simulation, SpanBook

STEPS_LEFT = 1e-9  # of a step: rounding of its own additions, not work
_NOBODY: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions(RoundRules):
    """How rounds run.

    ``restart_seconds`` is lost by a job that starts or changes its device type (a lease that is
    renewed loses nothing), ``resize_seconds`` (None: as much) by one that goes over to other
    devices of its server, which a live cluster does without a stop. ``ends_early`` ends a round by
    the text as soon as nobody holds a device and a job waits or comes, as a live cluster does.
    ``records_spans`` keeps who held what, on the servers of ``layout``
    (None: ``servers``, else a flat pool). ``failures`` (None: never) cost the job on the device
    the round: it goes back to the checkpoint at the round's start, and restarts. ``servers``
    holds the devices of each type on each server [types][servers]: jobs are then placed on
    servers, run at their unconsolidated rate where they are spread, and restart when they move;
    None ignores placement. Policies share what is up; a job that does not fit that waits.
    """

    restart_seconds: float = 0.0
    resize_seconds: float | None = None
    ends_early: bool = False
    records_spans: bool = False
    layout: DeviceLayout | None = None
    failures: FailureOptions | None = None
    seed: int = 0
    servers: tuple[tuple[int, ...], ...] | None = None
    max_rounds: int = 10_000_000

    def __post_init__(self) -> None:
        at_least_0 = (self.reset_seconds, self.restart_seconds, self.moving_seconds)
        if not SHORTEST_ROUND <= self.round_seconds <= LONGEST_ROUND or not all(
            0 <= t < math.inf for t in at_least_0
        ):
            raise ProblemError(
                f"rounds must last {SHORTEST_ROUND:g} to {LONGEST_ROUND:g} s, resets, restarts and "
                "resizes >= 0 s, all finite; got "
                f"{self.round_seconds}, {', '.join(map(str, at_least_0))}"
            )
        for what, seconds in (("restart", self.restart_seconds), ("resize", self.moving_seconds)):
            if seconds >= self.round_seconds:
                raise ProblemError(
                    f"a {what} of {seconds} s leaves nothing of a round of "
                    f"{self.round_seconds} s; make rounds longer"
                )

    @property
    def moving_seconds(self) -> float:
        """What a resize costs."""
        return self.restart_seconds if self.resize_seconds is None else self.resize_seconds

    @property
    def is_plain(self) -> bool:
        """Whether no servers, failures or spans have to be watched round by round."""
        return (
            self.selection == "by_type"
            and self.servers is None
            and self.failures is None
            and not self.records_spans
        )


class Outages:
    """The devices that are up in each round; refuses runs in which no job ends any more."""

    def __init__(self, options: RoundOptions, pool: ClusterPool) -> None:
        """Everything is up.

        Raises:
            ProblemError: The failures are those of other servers than jobs are placed on.
            InfeasibleError: Failures are so frequent that devices would do hardly any useful work.
        """
        assert options.failures is not None
        options.failures.refuse_hopeless(options.round_seconds)
        seats = [[number] for number in pool.capacity.tolist()]
        placed = DeviceLayout.apart(seats if options.servers is None else options.servers)
        layout = options.failures.layout or placed
        if layout.sizes != placed.sizes:
            raise ProblemError(
                "servers fail where these rounds place no jobs; give the rounds the same servers"
            )
        self.failures = Failures(options.failures, layout)
        self.standing = self.fleet.standing()
        self._done, self._since = -1, 0.0

    @property
    def fleet(self) -> Fleet:
        """Which devices are down."""
        return self.failures.fleet

    def up(self, now_seconds: float) -> Ints:
        """Devices of each type that work now [types]; ``standing`` says on which servers."""
        self.standing = self.failures.standing(now_seconds)
        return np.array([sum(row) for row in self.standing], dtype=np.int64)

    def consolidated(self, pool: ClusterPool) -> tuple[int, ...] | None:
        """How many devices of each type jobs can hold consolidated on what is up [types]."""
        if pool.consolidated is None:
            return None
        return consolidated_devices(pool.throughputs, self.standing)

    def refuse_to_stall(self, active: Active, now_seconds: float, num_done: int) -> None:
        """Watch whether jobs end.

        Raises:
            InfeasibleError: None has for very much longer than it takes without failures.
        """
        if num_done > self._done:
            self._done, self._since = num_done, now_seconds
        options = self.failures.options
        means = [m for m in (options.mean_seconds, options.server_mean_seconds) if m is not None]
        # A job may rightly wait for some failures and repairs, and then need its time several
        # times over.
        patience = STALLED_REPAIRS * (max(means) + options.repair_seconds)
        waited = now_seconds - self._since
        if waited <= patience:
            return
        alone = active.left / active.rate.max(axis=0)
        needed = float(alone.max() + (alone * active.scale).sum() / active.pool.capacity.sum())
        if waited <= patience + STALLED_TIMES * needed:
            return
        largest = active.jobs[int(active.scale.argmax())]
        raise InfeasibleError(
            f"no job has ended for {waited / _HOUR:.4g} h, and the {len(active)} jobs present need "
            f"{needed / _HOUR:.4g} h without failures (the limit is {STALLED_TIMES:g} times that, "
            f"and {STALLED_REPAIRS:g} failures and repairs); job {largest.id!r} needs "
            f"{largest.scale_factor} devices up at once",
            hint="make failures rarer, repairs shorter, or the pool larger",
        )


class Rounds:
    """The state between two rounds."""

    def __init__(
        self, queue: Queue, pool: ClusterPool, allocator: Allocator, options: RoundOptions
    ) -> None:
        self.queue, self.pool, self.allocator, self.options = queue, pool, allocator, options
        self.state = RoundState.empty(pool, options.servers, options.seed)
        self.now = 0.0
        self.busy = np.zeros(len(pool.types))
        self.hourly = pool.hourly()
        self.outcomes: list[JobOutcome] = []
        self.book: SpanBook | None = None
        if options.records_spans:
            layout = options.layout
            if layout is None and options.servers is not None:
                layout = DeviceLayout.apart(options.servers)
            self.book = SpanBook(pool.types, pool.capacity.tolist(), layout)
        self.num_rounds = self.num_allocations = 0
        self.outages = None if options.failures is None else Outages(options, pool)
        self.num_done = 0
        self.held_before: Mapping[str, Held] = {}
        self.begin()

    def begin(self) -> None:
        """Set up the further state of a kind of rounds."""

    @property
    def active(self) -> Active:
        """The jobs present."""
        return self.state.active

    def step(self) -> bool:
        """One round; False when all jobs are done."""
        if not self.active.present:
            if self.queue.next is None:
                return False
            # Nobody is there: time jumps to the next arrival.
            self.now = max(self.now, self.queue.next_seconds)
        arrived = self.queue.until(self.now)
        if arrived:
            self.state.admit(arrived, self.options.head_start_seconds)
        if self.outages is not None:
            self.outages.refuse_to_stall(self.active, self.now, self.num_done)
            # Policies know what they solved by the array of devices that are up, so it changes
            # only when they do.
            if self.state.see(self.outages.up(self.now)):
                self.active.consolidated = self.outages.consolidated(self.pool)
        if is_due(self.state, self.now, self.options):
            self.settle()
            share_anew(self.state, self.allocator, self.now, self.options)
            self.num_allocations += 1
        if self.num_rounds >= self.options.max_rounds:
            raise ProblemError(f"not done after {self.options.max_rounds} rounds; check the load")
        self.num_rounds += 1
        self.run_round()
        return True

    def settle(self) -> None:
        """Complete all records, where a kind of rounds postpones that."""

    def run_round(self) -> None:
        """Choose the jobs that run, and let them work for a round."""
        chosen = choose_alone(self.state, self.allocator, self.options)
        active = self.active
        runs = (chosen != NOWHERE).nonzero()[0]
        kind = chosen[runs]
        rate = active.rate[kind, runs]
        moved = active.last_type[runs] != kind
        ids: list[tuple[str, ...]] = []
        if self.state.servers is not None or self.outages is not None or self.book is not None:
            ids = [(active.jobs[i].id,) for i in runs.tolist()]
        # A job that starts, or has another type than in the round before, pays a restart.
        if self.state.servers is not None:
            close, relocated = self.seat(ids, kind, active.scale[runs])
            rate, moved = rate * self.spread_rate(runs, kind, close), moved | relocated
        lost = self.lost(runs, moved)
        seconds, steps = self.work(rate, active.left[runs], lost)
        scale = active.scale[runs]
        struck = _NOBODY
        if self.outages is not None:
            usage = np.where(np.arange(len(self.state.up))[:, None] == kind, scale, 0)
            struck = self.strike(ids, usage, self.outages)
        # Struck: the round's work is lost, as it goes back to the checkpoint at its start.
        steps[struck] = 0.0
        left = active.left[runs] - steps
        done = left <= STEPS_LEFT
        active.left[runs] = left
        active.held[kind, runs] += seconds
        spent = seconds * scale
        receive(self.state, kind, runs, seconds)
        self.busy += np.bincount(kind, weights=spent, minlength=len(self.busy))
        self.note(runs, moved)
        if self.book is not None:
            self.hold(self.book, ids, kind, scale, seconds[:, None].tolist(), struck)
        chosen[runs[struck]] = NOWHERE  # it restarts
        active.last_type[:] = chosen
        start = self.now
        self.now = self.end(seconds, done)
        if done.any():
            gone = active.remove(runs[done], start + seconds[done], self.hourly)
            self.outcomes.extend(gone)
            self.num_done += len(gone)
            self.state.lost_jobs()

    def seat(
        self, ids: Sequence[tuple[str, ...]], kind: Ints, scale: Ints, apart: Sequence[bool] = ()
    ) -> tuple[Bools, Bools]:
        """Place jobs on servers; which are consolidated, and which moved."""
        assert self.state.servers is not None
        self.held_before = self.state.servers.held
        standing = None if self.outages is None else self.outages.standing
        return seat_on_servers(self.state, ids, kind, scale, standing, apart)

    def spread_rate(self, runs: Ints, kind: Ints, close: Bools) -> Floats:
        """The part of their rate that jobs keep, 1 where they are consolidated [jobs]."""
        kept = np.ones(len(runs))
        # By the rate's ratio, as what is stored is the rate of consolidated devices.
        for place in (~close).nonzero()[0].tolist():
            job, type_ = int(runs[place]), int(kind[place])
            apart = self.pool.apart_rate(self.active.jobs[job])[type_]
            kept[place] = apart / self.active.rate[type_, job]
        return kept

    def strike(self, ids: Sequence[tuple[str, ...]], usage: Ints, outages: Outages) -> Ints:
        """Let devices fail in this round; which holders they hit.

        ``usage`` [types, holders] are the devices that each holds.
        """
        seats: list[Seats] = [
            [(kind, 0, number) for kind, number in enumerate(column) if number]
            for column in usage.T.tolist()
        ]
        servers = self.state.servers
        if servers is not None:
            held = [servers.held[names[0]] for names in ids]
            seats = [[(kind, *seat) for seat in at.items()] for kind, at in held]
        return outages.failures.strike(seats, self.now, self.options.round_seconds)

    def work(self, rate: Floats, left: Floats, lost: Floats) -> tuple[Floats, Floats]:
        """Seconds each job works in a round, restart included, and the steps it makes."""
        possible = rate * (self.options.round_seconds - lost)
        if self.options.convention == "published":
            # Whole steps, and one at least, however slow.
            possible = np.maximum(np.floor(possible), 1.0)
        steps = np.minimum(possible, left)
        return steps / rate + lost, steps

    def lost(self, jobs: Ints, moved: Bools) -> Floats:
        """Seconds that jobs lose at the round's begin: those that start, move or are resized."""
        options = self.options
        lost: Floats = np.where(moved, options.restart_seconds, 0.0)
        if options.resize_seconds is not None:
            resized = moved & (self.active.last_type[jobs] != NOWHERE) & self._on_one_server(jobs)
            lost[resized] = options.resize_seconds
        return lost

    def _on_one_server(self, jobs: Ints) -> Bools:
        """Whether each job's devices, in the last round and in this one, are all of one server."""
        servers = self.state.servers
        if servers is None:
            return np.ones(len(jobs), dtype=bool)
        layout = self.options.layout or DeviceLayout.apart(servers.sizes)

        def on(held: Mapping[str, Held], name: str) -> set[int]:
            kind, places = held.get(name, (0, {}))
            return {layout.servers[kind][place] for place in places}

        names = [self.active.jobs[place].id for place in jobs.tolist()]
        used = [on(self.held_before, name) | on(servers.held, name) for name in names]
        return np.array([len(each) == 1 for each in used], dtype=bool)

    def end(self, seconds: Floats, done: Bools) -> float:
        """When the round ends: with its last job by the published convention, else in time."""
        last = self.now + float(seconds.max(initial=0.0))
        if self.options.convention == "published" and len(seconds):
            return last
        ends = self.now + self.options.round_seconds
        if not self.options.ends_early:
            return ends
        return round_end(
            ends,
            free_seconds=last if done.all() else math.inf,
            news_seconds=last if len(seconds) else self.queue.next_seconds,
        )

    def note(self, runs: Ints, moved: Bools) -> None:
        """Record starts and restarts."""
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
        """Record which job holds which devices in this round.

        ``seconds`` [placements][jobs] is how long each works; ``struck`` are places that a failure
        hits.
        """
        servers = self.state.servers
        held = (self.pool.resources[:, column] * often).T.tolist()
        placements = [
            Placement(
                names,
                tuple((kind, int(number)) for kind, number in enumerate(counts) if number),
                None if servers is None else servers.held[names[0]][1],
            )
            for names, counts in zip(ids, held, strict=True)
        ]
        ends = [[self.now + time for time in each] for each in seconds]
        standing = None if self.outages is None else self.outages.standing
        book.hold(placements, self.now, ends, standing)
        book.strike(name for place in struck.tolist() for name in ids[place])

    def result(self) -> Simulation:
        """The simulation's result; its end is that of the last job."""
        end = max((job.finish_seconds for job in self.outcomes), default=0.0)
        return Simulation(
            jobs=tuple(self.outcomes),
            num_devices=dict(self.pool.num_devices),
            # Metrics end with the last job, not with the round that it ends in.
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


# A run is given up when no job has ended for so many times what all jobs present need without
# failures, and for so many failures and repairs.
STALLED_TIMES = 100.0
STALLED_REPAIRS = 10.0
_HOUR = 3600.0


@dataclass(slots=True)
class _Work:
    """What jobs did in a round: place, column, partner (or -1), seconds, steps, share of cost."""

    job: Ints
    column: Ints
    seconds: Floats
    steps: Floats
    charged: Floats


class CombinedRounds(Rounds):
    """Rounds in which a pair of jobs may share devices, and a job may hold several types at once.

    A pair takes one worker slot (thesis 5.5): it is chosen as a whole, by its own priority, and no
    job runs twice in a round. By the ``text`` convention the partner of a job that ends goes on
    alone, at its own rate, for the rest of the round; by the ``published`` one at the pair's, and
    both count as finished when the later one does. Device-seconds that two jobs share are charged
    to each by half.
    """

    def begin(self) -> None:
        """Start with no job moved."""
        self.moved: Bools = np.zeros(0, dtype=bool)

    def run_round(self) -> None:
        """Choose combinations and let them work for a round."""
        chosen = choose_together(self.state, self.allocator, self.options)
        kind = np.full(len(self.active), NOWHERE, dtype=np.int64)
        kind[chosen.first] = chosen.placed
        paired = chosen.second >= 0
        kind[chosen.second[paired]] = chosen.placed[paired]
        work = self._work_together(chosen, kind)
        self._record(chosen, work, kind)

    def _work_together(self, chosen: Chosen, kind: Ints) -> _Work:
        active, options = self.active, self.options
        moved = active.last_type != kind
        a, c = chosen.first, chosen.placed
        two = chosen.second >= 0
        # A job alone counts as its own partner, so that all arrays have one entry a placement.
        b = np.where(two, chosen.second, a)
        slow_a = slow_b = np.ones(len(a))
        if self.state.servers is not None:
            ids = self._ids(chosen)
            close, relocated = self.seat(ids, c, active.scale[a], (chosen.column != c).tolist())
            slow_a, slow_b = self.spread_rate(a, c, close), self.spread_rate(b, c, close)
            moved[a] |= relocated
            moved[b[two]] |= relocated[two]
        self.moved = moved
        lost = self.lost(np.arange(len(active)), moved)
        alone_a, alone_b = active.rate[c, a] * slow_a, active.rate[c, b] * slow_b
        rate_a, rate_b = alone_a.copy(), np.zeros(len(a))
        rate_a[two] = self.state.pairs.rate[chosen.pair[two]] * slow_a[two]
        rate_b[two] = self.state.pairs.beside[chosen.pair[two]] * slow_b[two]
        first = _phase(active.left[a], rate_a, lost[a])
        second = np.where(two, _phase(active.left[b], rate_b, lost[b]), np.inf)
        length = np.full(len(a), options.round_seconds)
        if options.convention == "published":
            seconds_a, steps_a = self._whole_steps(rate_a, active.left[a])
            seconds_b, steps_b = self._whole_steps(rate_b, active.left[b])
            # By the published convention both end when the later one does.
            seconds_a = np.maximum(seconds_a, np.where(two, seconds_b, 0.0))
            seconds_b = seconds_a
        else:
            seconds_a, steps_a = _finish(
                active.left[a], rate_a, alone_a, lost[a], second, first, length
            )
            seconds_b, steps_b = _finish(
                active.left[b], rate_b, alone_b, lost[b], first, second, length
            )
        # What they shared is charged by half to each.
        both = np.where(two, np.minimum(seconds_a, seconds_b), 0.0)
        return _Work(
            np.concatenate((a, b[two])),
            np.concatenate((c, c[two])),
            np.concatenate((seconds_a, seconds_b[two])),
            np.concatenate((steps_a, steps_b[two])),
            np.concatenate((seconds_a - both / 2, (seconds_b - both / 2)[two])),
        )

    def _whole_steps(self, rate: Floats, left: Floats) -> tuple[Floats, Floats]:
        possible = np.maximum(np.floor(rate * self.options.round_seconds), 1.0)
        steps = np.minimum(possible, left)
        return steps / np.where(rate > 0, rate, np.inf), steps

    def _record(self, chosen: Chosen, work: _Work, kind: Ints) -> None:
        active, resources = self.active, self.pool.resources
        usage = self.pool.times(work.column, active.scale[work.job])
        hits = self._hit(chosen)
        # A pair that is struck loses the work of both.
        both = np.concatenate((chosen.first[hits], chosen.second[hits]))
        struck = np.unique(both[both >= 0])
        hit = np.isin(work.job, struck)
        work.steps[hit] = 0.0
        left = active.left[work.job] - work.steps
        done = left <= STEPS_LEFT
        active.left[work.job] = left
        active.held[work.column, work.job] += work.charged
        self.busy += resources[:, work.column] @ (work.charged * usage)
        self._receive(chosen, work)
        self.note(work.job, self.moved[work.job])
        if self.book is not None:
            number, ids = len(chosen.first), self._ids(chosen)
            seconds = [[time] for time in work.seconds[:number].tolist()]
            paired = (chosen.second >= 0).nonzero()[0].tolist()
            for place, time in zip(paired, work.seconds[number:].tolist(), strict=True):
                seconds[place].append(time)
            self.hold(self.book, ids, chosen.placed, usage[:number], seconds, hits)
        kind[struck] = NOWHERE  # it restarts
        active.last_type[:] = kind
        start, number = self.now, len(active)
        self.now = self.end(work.seconds, done)
        if done.any():
            gone = work.job[done]
            self.outcomes.extend(active.remove(gone, start + work.seconds[done], self.hourly))
            self.state.pairs.drop(gone, number)
            self.num_done += len(gone)
            self.state.changed = True

    def _ids(self, chosen: Chosen) -> list[tuple[str, ...]]:
        jobs = self.active.jobs
        return [
            (jobs[a].id,) if b < 0 else (jobs[a].id, jobs[b].id)
            for a, b in zip(chosen.first.tolist(), chosen.second.tolist(), strict=True)
        ]

    def _receive(self, chosen: Chosen, work: _Work) -> None:
        """Count the seconds of combinations, each once."""
        number = len(chosen.first)
        # A pair counts as long as the longer of both worked.
        seconds = work.seconds[:number].copy()
        two = chosen.second >= 0
        seconds[two] = np.maximum(seconds[two], work.seconds[number:])
        receive_together(self.state, chosen, seconds)

    def _hit(self, chosen: Chosen) -> Ints:
        """Which placements a failure hits."""
        if self.outages is None:
            return _NOBODY
        often = self.pool.times(chosen.placed, self.active.scale[chosen.first])
        usage = self.pool.resources[:, chosen.placed] * often
        return self.strike(self._ids(chosen), usage, self.outages)


def _phase(left: Floats, rate: Floats, lost: Floats) -> Floats:
    """Seconds until a job ends at this rate; infinite where it stands still."""
    return np.where(rate > 0, lost + left / np.where(rate > 0, rate, 1.0), np.inf)


def _finish(
    left: Floats, rate: Floats, alone: Floats, lost: Floats, partner: Floats, own: Floats,
    length: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Seconds and steps of a job whose partner leaves after ``partner`` seconds."""
    # Until the first of: the partner's end, its own, the round's.
    together = np.minimum(np.minimum(partner, own), length)
    shared = np.minimum(rate * np.maximum(together - lost, 0.0), left)
    ends = own <= np.minimum(partner, length)
    # What is left of the round after that, and after its restart.
    after = np.maximum(length - np.maximum(together, lost), 0.0)
    later = np.where(ends, 0.0, np.minimum(alone * after, left - shared))
    steps = np.where(ends, left, shared + later)
    over = np.where(alone > 0, later / np.where(alone > 0, alone, 1.0), 0.0)
    seconds = np.where(ends, own, np.maximum(together, lost) + over)
    # A job that is not done holds its devices to the end of the round.
    done = steps >= left
    return np.where(done, seconds, length), steps
