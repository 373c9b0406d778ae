"""Devices of live jobs by EasyScale's schedulers, decided at every event (EasyScale 3.4).

``proposals`` counts devices; here jobs are told which. Elastic jobs use what the others leave over.
Fixed jobs are guaranteed: those that wait are let in by weight, then arrival, and elastic jobs give
back what these need. Who is let in keeps its devices until it ends.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from ...schema.jobs import Job
from ...schema.plugins import Registry
from .cluster.seats import Device, DeviceLayout, Placement, Seat, seat
from .proposals import Bidder, Counts, Stock, TentativeHoldings, admit_gangs, decide
from .rounds.state import RoundState


@dataclass(frozen=True, slots=True)
class Variant:
    """``mixes``: jobs may hold several types at once. For ``trade`` see ``proposals.decide``."""

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
