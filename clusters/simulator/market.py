"""Many jobs on a market: prices change, spot machines are taken away, jobs move with checkpoints.

The model is that of ``solvers.market.offers`` for each job. It holds devices of one offer at a time
and pays their share of the machines. A launch takes ``restart_seconds`` that are paid, a move
between clouds costs ``cloud_move_dollars``. Jobs share quotas: so many devices of each type.

A spot machine is gone where its price or the machine cannot be had, and after a random time where
a mean one is given. A job then goes back to its last checkpoint. Without ``checkpoint_seconds`` it
writes one when the machine is announced to go, and loses nothing.

Whenever something changes, each job takes what ends it by its deadline for the fewest dollars at
today's prices, the move included: one offer to the end, or a slower one now and the fastest that
stays later, just in time (thesis 6.3.1). Where nothing does, it takes the fastest, and of those as
fast the cheapest. A job with a deadline waits while all that it could launch costs more than a spot
machine that is away now. Such a machine counts by its last posted price. The job goes on demand,
for good, when the time left is only just enough for that. Who has least time to spare chooses
first, then who came first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite
from typing import Any

import numpy as np

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.jobs import Job
from ...schema.market import utc_text
from ...schema.options import option
from ...schema.simulation import JobOutcome
from ...solvers.market.job import Held, Moment, RentJob
from ...solvers.market.offers import Prices
from ...solvers.market.policies import PLAIN
from ..mechanisms.pool import Bools, ClusterPool, Floats, Ints, outcome_of
from .arrivals import Queue
from .metrics import Simulation

_WHOLE = ("held", "is_late", "launches", "preemptions")  # columns of whole numbers
_DONE = 1e-9  # of a job's steps
_NOTHING = -1
_JUST = 1e-6  # seconds
_SPARE = 1.0  # seconds before a deadline at which a job aims, so that rounding makes none late
_TICK_SECONDS = 600.0  # how often a policy of ``hetflow rent`` is asked, beside at each change
_FREE, _SPOT, _ON_DEMAND, _IDLE = range(4)
"""What a policy lets a job hold: anything (none says), one of a kind, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketOptions:
    """What moving costs, and how machines go.

    Attributes:
        restart_seconds: From a launch until work goes on.
        cloud_move_dollars: Of a move from one cloud to another.
        preemption_seconds: Mean time until a spot machine is taken away, at random (exponential);
            None: only where the market says so.
        checkpoint_seconds: Between checkpoints; 0: one is written when a machine is about to go.
        seed: Of the random times.
        is_told: Whether the market says when machines can be had.
        policy: The policy of ``hetflow rent`` that decides for jobs with a deadline; None: the
            cheapest way at today's prices.
    """

    restart_seconds: float = 0.0
    cloud_move_dollars: float = 0.0
    preemption_seconds: float | None = None
    checkpoint_seconds: float = 0.0
    seed: int = 0
    is_told: bool = False
    policy: str | None = None

    def __post_init__(self) -> None:
        if self.policy is not None and self.policy not in PLAIN:
            raise ProblemError(
                f"{option('rent_policy', repr(self.policy))}: known are {', '.join(PLAIN)}",
                hint="give one of them",
            )
        for name in ("restart_seconds", "cloud_move_dollars", "checkpoint_seconds"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ProblemError(f"{name} must be finite and >= 0, got {value:g}")
        mean = self.preemption_seconds
        if mean is not None and not (isfinite(mean) and mean > 0):
            raise ProblemError(f"preemption_seconds must be finite and > 0, got {mean:g}")


def simulate_market(
    jobs: Iterable[Job],
    pool: ClusterPool,
    prices: Prices,
    options: MarketOptions,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run jobs to their end.

    Args:
        jobs: In order of arrival, in seconds after the prices begin.
        pool: Quotas and throughputs.
        prices: Offers, from the run's start on.
        options: What moving costs, and how machines go.
        on_progress: Called now and then with jobs done and the time in seconds.

    Raises:
        ProblemError: The trace makes no sense, or jobs wait for machines that never come.
        InfeasibleError: No job fits the quotas.
    """
    run = _Run(Queue(jobs, pool), pool, prices, options)
    while run.step():
        if on_progress is not None:
            on_progress(len(run.outcomes), run.now)
    return run.result()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A job as a policy sees it: on one machine, as fast as the fastest that stays (``rate``)."""

    policy: str
    job: RentJob
    rate: float

    @classmethod
    def of(cls, policy: str, job: Job, rate: float, restart_seconds: float) -> "_Asked | None":
        """None where a policy has nothing to say: the job cannot end in time in whole ticks."""
        try:
            rented = RentJob(
                work_seconds=job.steps / rate,
                deadline_seconds=job.slo_seconds or inf,
                restart_seconds=restart_seconds,
                tick_seconds=_TICK_SECONDS,
                on_demand_dollars_per_hour=1.0,  # these rules look at no price
                spot_dollars_per_hour=(0.0,),
            )
        except (InfeasibleError, ProblemError):
            return None
        return cls(policy, rented, rate)

    def kind(
        self, seconds: float, left: float, pending: float, *, held: int, has_spot: bool
    ) -> int:
        """What to hold so long after the job's arrival, with so many steps left."""
        # Policies know whole ticks from the job's arrival on.
        tick = floor(seconds / _TICK_SECONDS + 1e-9)
        if tick >= self.job.num_ticks:
            return _FREE
        now = Moment(
            tick=tick,
            work_left_seconds=left / self.rate,
            held=Held(int(held == _SPOT), int(held == _ON_DEMAND)),
            # The job's only zone has a machine or none: prices are chosen later, by offer.
            zone=0,
            pending_seconds=pending,
            available=(int(has_spot),),
            run_lengths=(1,),
            spot_dollars_per_hour=(0.0,),
        )
        wanted = PLAIN[self.policy](self.job, now)
        return _SPOT if wanted.num_spot else _ON_DEMAND if wanted.num_on_demand else _IDLE


@dataclass(slots=True, kw_only=True)
class _Jobs:
    """The jobs present, in order of arrival [jobs]; ``rate`` [jobs, offers]."""

    jobs: list[Job]
    rate: Floats
    left: Floats
    scale: Floats
    deadline: Floats
    isolated: Floats
    held: Ints
    pending: Floats  # seconds of the restart still to come
    fresh: Floats  # seconds of work since the last checkpoint
    gone_at: Floats  # when the machine is taken away at random
    is_late: Ints  # 1: on demand for good
    dollars: Floats
    device_seconds: Floats
    started: Floats
    launches: Ints
    preemptions: Ints

    @classmethod
    def empty(cls, offers: int) -> "_Jobs":
        columns: dict[str, Any] = {
            name: np.zeros(0, np.int64 if name in _WHOLE else np.float64)
            for name in cls.__slots__
            if name not in ("jobs", "rate")
        }
        return cls(jobs=[], rate=np.zeros((0, offers)), **columns)

    def add(self, job: Job, rate: Floats, deadline: float, isolated: float) -> None:
        new: dict[str, float] = {
            "left": job.steps, "scale": job.scale_factor, "deadline": deadline,
            "isolated": isolated, "held": _NOTHING, "pending": 0.0, "fresh": 0.0, "gone_at": inf,
            "is_late": 0, "dollars": 0.0, "device_seconds": 0.0, "started": -1.0, "launches": 0,
            "preemptions": 0,
        }  # fmt: skip
        self.jobs.append(job)
        self.rate = np.vstack((self.rate, rate))
        # Columns keep their types: a count must not become a float.
        for name, value in new.items():
            known = getattr(self, name)
            setattr(self, name, np.append(known, value).astype(known.dtype))

    def keep(self, kept: Sequence[int]) -> None:
        self.jobs = [self.jobs[place] for place in kept]
        for name in self.__slots__:
            if name != "jobs":
                setattr(self, name, getattr(self, name)[list(kept)])


class _Run:
    """The state between two events."""

    def __init__(
        self, queue: Queue, pool: ClusterPool, prices: Prices, options: MarketOptions
    ) -> None:
        self.queue, self.pool, self.prices, self.options = queue, pool, prices, options
        self.begin = float(prices.edges[0])
        self.edges = prices.edges[1:] - self.begin
        # Seconds of the run at which each stretch of prices ends.
        self.stretch, self.now = 0, 0.0
        types = {name: place for place, name in enumerate(pool.types)}
        self.type_of = np.array([types[offer.device_type] for offer in prices.offers])
        clouds = [offer.cloud for offer in prices.offers]
        # [offers, offers] dollars from one to another: nothing within a cloud.
        self.away = np.array([[a != b for b in clouds] for a in clouds]) * (
            options.cloud_move_dollars
        )
        self.spot = spot = np.array([offer.is_spot for offer in prices.offers])
        may_go = options.is_told or options.preemption_seconds is not None
        # What may be taken away at all is not safe; without such a market every offer is.
        self.safe = ~spot if may_go else np.ones(len(spot), dtype=bool)
        self.random = np.random.default_rng(options.seed)
        self.active = _Jobs.empty(len(prices.offers))
        self.busy = np.zeros(len(pool.types))
        self.outcomes: list[JobOutcome] = []
        self.num_decisions = 0
        self.waits_until = inf  # when the first of the jobs that wait has to launch
        self.asked: dict[str, _Asked | None] = {}  # by job
        self.kinds = np.zeros(0, dtype=np.int64)  # what a policy lets each job hold [jobs]

    def step(self) -> bool:
        """Everything at one moment, and then time until the next; False when all is done."""
        # Nobody is there: time goes on to the next arrival.
        self._admit()
        if not self.active.jobs:
            if self.queue.next is None:
                return False
            self._go_to(self.queue.next_seconds)
            return True
        # In this order: what is gone frees quota, and decisions see what is free.
        self._take_away()
        self._decide()
        self._work_until(self._next_seconds())
        self._end()
        return True

    def _admit(self) -> None:
        for job in self.queue.until(self.now):
            by_type = self.pool.rate(job)[: len(self.pool.types)]
            deadline = inf if job.slo_seconds is None else job.arrival_seconds + job.slo_seconds
            # As the cluster shared by all that are present would give it.
            isolated = float(by_type @ self.pool.capacity) / (
                (len(self.active.jobs) + 1) * job.scale_factor
            )
            alone = job.steps / min(isolated, float(by_type.max()))
            # As fast as the fastest offer that stays: on it the policy counts.
            rate = float(np.where(self.spot, 0.0, by_type[self.type_of]).max())
            if self.options.policy is not None and job.slo_seconds is not None and rate > 0:
                restart = self.options.restart_seconds
                self.asked[job.id] = _Asked.of(self.options.policy, job, rate, restart)
            self.active.add(job, by_type[self.type_of], deadline, alone)

    @property
    def _price(self) -> Floats:
        row: Floats = self.prices.dollars_per_second[self.stretch]
        return row

    @property
    def _last_price(self) -> Floats:
        """Of each spot offer, the price that was last posted for it; infinite of others."""
        # Nobody waits for what had no price so far.
        prices = self.prices
        table = prices.dollars_per_second if prices.posted is None else prices.posted
        before = np.isfinite(table[: self.stretch + 1])
        # The last row at or before now in which each offer had a price.
        last = self.stretch - np.argmax(before[::-1], axis=0)
        found = table[last, np.arange(table.shape[1])]
        return np.where(self.spot & np.isfinite(found), found, inf)

    def _take_away(self) -> None:
        """Spot machines that are no more, or whose time has come."""
        active = self.active
        holds = active.held >= 0
        # NaN: nobody can have it now.
        lost = holds & np.isnan(self._price[active.held])
        lost |= holds & (active.gone_at <= self.now + _JUST)
        for place in np.flatnonzero(lost).tolist():
            # What was done since the last checkpoint is done again.
            if self.options.checkpoint_seconds:
                again = active.fresh[place] * active.rate[place, active.held[place]]
                active.left[place] = min(active.left[place] + again, active.jobs[place].steps)
            active.preemptions[place] += 1
            self._let_go(place)

    def _let_go(self, place: int) -> None:
        active = self.active
        active.held[place], active.pending[place] = _NOTHING, 0.0
        active.fresh[place], active.gone_at[place] = 0.0, inf

    def _free(self) -> Floats:
        """Devices of each type within the quota that nobody holds [types]."""
        active = self.active
        holds = active.held >= 0
        used = np.bincount(
            self.type_of[active.held[holds]], active.scale[holds], len(self.pool.types)
        )
        return np.asarray(self.pool.capacity - used, dtype=np.float64)

    def _decide(self) -> None:
        """Let jobs move, those with least time to spare first, then in order of arrival."""
        active = self.active
        self.num_decisions += 1
        self.waits_until = inf
        everyone = np.arange(len(active.jobs))
        slack = self._slack(everyone)
        # Late once is late for good: going back to spot would only lose a restart.
        active.is_late |= slack <= _JUST
        free = self._free()
        self._ask(free)
        # All wishes at once tell who may move; each is asked again when its turn comes, as others
        # took devices before.
        wish = self._wishes(everyone, free)
        movers = np.flatnonzero((wish != active.held) & (wish >= 0))
        # Least time to spare first; the stable sort leaves equal ones in order of arrival.
        for place in movers[np.argsort(slack[movers], kind="stable")].tolist():
            (chosen,) = self._wishes(np.array([place]), free).tolist()
            before = int(active.held[place])
            if chosen in (before, _NOTHING):
                continue
            # Its own devices are free for others now.
            if before >= 0:
                free[self.type_of[before]] += active.scale[place]
                active.dollars[place] += self.away[before, chosen]
            free[self.type_of[chosen]] -= active.scale[place]
            self._launch(place, chosen)

    def _ask(self, free: Floats) -> None:
        """Ask the policy for each job with a deadline, and again at its next tick."""
        active = self.active
        self.kinds = np.zeros(len(active.jobs), dtype=np.int64)
        known = np.isfinite(self._price) & self.spot
        for place, job in enumerate(active.jobs):
            asked = self.asked.get(job.id)
            if asked is None or active.is_late[place]:
                continue
            held, since = int(active.held[place]), self.now - job.arrival_seconds
            holds_spot = held >= 0 and bool(self.spot[held])
            # What it holds is room for itself.
            own = (self.type_of == self.type_of[held]) * (held >= 0) * active.scale[place]
            room = free[self.type_of] + own >= active.scale[place]
            self.kinds[place] = asked.kind(
                since,
                float(active.left[place]),
                float(active.pending[place]),
                held=_SPOT if holds_spot else _ON_DEMAND if held >= 0 else _IDLE,
                has_spot=holds_spot or bool((known & room & (active.rate[place] > 0)).any()),
            )
            # It is asked again at its next tick, if nothing happens before.
            again = (floor(since / _TICK_SECONDS + 1e-9) + 1) * _TICK_SECONDS
            self.waits_until = min(self.waits_until, job.arrival_seconds + again)
            if self.kinds[place] == _IDLE and held >= 0:
                free[self.type_of[held]] += active.scale[place]
                self._let_go(place)

    def _launch(self, place: int, offer: int) -> None:
        active, mean = self.active, self.options.preemption_seconds
        active.held[place], active.pending[place] = offer, self.options.restart_seconds
        active.fresh[place], active.gone_at[place] = 0.0, inf
        if mean is not None and self.prices.offers[offer].is_spot:
            active.gone_at[place] = self.now + self.random.exponential(mean)
        if active.started[place] < 0:
            active.started[place] = self.now
        active.launches[place] += 1

    def _wishes(self, places: Ints, free: Floats) -> Ints:
        """What each of some jobs would best hold; what it holds where nothing is better [jobs]."""
        active, number = self.active, np.arange(len(places))
        rate, held, scale = active.rate[places], active.held[places], active.scale[places]
        holds = held >= 0
        # What is held goes on with what is left of its restart; anything else begins with a whole
        # one.
        launch = np.full(rate.shape, self.options.restart_seconds)
        launch[number[holds], held[holds]] = active.pending[places][holds]
        with np.errstate(divide="ignore"):
            seconds = launch + active.left[places][:, None] / rate
        own = np.zeros((len(places), len(free)))
        own[number[holds], self.type_of[held[holds]]] = scale[holds]
        room = (free + own)[:, self.type_of] >= scale[:, None]
        ok = room & (rate > 0) & np.isfinite(self._price)
        late: Bools = np.asarray(active.is_late[places] > 0)
        secured: Bools = np.asarray(ok & self.safe)
        # A late job takes what stays, where there is any; else whatever there is.
        must: Bools = np.asarray(late & secured.any(axis=1))
        ok = np.where(must[:, None], secured, ok)
        kinds = self.kinds[places]
        # What the policy allows: spot, on demand, nothing, or (free) anything.
        ok &= ~np.isin(kinds, (_SPOT, _IDLE))[:, None] | (self.spot & (kinds == _SPOT)[:, None])
        ok &= (kinds != _ON_DEMAND)[:, None] | ~self.spot
        with np.errstate(invalid="ignore"):
            dollars = self._price * scale[:, None] * seconds
        dollars[holds] += self.away[held[holds]]
        # On this offer alone to the end.
        in_time: Bools = ok & (self.now + seconds <= active.deadline[places][:, None] + _JUST)
        # Or on it first, and just in time on the fastest that stays.
        mixed = np.where(ok & ~in_time & ~late[:, None], self._mixed_dollars(places, launch), inf)
        dollars = np.where(np.isfinite(mixed), mixed, dollars)
        in_time |= np.isfinite(mixed)
        # Too late whatever it takes: the fastest, and of those as fast the cheapest.
        soonest = np.where(ok, seconds, inf)
        is_fastest = ok & (soonest <= soonest.min(axis=1, keepdims=True) * (1 + 1e-9))
        # In time for the fewest dollars; where nothing is in time, among the fastest.
        score = np.where(
            in_time.any(axis=1, keepdims=True),
            np.where(in_time, dollars, inf),
            np.where(is_fastest, dollars, inf),
        )
        best = np.argmin(score, axis=1)
        # Seconds for which the job may wait without a machine and still end in time on its choice.
        spare = active.deadline[places] - self.now - _SPARE - seconds[number, best]
        may_wait = (
            (kinds == _FREE)
            & ~holds
            & ~late
            & in_time[number, best]
            & np.isfinite(spare)
            & (spare > _JUST)
        )
        # What it would pay if the last known price came back.
        away = np.where(np.isfinite(self._price), inf, self._last_price) * scale[:, None] * seconds
        waits = may_wait & (np.where(rate > 0, away, inf).min(axis=1) < score[number, best])
        if waits.any():
            self.waits_until = min(self.waits_until, self.now + float(spare[waits].min()))
            # A job that waits now decides again when its time to spare is over.
            score[waits] = inf
        # A tie is no reason to move.
        kept = holds & (score[number, np.maximum(held, 0)] <= score[number, best])
        chosen: Ints = np.where(kept, held, best)
        return np.where(np.isfinite(score[number, chosen]), chosen, held)

    def _mixed_dollars(self, places: Ints, launch: Floats) -> Floats:
        """Dollars of each offer now and, just in time, of the fastest that stays [jobs, offers]."""
        # Infinite where that does not go, or there is no deadline.
        active, restart = self.active, self.options.restart_seconds
        rate, left = active.rate[places], active.left[places][:, None]
        safe = np.where(self.safe & np.isfinite(self._price), rate, 0.0)
        fastest = safe.max(axis=1)[:, None]
        price = np.where(safe >= fastest, self._price, inf).min(axis=1)[:, None]
        # A little time is kept aside, so that rounding makes nobody late.
        time = active.deadline[places][:, None] - self.now - _SPARE
        with np.errstate(divide="ignore", invalid="ignore"):
            # Seconds on the safe offer so that both together do the work by the deadline, its
            # restart included.
            later = (left - rate * (time - launch) + restart * fastest) / (fastest - rate)
            dollars = self._price * (time - later) + price * later
            dollars *= active.scale[places][:, None]
        goes = (fastest > rate) & (rate > 0) & (later >= 0) & (later + launch <= time)
        return np.where(goes & np.isfinite(dollars), dollars, inf)

    def _slack(self, places: Ints) -> Floats:
        """Seconds until only machines that stay would still end a job in time [jobs]."""
        # Infinite without a deadline, of a job that ends in time on such a machine that it holds,
        # and where there is none.
        active = self.active
        safe = self.safe & np.isfinite(self._price)
        rate = np.where(safe, active.rate[places], 0.0).max(axis=1)
        held = active.held[places]
        own = np.where(held >= 0, active.rate[places, held], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = _SPARE + self.options.restart_seconds + active.left[places] / rate
            # Work since the last checkpoint may be lost with the machine, and has to be done
            # again.
            at_risk = self.options.checkpoint_seconds * np.maximum(own / rate, 1.0)
            slack = active.deadline[places] - self.now - needed - at_risk
            ends = self.now + active.pending[places] + active.left[places] / own
        # It holds a machine that stays and ends in time on it: nothing is to be feared.
        secured = (held >= 0) & self.safe[held] & (ends <= active.deadline[places] + _JUST)
        secured |= slack < -(_SPARE + at_risk + _JUST)  # there is no time left to secure
        return np.where((rate > 0) & ~secured & np.isfinite(active.deadline[places]), slack, inf)

    def _next_seconds(self) -> float:
        """The next moment at which something changes."""
        active = self.active
        # The next change of prices, arrival or end of a wait; then what running jobs bring.
        times = [float(self.edges[self.stretch]), self.queue.next_seconds, self.waits_until]
        holds = np.flatnonzero(active.held >= 0)
        if not len(holds) and not isfinite(min(times)):
            when = utc_text(self.begin + self.now)
            raise ProblemError(
                f"after {when} no machine can be had for job {active.jobs[0].id!r}",
                hint="give on-demand prices, larger quotas, or histories that go on for longer",
            )
        rate = active.rate[holds, active.held[holds]]
        # When each would end, if nothing happens before.
        times += (self.now + active.pending[holds] + active.left[holds] / rate).tolist()
        times += active.gone_at[holds].tolist()
        times += (self.now + self._seconds_to_turn()).tolist()
        return max(min(times), self.now)

    def _seconds_to_turn(self) -> Floats:
        """Until a job has to go on demand, if it goes on as it does [jobs that have not yet]."""
        active = self.active
        places = np.flatnonzero(active.is_late == 0)
        slack = np.maximum(self._slack(places), 0.0)
        safe = np.where(self.safe & np.isfinite(self._price), active.rate[places], 0.0).max(axis=1)
        held = active.held[places]
        own = np.where(held >= 0, active.rate[places, held], 0.0)
        pending = active.pending[places]
        with np.errstate(divide="ignore", invalid="ignore"):
            # While it works, the time to spare falls by what the safe offer would do faster.
            part = np.where(safe > 0, own / safe, 1.0)
            later = np.where(part < 1, (slack - part * pending) / (1 - part), inf)
        turn: Floats = np.where(slack <= pending, slack, later)
        return turn

    def _work_until(self, then: float) -> None:
        active = self.active
        length = then - self.now
        holds = np.flatnonzero(active.held >= 0)
        held = active.held[holds]
        # Nothing is done while a restart lasts, but all of it is paid.
        useful = np.maximum(length - active.pending[holds], 0.0)
        active.pending[holds] = np.maximum(active.pending[holds] - length, 0.0)
        active.left[holds] -= active.rate[holds, held] * useful
        every = self.options.checkpoint_seconds
        if every:
            # Checkpoints come at whole intervals of work.
            active.fresh[holds] = (active.fresh[holds] + useful) % every
        paid = active.scale[holds] * length
        active.dollars[holds] += self._price[held] * paid
        active.device_seconds[holds] += paid
        self.busy += np.bincount(self.type_of[held], paid, len(self.busy))
        self._go_to(then)

    def _go_to(self, then: float) -> None:
        self.now = then
        # A moment at an edge belongs to the stretch behind it.
        while self.edges[self.stretch] <= then:
            self.stretch += 1

    def _end(self) -> None:
        active = self.active
        steps = np.array([job.steps for job in active.jobs])
        # A last part of a step is rounding of the steps before it.
        done = active.left <= _DONE * steps
        if not done.any():
            return
        for place in np.flatnonzero(done).tolist():
            self.outcomes.append(self._outcome(place))
        active.keep(np.flatnonzero(~done).tolist())

    def _outcome(self, place: int) -> JobOutcome:
        active, job = self.active, self.active.jobs[place]
        launches, taken = int(active.launches[place]), int(active.preemptions[place])
        return outcome_of(
            job,
            start_seconds=float(active.started[place]),
            finish_seconds=self.now,
            device_seconds=float(active.device_seconds[place]),
            isolated_seconds=float(active.isolated[place]),
            dollars=float(active.dollars[place]),
            num_restarts=launches - 1,
            num_moves=launches - 1 - taken,
            num_preemptions=taken,
        )

    def result(self) -> Simulation:
        """What the run leaves behind."""
        return Simulation(
            jobs=tuple(self.outcomes),
            num_devices=dict(self.pool.num_devices),
            busy_seconds=dict(zip(self.pool.types, self.busy.tolist(), strict=True)),
            end_seconds=max((job.finish_seconds for job in self.outcomes), default=0.0),
            num_allocations=self.num_decisions,
            left_out=dict(self.queue.left_out),
        )
