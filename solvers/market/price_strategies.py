"""What a job pays that may move among offers: strategies of the thesis, and a lower bound.

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
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...schema.errors import ProblemError
from ...schema.market import utc_text
from .job import Held, Moment, RentJob
from .offers import Prices


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
        in_time = own & (seconds <= left * (1 + 1e-12))
        if not in_time.any():
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
    """At least what any way to move among the offers costs; O(values x stretches x offers^2).

    Also whether prices that go on could lower it; what they could is taken off.

    Raises:
        ProblemError: The job cannot end before the prices do.
    """
    rates, clouds, leaving = _of_offers(job)
    known, cost = prices.is_known, np.where(prices.is_known, prices.dollars_per_second, np.inf)
    if len(rates) > _MOST_OFFERS:
        groups = list(dict.fromkeys(zip(clouds.tolist(), rates.tolist(), strict=True)))
        of_group = [np.flatnonzero((clouds == c) & (rates == r)) for c, r in groups]
        cost = np.stack([cost[:, places].min(axis=1) for places in of_group], axis=1)
        known, first = np.isfinite(cost), [int(places[0]) for places in of_group]
        rates, clouds, leaving = rates[first], clouds[first], leaving[first]
    value = _values(cost, rates)[:, None]
    near = [clouds == name for name in dict.fromkeys(clouds.tolist())]
    held = np.full((len(value), len(rates)), np.inf)
    least, most_work, spent = np.inf, 0.0, 0.0
    is_final = not prices.goes_on
    for stretch, length in enumerate(prices.seconds):
        lost = value * rates * min(job.restart_seconds, length)
        entered = held.copy()
        if stretch == 0:
            entered = lost
        else:
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
        if most_work >= job.work_seconds * (
            1 - 1e-9
        ):  # the job can have ended by the end of this stretch
            last = (usable + np.minimum(step, 0.0)).min(axis=1) + value[:, 0] * job.work_seconds
            least = min(least, float(last.max()))
        held = usable + step
        cheapest = float(cost[stretch].min())
        spent += cheapest * length if np.isfinite(cheapest) else 0.0
        if spent >= least:
            is_final = True
            break
    if not np.isfinite(least):
        raise ProblemError("the job cannot end before its prices do", hint="give less work")
    if not is_final:
        least = min(least, spent)
    return Bound(max(least, 0.0), is_final)


def _of_offers(job: RentJob) -> tuple[NDArray[np.float64], NDArray[np.str_], NDArray[np.float64]]:
    """[offers] rates, clouds, and dollars of leaving each."""
    leaving = [job.leaving_dollars(zone) for zone in range(job.num_zones)]
    return np.array(job.rates), np.array(job.clouds), np.array(leaving)


def _values(cost: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Dollars for a unit of work, from what it costs at the best to what it costs at the worst."""
    each = (cost / rates)[np.isfinite(cost)]
    each = each[each > 0]
    if not each.size:
        return np.zeros(1)
    low, high = float(each.min()), float(each.max())
    told = np.unique(each)  # of devices alike, the best value is one of these
    few = told if told.size <= _VALUES else told[:0]
    return np.concatenate([[0.0], np.geomspace(low / 2, high * 2, _VALUES), few])
