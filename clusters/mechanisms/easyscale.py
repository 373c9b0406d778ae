"""EasyScale's schedulers: jobs propose devices, the cluster accepts greedily (EasyScale 3.4).

Each job proposes increments of devices of one type. The cluster accepts the one with the highest
speed-up per device, of equals the one with more devices, then that of the earlier job, until none
is left. Only a job's best proposal can be the next that is accepted, so how many each submits (the
paper's K) changes nothing.

Where the text is silent. Speed-up is the gain over a job's full rate, so that it is finite for a
job that holds nothing. Where devices are lacking (they failed, or serving or fixed jobs need them),
the job gives one back that loses least by it; one that cannot run on what is left gives all back,
and waits. A job of several devices at least that fits on no type alone begins on several types.

``decide`` counts devices; ``next_devices`` tells the jobs of a live cluster which. There elastic
jobs use what the others leave over. Fixed jobs are guaranteed: those that wait are let in by
weight, then arrival, and elastic jobs give back what these need. Who is let in keeps its devices
until it ends.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from ...schema.jobs import Job
from ...schema.plugins import Registry
from .round_state import RoundState
from .seats import Device, DeviceLayout, Placement, Seat, seat

Counts = tuple[int, ...]
"""Devices in each stock."""
_GAIN = 1e-12  # a speed-up that is not rounding


@dataclass(frozen=True, slots=True)
class Stock:
    """The devices of one type on one server, both by number. A job's are on one server."""

    kind: int
    server: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bidder:
    """A job that proposes: an intra-job scheduler.

    Attributes:
        id: The job.
        arrival_seconds: When it came.
        held: Its devices.
        most: Devices that it can use (maxP).
        rate: Estimated steps per second on devices; 0 where it has no plan that uses just these.
            It depends on their types alone.
        full_rate: What its speed-ups are relative to, in steps per second.
        least: Devices without which it waits.
        mixes: Whether it may hold several types at once. If not it keeps to one while it runs.
        actual: The steps per second that it really reaches; None: those estimated.
        refused: Devices that turned out slower than fewer of them.
    """

    id: str
    arrival_seconds: float
    held: Counts
    most: int
    rate: Callable[[Counts], float]
    full_rate: float
    least: int = 1
    mixes: bool = True
    actual: Callable[[Counts], float] | None = None
    refused: frozenset[Counts] = frozenset()

    def can_run(self, counts: Counts) -> bool:
        """Whether it runs on just these devices."""
        return sum(counts) >= self.least and self.rate(counts) > 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The inter-job scheduler's answer.

    ``held`` are the devices of each job that runs, in the order in which they began; ``refused``
    the accepted proposals (job, its devices with them) that turned out slower, and were undone.
    """

    held: dict[str, Counts]
    refused: tuple[tuple[str, Counts], ...]


def decide(
    stocks: Sequence[Stock],
    room: Sequence[int],
    running: Sequence[Bidder],
    waiting: Sequence[Bidder],
    *,
    trade: "Callable[[TentativeHoldings], None] | None" = None,
) -> Decision:
    """Which devices each job has from now on.

    Args:
        stocks: Devices by type and server.
        room: Devices of each stock that these jobs may hold together.
        running: Jobs that hold devices, in the order in which they began.
        waiting: Jobs that hold none, in order of arrival.
        trade: What jobs do with devices of others, once the free ones are given.
    """
    exchange = TentativeHoldings(stocks, room, running, waiting)
    exchange.give_back()
    exchange.accept()
    if trade is not None:
        trade(exchange)
    return Decision(
        {one.id: exchange.held[one.id] for one in exchange.running}, tuple(exchange.refusals)
    )


def admit_gangs(free: Sequence[int], gangs: Iterable[Sequence[Counts]]) -> list[Counts]:
    """YARN's capacity scheduler: first in, first out, all devices of a job at once.

    Args:
        free: Devices of each stock that may be given.
        gangs: The queue: for each job the devices that it can run on, what it prefers first.

    Returns:
        The devices of the first jobs of the queue; the next one waits, and all others behind it.
    """
    # First in, first out: a job that does not fit holds up all behind it.
    left, found = list(free), list[Counts]()
    for options in gangs:
        fitting = (one for one in options if all(n <= m for n, m in zip(one, left, strict=True)))
        chosen = next(fitting, None)
        if chosen is None:
            break
        left = [m - n for n, m in zip(chosen, left, strict=True)]
        found.append(chosen)
    return found


@dataclass(frozen=True, slots=True, order=True)
class _Proposal:
    """All devices of a job with an increment; the best sorts first."""

    loss: float  # minus the speed-up per device
    fewer: int  # minus the number of devices
    arrival_seconds: float
    place: int
    stock: int
    counts: Counts


class TentativeHoldings:
    """Who holds what while a decision is made."""

    def __init__(
        self,
        stocks: Sequence[Stock],
        room: Sequence[int],
        running: Sequence[Bidder],
        waiting: Sequence[Bidder],
    ) -> None:
        """Start with what jobs hold; see ``decide``."""
        self.stocks = stocks
        self.none: Counts = (0,) * len(stocks)
        self.held = {one.id: one.held for one in (*running, *waiting)}
        self.free = list(room)
        for one in running:
            # Negative where devices were lost: ``give_back`` takes them from somebody.
            self.free = [left - n for left, n in zip(self.free, one.held, strict=True)]
        self.running, self.waiting = list(running), list(waiting)
        self.refusals: list[tuple[str, Counts]] = []
        self.refused = {(one.id, n) for one in (*running, *waiting) for n in one.refused}
        # Devices may be gone under a job; what is left may not suffice for it.
        for one in running:
            if not one.can_run(one.held):
                self.move(one, self._largest_part(one))
        self._rest_idle()

    def give_back(self) -> None:
        """Let jobs yield what is lacking, each time the one that loses least."""
        for stock in range(len(self.free)):
            # Each time the loss is counted anew, as a job that gave one back loses more by the
            # next.
            while self.free[stock] < 0:
                holders = [one for one in self.running if self.held[one.id][stock]]
                losses = [self._loss(one, stock) for one in holders]
                victim = holders[losses.index(min(losses))]
                self.move(victim, self.fewer(victim, stock))
        self._rest_idle()

    def _rest_idle(self) -> None:
        idle = [one for one in self.running if not any(self.held[one.id])]
        if idle:
            self.running = [one for one in self.running if any(self.held[one.id])]
            self.waiting = sorted([*idle, *self.waiting], key=lambda one: one.arrival_seconds)

    def move(self, one: Bidder, counts: Counts) -> None:
        """Let a job hold other devices."""
        before = self.held[one.id]
        self.free = [f + b - a for f, b, a in zip(self.free, before, counts, strict=True)]
        self.held[one.id] = counts

    def begin(self, one: Bidder) -> None:
        """Count a waiting job among those that run."""
        self.waiting.remove(one)
        self.running.append(one)

    def fewer(self, one: Bidder, stock: int) -> Counts:
        """The most that a job can keep with fewer devices of a stock; nothing if it cannot run."""
        held = self.held[one.id]
        # One device less may be no plan of the job's, so it may have to give more.
        for number in range(1, held[stock] + 1):
            counts = plus(held, stock, -number)
            if one.can_run(counts):
                return counts
        return self.none

    def _largest_part(self, one: Bidder) -> Counts:
        parts = [self.fewer(one, stock) for stock, n in enumerate(self.held[one.id]) if n]
        return max(parts, key=one.rate, default=self.none)

    def _loss(self, one: Bidder, stock: int) -> float:
        after = one.rate(self.fewer(one, stock))
        return (one.rate(self.held[one.id]) - after) / one.full_rate

    def accept(self) -> None:
        """Accept proposals, the best first, until there is none."""
        # Nothing is free: no proposal can be accepted.
        if not any(left > 0 for left in self.free):
            return
        total = len(self.running) + len(self.waiting)
        # Jobs that wait have numbers behind those that run; who begins gets a new one.
        jobs = dict(enumerate(self.running)) | dict(enumerate(self.waiting, start=total))
        heap = [offer for place, one in jobs.items() if (offer := self._best(one, place))]
        # A job's best proposal gets no better while others are accepted. So it is looked for again
        # only when it is the best of all and does not fit any more.
        heapify(heap)
        while heap:
            offer = heappop(heap)
            place, one = offer.place, jobs[offer.place]
            if not self._fits(one, offer.counts):
                pass  # somebody else has these devices now: the job looks for its next best
            elif self._is_slower(one, offer.counts):
                self.refusals.append((one.id, offer.counts))
                self.refused.add((one.id, offer.counts))
            else:
                self.move(one, offer.counts)
                if place >= total:
                    self.begin(one)
                    place = len(self.running) - 1
                    jobs[place] = one
            following = self._best(one, place)
            if following is not None:
                heappush(heap, following)

    def _fits(self, one: Bidder, counts: Counts) -> bool:
        held = self.held[one.id]
        return all(n - h <= left for n, h, left in zip(counts, held, self.free, strict=True))

    def _is_slower(self, one: Bidder, counts: Counts) -> bool:
        held = self.held[one.id]
        # Without devices there is nothing to be slower than.
        if one.actual is None or not any(held):
            return False
        return one.actual(counts) < one.actual(held)

    def _best(self, one: Bidder, place: int) -> _Proposal | None:
        """The job's increment of free devices with the highest speed-up per device."""
        held = self.held[one.id]
        total = sum(held)
        if total >= one.most:
            return None
        now = one.rate(held)
        # Of equal speed-ups per device the one with more devices; of equals the first.
        best, found = (_GAIN, one.most), (-1, held)
        tried: dict[int, int] = {}  # the most of each type on one server so far
        for stock, left in enumerate(self.free):
            if left <= 0 or not self.may_add(one, stock):
                continue
            kind = self.stocks[stock].kind
            # Another server with as many free devices of the type adds nothing new.
            first = max(1, one.least - total, tried.get(kind, 0) + 1)
            tried[kind] = max(left, tried.get(kind, 0))
            for number in range(first, min(left, one.most - total) + 1):
                counts = plus(held, stock, number)
                gain = (one.rate(counts) - now) / one.full_rate / number
                if (gain, number) > best and (one.id, counts) not in self.refused:
                    best, found = (gain, number), (stock, counts)
        if found[0] >= 0:
            return _Proposal(-best[0], -best[1], one.arrival_seconds, place, *found)
        # No type alone has enough for it to begin.
        if not total and one.mixes and one.least > 1:
            return self._mixed_start(one, place)
        return None

    def may_add(self, one: Bidder, stock: int) -> bool:
        """Whether a job may hold devices of a stock beside those that it holds."""
        added = self.stocks[stock]
        own = [self.stocks[s] for s, number in enumerate(self.held[one.id]) if number]
        return all(
            other.server == added.server and (one.mixes or other.kind == added.kind)
            for other in own
        )  # fmt: skip

    def _mixed_start(self, one: Bidder, place: int) -> _Proposal | None:
        """A first plan on several types, the fastest first, where none has enough devices."""
        found: _Proposal | None = None
        for server in dict.fromkeys(stock.server for stock in self.stocks):
            here = [s for s, stock in enumerate(self.stocks)
                    if stock.server == server and self.free[s] > 0]  # fmt: skip
            # Its fastest types first: as few devices as can run it.
            here.sort(key=lambda s: (-self._speed(one, s), s))
            order = [s for s in here for _ in range(self.free[s])]
            parts = (Counter(order[:number]) for number in range(one.least, one.most + 1)
                     if number <= len(order))  # fmt: skip
            plans = (tuple(part[s] for s in range(len(self.stocks))) for part in parts)
            counts = next((plan for plan in plans if one.can_run(plan)), None)
            if counts is None or (one.id, counts) in self.refused:
                continue
            number = sum(counts)
            gain = one.rate(counts) / one.full_rate / number
            offer = _Proposal(-gain, -number, one.arrival_seconds, place, here[0], counts)
            found = offer if found is None else min(found, offer)
        return found

    def _speed(self, one: Bidder, stock: int) -> float:
        """A job's most steps per second and device on free devices of a stock alone."""
        numbers = range(1, min(self.free[stock], one.most) + 1)
        return max(one.rate(plus(self.none, stock, number)) / number for number in numbers)


def plus(counts: Counts, stock: int, number: int) -> Counts:
    """The devices with so many more of one stock."""
    return tuple(n + number if s == stock else n for s, n in enumerate(counts))


@dataclass(frozen=True, slots=True)
class Variant:
    """``mixes``: jobs may hold several types at once. For ``trade`` see ``decide``."""

    mixes: bool = True
    trade: Callable[[TentativeHoldings], None] | None = None


VARIANTS: Registry[Variant] = Registry(
    "policy", group="hetflow.easyscale", own=(__name__, "hetflow.papers.easyscale.taking")
)
"""What users call them, of the simulator and of a live cluster."""
VARIANTS.add("easyscale", Variant(), __name__)

ByType = tuple[int, ...]
"""Devices of each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """A job that proposes; its fields are those of ``Bidder``, and devices are by type."""

    least: int
    most: int
    rate: Callable[[ByType], float]
    full_rate: float
    mixes: bool


@dataclass(frozen=True, slots=True)
class Fixed:
    """A job that is guaranteed one of these sets of devices, what it prefers first."""

    choices: tuple[ByType, ...]


Wish = Elastic | Fixed


def alone(wish: Wish, layout: DeviceLayout, variant: Variant) -> ByType | None:
    """The devices that a job would have of an empty cluster; None where no server can hold it."""
    stocks = _Stocks(layout, ())
    if isinstance(wish, Fixed):
        admitted = admit_gangs(stocks.room, [stocks.options(wish)])
        return stocks.by_type(admitted[0]) if admitted else None
    bidder = stocks.bidder("it", 0.0, wish, stocks.none, mixes=variant.mixes)
    held = decide(stocks.stocks, stocks.room, [], [bidder]).held
    return stocks.by_type(held[bidder.id]) if held else None


def next_devices(
    state: RoundState,
    wishes: Mapping[str, Wish],
    now_seconds: float,
    *,
    variant: Variant,
    layout: DeviceLayout,
    down: Collection[Device] = (),
    held: Mapping[str, Seat] | None = None,
    kept: Mapping[str, Seat] | None = None,
) -> dict[str, Seat]:
    """The devices of each job from now on; a job that is not named waits.

    All devices of a job are on one server. Who grows keeps its devices, and who shrinks some of
    them. In the state each job's ``share`` tells what part of its scale factor it has of each type.

    Args:
        state: The jobs present.
        wishes: What each of them can run on.
        now_seconds: The time.
        variant: Which of EasyScale's schedulers.
        layout: The devices of each type on servers.
        down: Devices that do not work.
        held: The devices of jobs that run now.
        kept: Jobs that stay where they are, whatever is down there.
    """
    kept = kept or {}
    stocks = _Stocks(layout, down)
    # Running elastic jobs keep what the fixed ones leave.
    state.see(stocks.up)
    seats = {job: stocks.standing(its) for job, its in (held or {}).items() if job not in kept}
    jobs = sorted(
        (job for job in state.active.jobs if job.id not in kept),
        key=lambda job: job.arrival_seconds,
    )
    found = _fixed(stocks, jobs, wishes, seats)
    room = stocks.room
    for counts in found.values():
        room = [left - number for left, number in zip(room, counts, strict=True)]
    bidders = [
        stocks.bidder(
            job.id, job.arrival_seconds, wish, stocks.counts(seats.get(job.id, ())),
            mixes=variant.mixes,
        )
        for job in jobs
        if isinstance(wish := wishes[job.id], Elastic)
    ]  # fmt: skip
    found |= decide(
        stocks.stocks, room, [one for one in bidders if any(one.held)],
        [one for one in bidders if not any(one.held)], trade=variant.trade,
    ).held  # fmt: skip
    chosen = {**stocks.seats(found, seats), **kept}
    _note(state, chosen)
    state.last_reset, state.changed = now_seconds, False
    return chosen


def _fixed(
    stocks: "_Stocks", jobs: list[Job], wishes: Mapping[str, Wish], seats: Mapping[str, Seat]
) -> dict[str, Counts]:
    """Devices of fixed jobs: those that run, and those from the head of the queue that fit."""
    found, room = dict[str, Counts](), stocks.room
    waiting: list[tuple[Job, list[Counts]]] = []
    for job in jobs:
        wish = wishes[job.id]
        if isinstance(wish, Elastic):
            continue
        options, counts = stocks.options(wish), stocks.counts(seats.get(job.id, ()))
        if counts in options:
            found[job.id] = counts
            room = [left - number for left, number in zip(room, counts, strict=True)]
        else:  # it waits, or one of its devices does not work any more
            waiting.append((job, options))
    # Of equal weights in order of arrival.
    waiting.sort(key=lambda one: -one[0].priority_weight)  # stable
    admitted = admit_gangs(room, (options for _, options in waiting))
    return found | {
        job.id: counts for (job, _), counts in zip(waiting, admitted, strict=False)
    }  # fmt: skip


def _note(state: RoundState, seats: Mapping[str, Seat]) -> None:
    active = state.active
    active.share[:] = 0.0
    for place, job in enumerate(active.jobs):
        for kind, number in Counter(kind for kind, _, _ in seats.get(job.id, ())).items():
            active.share[kind, place] = number / active.scale[place]


class _Stocks:
    """Devices of one type on one server, as ``proposals`` counts them, and by name."""

    def __init__(self, layout: DeviceLayout, down: Collection[Device]) -> None:
        self.num_types = len(layout.sizes)
        self.keys = [(kind, place) for kind, row in enumerate(layout.sizes)
                     for place in range(len(row))]  # fmt: skip
        self.number = {key: stock for stock, key in enumerate(self.keys)}
        self.sizes = [layout.sizes[kind][place] for kind, place in self.keys]
        self.stocks = [Stock(kind, layout.servers[kind][place]) for kind, place in self.keys]
        self.none: Counts = (0,) * len(self.keys)
        self.down = frozenset(down)
        # Devices that are down are no room, but their places stay.
        lost = Counter(self.number[device[:2]] for device in self.down)
        self.room = [size - lost[stock] for stock, size in enumerate(self.sizes)]
        self.up = np.array(self.by_type(self.room), dtype=np.int64)

    def by_type(self, counts: "Counts | list[int]") -> ByType:
        found = [0] * self.num_types
        for (kind, _), number in zip(self.keys, counts, strict=True):
            found[kind] += number
        return tuple(found)

    def standing(self, its: Seat) -> Seat:
        """The devices of a job that work."""
        return tuple(device for device in its if device not in self.down)

    def counts(self, its: Seat) -> Counts:
        here = Counter(self.number[device[:2]] for device in its)
        return tuple(here[stock] for stock in range(len(self.keys)))

    def options(self, wish: Fixed) -> list[Counts]:
        """Each choice on each server that has its types."""
        servers = list(dict.fromkeys(stock.server for stock in self.stocks))
        found = []
        for choice in wish.choices:
            for server in servers:
                counts = tuple(
                    choice[stock.kind] if stock.server == server else 0 for stock in self.stocks
                )
                if self.by_type(counts) == choice:
                    found.append(counts)
        return found

    def bidder(
        self, job: str, arrival_seconds: float, wish: Elastic, counts: Counts, *, mixes: bool
    ) -> Bidder:
        return Bidder(
            id=job,
            arrival_seconds=arrival_seconds,
            held=counts,
            most=wish.most,
            rate=lambda devices: wish.rate(self.by_type(devices)),
            full_rate=wish.full_rate,
            least=wish.least,
            mixes=mixes and wish.mixes,
        )

    def seats(self, found: Mapping[str, Counts], before: Mapping[str, Seat]) -> dict[str, Seat]:
        """Devices by name; each stock is a type of its own, so they come from just these."""
        placements = [
            Placement((job,), tuple((stock, n) for stock, n in enumerate(counts) if n))
            for job, counts in found.items()
        ]
        inside = seat(
            [[size] for size in self.sizes],
            placements,
            {job: self._inside(its) for job, its in before.items()},
            set(self._inside(self.down)),
        )
        return {
            job: tuple((*self.keys[stock], number) for stock, _, number in its)
            for job, its in zip(found, inside, strict=True)
        }

    def _inside(self, devices: Collection[Device]) -> Seat:
        return tuple((self.number[device[:2]], 0, device[2]) for device in devices)
