"""Offers: machines with prices over time, of markets.

A job uses one device of one machine at a time, and pays that device's share of the machine's price
(who packs a machine full pays no more). It runs from start to end without a pause. Each offer is a
zone of ``solvers.market.job``, and a stretch in which no price changes is a tick.

The strategies of figure 6.5 of Narayanan's thesis differ in what each may take, and whether it
moves. At the start each takes, of the offers that it may take, the one with the most work per
dollar. ``dynamic`` compares again whenever a price changes. It moves if the rest of the work, with
the cost of the move, would be cheaper at the present prices. Under a deadline only offers count on
which the rest ends in time, if there are any; else the one that ends soonest.

The bound holds with all prices known in advance. For each stretch in which the job may end there is
a Lagrangian bound, and the least of these is the answer. For any value v of a unit of work, dollars
>= v * work + min over ways to hold offers of (dollars - v * work done). The minimum is a dynamic
program over stretches and offers; of several v the one with the greatest bound is taken. Ways to
hold offers move at the start of a stretch only, as all strategies do. A launch loses the work of
one restart, or of the whole stretch where that is shorter; this never counts too much.

Ends are looked at in order of time, until a job that holds the cheapest offers all along would have
paid the bound already. Of more than 64 offers, those of one device type in one cloud count as one
at the lowest of their prices, with free moves between them: still a lower bound, if a looser one.

    one offer, 1 $/h for an hour and 3 $/h for the next; one hour of work, no restart
    v = 2: 2 x 1 + (1 - 2) for the first hour + 0 for the second, which costs 3 and is not held
    the bound is 1 $, which holding the first hour pays
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite, nan
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from ...schema.market import InstanceType, Market, utc_seconds, utc_text
from ...schema.options import option
from ...schema.spelling import nearest
from .job import Held, Moment, RentJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A device of a machine in one place; one on demand is never taken away."""

    cloud: str
    place: str
    instance_type: str
    device_type: str
    num_devices: int
    is_spot: bool = True

    @classmethod
    def of(cls, machine: InstanceType, cloud: str, place: str, *, is_spot: bool = True) -> "Offer":
        """A machine's device."""
        return cls(
            cloud=cloud, place=place, instance_type=machine.name, is_spot=is_spot,
            device_type=machine.device_type, num_devices=machine.num_devices,
        )  # fmt: skip

    @property
    def title(self) -> str:
        """Cloud, place and machine, and how it is rented where it is on demand."""
        words = (self.cloud, self.place, self.instance_type, "" if self.is_spot else "on-demand")
        return " ".join(word for word in words if word)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Offers over time.

    Attributes:
        offers: [offers].
        edges: [stretches + 1] seconds since 1970 in UTC; prices are constant in between.
        dollars_per_second: [stretches, offers] of one device; NaN where unknown.
        goes_on: Whether there are prices after the last edge, which are left out.
        posted: ``dollars_per_second`` also where no machine can be had; None: the same.
    """

    offers: tuple[Offer, ...]
    edges: NDArray[np.float64]
    dollars_per_second: NDArray[np.float64]
    goes_on: bool = False
    posted: NDArray[np.float64] | None = None

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """[stretches] how long each is."""
        return np.diff(self.edges)

    @cached_property
    def is_known(self) -> NDArray[np.bool_]:
        """[stretches, offers] whether the price is known, so that the machine can be had."""
        return np.isfinite(self.dollars_per_second)

    @cached_property
    def dollars_per_hour(self) -> NDArray[np.float64]:
        """[offers, stretches] of one device; NaN where unknown."""
        return self.dollars_per_second.T * 3600

    @cached_property
    def clouds(self) -> NDArray[np.str_]:
        """[offers] where each is."""
        return np.array([offer.cloud for offer in self.offers])

    def until(self, end_seconds: float) -> "Prices":
        """The prices up to a time."""
        # A job cannot see prices that come later; ``goes_on`` says that there are any.
        if end_seconds >= self.edges[-1]:
            return self
        last = int(np.searchsorted(self.edges, end_seconds, side="left"))
        edges = np.concatenate([self.edges[:last], [end_seconds]])
        return replace(self._rows(slice(last), edges), goes_on=True)

    def _rows(self, rows: slice, edges: NDArray[np.float64]) -> "Prices":
        """Some of the stretches, whose edges may be others."""
        known = self.dollars_per_second[rows]
        posted = None if self.posted is None else self.posted[rows]
        return replace(self, edges=edges, dollars_per_second=known, posted=posted)

    def since(self, start_seconds: float) -> "Prices":
        """The prices from ``start_seconds`` on.

        Raises:
            ProblemError: The prices begin later, or end before.
        """
        begin, end = float(self.edges[0]), float(self.edges[-1])
        if not begin <= start_seconds < end:
            raise _no_prices(start_seconds, begin, end)
        # The stretch that contains the start is cut there.
        first = int(np.searchsorted(self.edges, start_seconds, side="right")) - 1
        edges = np.concatenate([[start_seconds], self.edges[first + 1 :]])
        return self._rows(slice(first, None), edges)


def _no_prices(start_seconds: float, begin: float, end: float) -> ProblemError:
    known = f"they begin at {utc_text(begin)}"
    known += f" and end at {utc_text(end)}" if isfinite(end) else ""
    return ProblemError(f"there are no prices at {utc_text(start_seconds)}", hint=known)


Steps = list[tuple[float, float, float | None]]


@dataclass(frozen=True, slots=True)
class OfferHistory:
    """Offers with the stretches of their prices, as they stand: start, end, dollars of a machine.

    A year of many machines has so many stretches in common that a table of them is too large;
    ``between`` makes one of what a job may see.
    """

    offers: tuple[Offer, ...]
    steps: tuple[Steps, ...]

    @property
    def end_seconds(self) -> float:
        """When the last price ends."""
        return max(step[-1][1] for step in self.steps)

    def all_known_seconds(self) -> float:
        """When, at the earliest, the prices of as many offers are known as ever are at once."""
        known = [
            one for step in self.steps for one in step if one[2] is not None and one[0] < one[1]
        ]
        times, row = np.unique(
            [time for start, end, _ in known for time in (start, end)], return_inverse=True
        )
        if not len(times):
            raise ProblemError("no price is known at any time")
        # A sweep over time: +1 where a price begins, -1 where it ends; ties are summed before the
        # maximum.
        turns = np.tile([1, -1], len(known))
        return float(times[int(np.argmax(np.cumsum(np.bincount(row, turns))))])

    def table(self) -> Prices:
        """The prices of all time, on common stretches."""
        return _table(self.offers, self.steps)

    def between(self, start_seconds: float, end_seconds: float) -> Prices:
        """The prices of a time, on common stretches.

        Raises:
            ProblemError: There are none at the start.
        """
        cut = [
            [one for one in step if one[1] > start_seconds and one[0] < end_seconds]
            for step in self.steps
        ]
        if not any(cut):
            begin = min(step[0][0] for step in self.steps)
            raise _no_prices(start_seconds, begin, self.end_seconds)
        return replace(
            _table(self.offers, cut).since(start_seconds).until(end_seconds),
            goes_on=end_seconds < self.end_seconds,
        )


def job_on(
    offers: Sequence[Offer],
    *,
    work: float,
    work_per_second: Mapping[str, float],
    restart_seconds: float = 0.0,
    cloud_move_dollars: float = 0.0,
    egress_dollars: Mapping[str, float] | None = None,
    deadline_seconds: float = inf,
) -> RentJob:
    """A job for one device of an offer at a time.

    Args:
        offers: The zones.
        work: In any unit.
        work_per_second: By device type, in that unit.
        restart_seconds: From a launch until work goes on.
        cloud_move_dollars: Of a move from one cloud to another, whichever they are.
        egress_dollars: By cloud, of taking the checkpoint out of it; 0 for one that is not named.
        deadline_seconds: From the start.

    Raises:
        ProblemError: A number is out of range.
    """
    egress = egress_dollars or {}
    return RentJob(
        work_seconds=work,
        deadline_seconds=deadline_seconds,
        restart_seconds=restart_seconds,
        spot_dollars_per_hour=(0.0,) * len(offers),  # they move: prices are the offers'
        rates=tuple(work_per_second[offer.device_type] for offer in offers),
        clouds=tuple(offer.cloud for offer in offers),
        move_dollars=tuple(cloud_move_dollars + egress.get(one.cloud, 0.0) for one in offers),
    )


def prices_of(markets: Sequence[Market], device_types: Collection[str]) -> Prices:
    """Collect the offers of some device types from markets, on common stretches of time.

    Raises:
        ProblemError: A machine's devices are not known, or no machine has such devices.
    """
    return history_of(markets, device_types).table()


def history_of(
    markets: Sequence[Market],
    device_types: Collection[str],
    *,
    fixed: Literal["for ever", "until the last change"] | None = None,
) -> OfferHistory:
    """Offers as the stretches of each one's prices.

    ``fixed`` adds the machines whose prices do not change, for ever or for as long as the
    histories last; where there are none, for ever.

    Raises:
        ProblemError: A machine's devices are not known, or no machine has such devices.
    """
    offers: list[Offer] = []
    steps: list[Steps] = []
    for market in markets:
        for history in market.prices:
            machine = market.described(history)
            if machine.device_type in device_types:
                offers.append(Offer.of(machine, history.cloud, history.place))
                steps.append(history.stretches())
    if fixed:
        begin = min((step[0][0] for step in steps), default=0.0)
        end = max((step[-1][1] for step in steps), default=inf)
        if fixed == "for ever":  # after its end, what a history tells is unknown
            steps = [[*step, (step[-1][1], inf, None)] for step in steps]
            end = inf
        for offer, price in _fixed_offers(markets, device_types):
            offers.append(offer)
            steps.append([(begin, end, price)])
    if not offers:
        raise _no_machine(markets, device_types)
    return OfferHistory(tuple(offers), tuple(steps))


def _no_machine(markets: Sequence[Market], device_types: Iterable[str]) -> ProblemError:
    """The error of markets without any machine that has such devices; it names what they have."""
    types = dict.fromkeys(one.device_type for market in markets for one in market.instance_types)
    known = [name for name in device_types if name in types]
    guesses = [guess for name in device_types if (guess := nearest(name, list(types)))]
    if known:
        hint = f"it has machines with {known[0]}, but no price histories of them"
    elif guesses:
        hint = f"did you mean {guesses[0]!r}?"
    else:
        hint = f"the market has {', '.join(types) or 'no instance types'}"
    return ProblemError(f"no machine with prices has one of {', '.join(device_types)}", hint=hint)


def _table(offers: Sequence[Offer], steps: Sequence[Steps]) -> Prices:
    """Prices on common stretches; an offer without any is unknown throughout."""
    edges = np.unique([time for step in steps for start, end, _ in step for time in (start, end)])
    dollars = np.full((len(edges) - 1, len(offers)), nan)
    for column, (offer, step) in enumerate(zip(offers, steps, strict=True)):
        if not step:
            continue
        starts = np.array([start for start, _, _ in step])
        # The last step that begins by each edge, where it has not ended.
        row = np.searchsorted(starts, edges[:-1], side="right") - 1
        told = np.array([nan if price is None else price for _, _, price in step])
        known = (row >= 0) & (edges[:-1] < step[-1][1])
        dollars[known, column] = told[row[known]] / offer.num_devices / 3600
    return Prices(offers=tuple(offers), edges=edges, dollars_per_second=dollars)


def _fixed_offers(
    markets: Sequence[Market], device_types: Iterable[str]
) -> list[tuple[Offer, float]]:
    """Machines whose prices do not change, each with the dollars per hour of the machine."""
    # On demand, or spot at a price without a history.
    found = []
    types = set(device_types)
    for market in markets:
        for machine in market.instance_types:
            clouds = {one.cloud for one in market.prices if one.instance_type == machine.name}
            cloud = machine.cloud or (clouds.pop() if len(clouds) == 1 else "")
            on_demand, spot = machine.on_demand_dollars_per_hour, machine.spot_dollars_per_hour
            for price, is_spot in ((on_demand, False), (spot, True)):
                if price is None or machine.device_type not in types:
                    continue
                if is_spot and market.has_history(machine):
                    continue
                offer = Offer.of(machine, cloud, machine.region or "", is_spot=is_spot)
                found.append((offer, price))
    return found


def where_available(prices: Prices, markets: Sequence[Market]) -> tuple[Prices, bool]:
    """The prices, unknown where the markets know that no spot machine could be had.

    Availability counts for spot offers in its zone (of its machine, where it names one), from the
    time at which it starts; ticks that are unknown, and other times, count as available.

    Returns:
        The prices, and whether anything was said about them.

    Raises:
        ProblemError: A window has no start, or is of no zone and machine that has a spot price.
    """
    gone: list[tuple[int, float, float]] = []  # offer, from, to
    applies = False
    # Of all device types: a window of one that nobody asked for is no mistake.
    priced = {(one.place, one.instance_type) for market in markets for one in market.prices}
    priced |= {
        (one.region or "", one.name)
        for market in markets
        for one in market.instance_types
        if one.spot_dollars_per_hour is not None
    }
    for market in markets:
        for window in market.availability:
            if window.start is None:
                raise ProblemError(
                    f"availability of {window.zone!r} does not say when it begins, so it cannot be "
                    "laid beside prices",
                    hint=f"import it with {option('trace_start')}, or give it a start",
                )
            if not any(
                place == window.zone and window.instance_type in (None, name)
                for place, name in priced
            ):
                title = " ".join(filter(None, (window.zone, window.instance_type)))
                places = dict.fromkeys(place for place, _ in sorted(priced) if place)
                raise ProblemError(
                    f"there is availability of {title}, which has no spot price; spot prices "
                    f"are of {', '.join(places) or 'no zone'}",
                    hint="give the prices and the availability of a zone (and machine) the same "
                    "names, or leave that availability out",
                )
            mine = [
                place
                for place, offer in enumerate(prices.offers)
                if offer.is_spot
                and offer.place == window.zone
                and window.instance_type in (None, offer.instance_type)
            ]
            applies |= bool(mine)
            begin = utc_seconds(window.start, f"zone {window.zone!r}", "start")
            for first, last in _runs_of_none(window.available):
                span = begin + first * window.tick_seconds, begin + last * window.tick_seconds
                gone += [(place, *span) for place in mine]
    cuts = [time for _, start, end in gone for time in (start, end)]
    inside = [time for time in cuts if prices.edges[0] < time < prices.edges[-1]]
    edges = np.unique(np.concatenate([prices.edges, inside]))
    posted = prices.dollars_per_second[np.searchsorted(prices.edges, edges[:-1], side="right") - 1]
    dollars = posted.copy()
    for place, start, end in gone:
        dollars[(edges[:-1] >= start) & (edges[:-1] < end), place] = nan
    return replace(prices, edges=edges, dollars_per_second=dollars, posted=posted), applies


def _runs_of_none(available: Sequence[int | None]) -> list[tuple[int, int]]:
    """First tick and the one after the last of each run of ticks without a machine."""
    # Padded, so that runs at either end have both turns.
    padded = np.concatenate([[False], [tick == 0 for tick in available], [False]])
    turns = np.flatnonzero(padded[1:] != padded[:-1])
    return [(int(a), int(b)) for a, b in zip(turns[::2], turns[1::2], strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceStrategy:
    """A policy on offers, each of which is a zone with one machine while its price is known.

    ``may_take`` [offers] says which are its own; ``moves`` whether it looks at prices again.
    """

    prices: Prices
    may_take: NDArray[np.bool_]
    moves: bool = False

    def __call__(self, job: RentJob, now: Moment) -> Held:
        """The offer with the least dollars for the rest at the prices of now.

        Raises:
            ProblemError: No price is known of what it may hold.
        """
        if now.held.num_spot and not self.moves:
            return now.held
        best = None
        if self.moves or now.zone is None:
            best = self._best(job, now)
        if best is None:
            when = utc_text(float(self.prices.edges[now.tick]))
            raise ProblemError(f"at {when} no price is known of what the job may hold")
        return Held(1, 0, best)

    def _best(self, job: RentJob, now: Moment) -> int | None:
        rates, prices = np.array(job.rates), np.asarray(now.spot_dollars_per_hour)
        # What is held goes on where it is; anything else begins with a whole restart.
        launches = np.full(len(rates), job.restart_seconds)
        held = now.held.zone if now.held.num_spot else None
        if held is not None:
            launches[held] = now.pending_seconds
        seconds = now.work_left_seconds / rates + launches
        dollars = prices / 3600 * seconds
        if now.zone is not None and job.leaving_dollars(now.zone):
            away = self.prices.clouds != job.clouds[now.zone]
            dollars = dollars + away * job.leaving_dollars(now.zone)
        own = self.may_take & np.isfinite(dollars)
        left = job.deadline_seconds - float(self.prices.edges[now.tick] - self.prices.edges[0])
        # A price that just meets the deadline counts in spite of rounding.
        in_time = own & (seconds <= left * (1 + 1e-12))
        if not in_time.any():
            # Nothing ends in time: what ends soonest is left.
            in_time = own & (seconds <= seconds[own].min(initial=np.inf))
        dollars = np.where(in_time, dollars, np.inf)
        best = int(np.argmin(dollars))
        if not np.isfinite(dollars[best]):
            return None
        # A tie is no reason to move.
        return held if held is not None and dollars[held] <= dollars[best] else best


def strategies(
    prices: Prices, *, cloud: str = "aws", device_type: str = "V100"
) -> dict[str, PriceStrategy]:
    """The five by name, in the order of the figure; ``one_device`` is the thesis's 1xV100."""
    here, anything = prices.clouds == cloud, np.ones(len(prices.offers), np.bool_)
    alone = np.array([offer.num_devices == 1 for offer in prices.offers])
    is_type = np.array([offer.device_type == device_type for offer in prices.offers])
    return {
        "one_device": PriceStrategy(prices=prices, may_take=here & alone & is_type),
        "gpu_type": PriceStrategy(prices=prices, may_take=here & alone),
        "multi_gpu": PriceStrategy(prices=prices, may_take=here),
        "multi_cloud": PriceStrategy(prices=prices, may_take=anything),
        "dynamic": PriceStrategy(prices=prices, may_take=anything, moves=True),
    }


_VALUES = 96  # of a unit of work; more sharpen the bound, any are valid
_MOST_OFFERS = 64


@dataclass(frozen=True, slots=True)
class Bound:
    """At least so many dollars; ``is_final``: prices after the last edge would change nothing."""

    dollars: float
    is_final: bool


def bound(job: RentJob, prices: Prices) -> Bound:
    """At least what any way to move among the offers costs; O(values x stretches x offers).

    Also whether prices that go on could lower it; what they could is taken off.

    Raises:
        ProblemError: The job cannot end before the prices do.
    """
    rates, clouds = np.array(job.rates), np.array(job.clouds)
    leaving = np.array([job.leaving_dollars(zone) for zone in range(job.num_zones)])
    known, cost = prices.is_known, np.where(prices.is_known, prices.dollars_per_second, np.inf)
    if len(rates) > _MOST_OFFERS:
        groups = list(dict.fromkeys(zip(clouds.tolist(), rates.tolist(), strict=True)))
        of_group = [np.flatnonzero((clouds == c) & (rates == r)) for c, r in groups]
        cost = np.stack([cost[:, places].min(axis=1) for places in of_group], axis=1)
        known, first = np.isfinite(cost), [int(places[0]) for places in of_group]
        # Zones of one cloud and speed that move for nothing are one offer at the lowest price: a
        # relaxation.
        rates, clouds, leaving = rates[first], clouds[first], leaving[first]
    # [values, 1]; all below is for all v at once.
    value = _values(cost, rates)[:, None]
    near = [clouds == name for name in dict.fromkeys(clouds.tolist())]
    # [values, offers] the least of dollars - v x work so far, by the offer held in this stretch.
    held = np.full((len(value), len(rates)), np.inf)
    least, most_work, spent = np.inf, 0.0, 0.0
    is_final = not prices.goes_on
    for stretch, length in enumerate(prices.seconds):
        # A launch loses work, so in dollars it costs v a unit of it.
        lost = value * rates * min(job.restart_seconds, length)
        entered = held.copy()
        if stretch == 0:
            entered = lost
        else:
            # Moves within a cloud are free, between clouds they cost what leaving does: two minima
            # replace the table of all pairs, so a stretch takes O(values x offers).
            within = [held[:, cloud].min(axis=1, keepdims=True) for cloud in near]
            anywhere = (held + leaving).min(axis=1, keepdims=True)
            for cloud, stayed in zip(near, within, strict=True):
                moved = np.minimum(stayed, anywhere) + lost[:, cloud]
                entered[:, cloud] = np.minimum(held[:, cloud], moved)
        paid = cost[stretch] * length
        gained = value * rates * length
        step = np.where(known[stretch], paid - gained, np.inf)
        usable = np.where(known[stretch], entered, np.inf)
        most_work += float(np.max(rates * known[stretch])) * length
        # The job can have ended by the end of this stretch.
        if most_work >= job.work_seconds * (1 - 1e-9):
            # The job may end within this stretch: it holds the offer only while that lowers the
            # bound.
            last = (usable + np.minimum(step, 0.0)).min(axis=1) + value[:, 0] * job.work_seconds
            least = min(least, float(last.max()))
        held = usable + step
        # Whatever a longer job does, in each stretch that it passes it pays at least the cheapest
        # offer: ``spent`` only grows.
        cheapest = float(cost[stretch].min())
        spent += cheapest * length if np.isfinite(cheapest) else 0.0
        # A job that goes on for longer has paid this much at least, so later ends lower nothing.
        if spent >= least:
            is_final = True
            break
    if not np.isfinite(least):
        raise ProblemError("the job cannot end before its prices do", hint="give less work")
    if not is_final:
        # Later prices may be as low as nothing, but what was paid until here was paid.
        least = min(least, spent)
    return Bound(max(least, 0.0), is_final)


def _values(cost: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Dollars for a unit of work, from what it costs at the best to what it costs at the worst."""
    each = (cost / rates)[np.isfinite(cost)]
    each = each[each > 0]
    if not each.size:
        return np.zeros(1)
    low, high = float(each.min()), float(each.max())
    # The bound is concave in v, with corners at costs of work; a geometric grid gets near the
    # rest.
    told = np.unique(each)  # of devices alike, the best value is one of these
    few = told if told.size <= _VALUES else told[:0]
    return np.concatenate([[0.0], np.geomspace(low / 2, high * 2, _VALUES), few])
