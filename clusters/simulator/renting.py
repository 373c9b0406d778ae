"""One job on rented machines, tick by tick: policies replayed, compared, and asked for advice.

The model is that of ``solvers.market.job``. ``compare`` replays policies for a job under a deadline
on the same windows, beside the least possible; ``Adviser`` asks one for what a running job should
hold now. ``compare_from`` compares price strategies on the same prices, beside the bound
(``solvers.market.offers``).
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil, floor

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.market import (
    HeldOffer,
    PolicyReplay,
    RentAdvice,
    RentReport,
    RentState,
    StrategyReplay,
    held_text,
)
from ...schema.spelling import did_you_mean
from ...solvers.market import policies as known
from ...solvers.market.chain import Chain, chain_of, most_zones
from ...solvers.market.dynamic_program import Programs, least_of_each, ticks_a_decision
from ...solvers.market.job import Held, Moment, RentJob, RentPolicy
from ...solvers.market.offers import Offer, OfferHistory, Prices, bound, strategies
from ...solvers.market.windows import Traces, Window, longer_ticks, windows_of

_DONE_SECONDS = 1e-3
_JUST = 1e-6  # seconds that rounding may add


@dataclass(frozen=True, slots=True, kw_only=True)
class RentOutcome:
    """What became of a job: ``held`` [ticks] until it ended or its deadline passed.

    A launch is any change to other machines, also by loss, and costs a restart; a move is one in
    another zone. ``dollars`` pay the last tick to its end, ``used_dollars`` to the job's, at
    ``seconds``.
    """

    dollars: float
    used_dollars: float
    seconds: float
    is_late: bool
    num_launches: int
    num_moves: int
    held: tuple[Held, ...]


def replay(
    job: RentJob,
    policy: RentPolicy,
    available: ArrayLike,
    spot_dollars_per_hour: ArrayLike | None = None,
    tick_seconds: ArrayLike | None = None,
) -> RentOutcome:
    """Run one job to its end, or to its deadline; O(ticks x zones).

    Args:
        job: The job.
        policy: Who decides.
        available: [zones, ticks] spot machines that can be held; as long as the job runs.
        spot_dollars_per_hour: [zones, ticks] of one machine, where prices move.
        tick_seconds: [ticks] where they differ; the last one ends by the deadline.

    Raises:
        ProblemError: A window is too short, or the policy asks for what there is not.
    """
    there = np.asarray(available)
    prices = None if spot_dollars_per_hour is None else np.asarray(spot_dollars_per_hour)
    # Ticks of prices have no lengths of runs: strategies do not look at them.
    lengths = run_lengths(there) if tick_seconds is None else np.ones_like(there)
    seconds_of = None if tick_seconds is None else np.asarray(tick_seconds).tolist()
    most_ticks = job.num_ticks if seconds_of is None else len(seconds_of)
    held, place, pending = Held(0, 0), None, 0.0
    left, dollars, used, seconds = job.work_seconds, 0.0, 0.0, 0.0
    history: list[Held] = []
    launches = moves = 0
    # With whole ticks a thousandth of a second is rounding; prices are paid to the second.
    enough = _DONE_SECONDS if tick_seconds is None else 0.0
    while left > enough and len(history) < most_ticks:
        tick = len(history)
        if tick >= there.shape[1]:
            raise ProblemError(f"a window ends after {tick} ticks, while the job runs")
        now_there = there[:, tick]
        length = job.tick_seconds if seconds_of is None else seconds_of[tick]
        lost = held.num_spot > now_there[held.zone]
        # Lost spot machines: what is left is another holding, which begins with a restart.
        if lost:
            held = held._replace(num_spot=int(now_there[held.zone]))
            pending = job.restart_seconds if held.num_machines else 0.0
        now = Moment(
            tick=tick,
            work_left_seconds=left,
            held=held,
            zone=place,
            pending_seconds=pending,
            available=now_there,
            run_lengths=lengths[:, tick],
            spot_dollars_per_hour=job.spot_dollars_per_hour if prices is None else prices[:, tick],
        )
        asked = policy(job, now)
        num_spot, num_on_demand, zone = asked
        most = now_there[zone]
        if num_spot > most or asked.num_machines > job.num_machines or min(asked) < 0:
            raise ProblemError(
                f"tick {tick}: the policy asks for {num_spot} spot and {num_on_demand} on-demand "
                f"machines in zone {zone}; {most} spot machines are there, and the job can use "
                f"{job.num_machines}"
            )
        # A launch is any change, also to as many machines again after a loss.
        if asked.num_machines and (lost or asked != held):
            # After a loss the restart is pending already.
            if asked != held:
                pending = job.restart_seconds
            dollars += job.moving_dollars(place, zone)
            # The first launch is no move.
            moves += place is not None and place != zone
            launches += 1
            place = zone
        held = asked
        history.append(held)
        worked = length
        if held.num_machines:
            rate = float(job.dollars_per_hour(held, now.spot_dollars_per_hour))
            needed = pending + left / job.speed(held.num_machines, held.zone)
            worked = min(needed, length)
            # To the job's end, and, in whole ticks, to the tick's.
            used = dollars + rate * worked / 3600
            dollars += rate * length / 3600
            # Rounding must not leave a millionth of a second of work for another tick.
            left = 0.0 if needed <= length + _JUST else left - job.worked(held, pending, length)
            pending = max(pending - length, 0.0)
        seconds += worked
    return RentOutcome(
        dollars=dollars,
        used_dollars=used,
        seconds=seconds,
        is_late=left > enough,
        num_launches=launches,
        num_moves=moves,
        held=tuple(history),
    )


def run_lengths(available: NDArray[np.int64]) -> NDArray[np.int64]:
    """For how many ticks it has been so [zones, ticks], from the first tick on."""
    ticks = np.arange(available.shape[1])
    turns = np.ones(available.shape, np.bool_)
    turns[:, 1:] = available[:, 1:] != available[:, :-1]
    # [zones, ticks] from the last change on, found by a running maximum of its places.
    return ticks - np.maximum.accumulate(np.where(turns, ticks, 0), axis=1) + 1


_SPARE = 1.3  # times the first guess of how much history matters


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What strategies paid, or why one could not be replayed, from a time on (since 1970 in UTC).

    ``is_final``: prices after those that were looked at could not lower the bound.
    """

    start_seconds: float
    outcomes: dict[str, StrategyReplay]
    refused: dict[str, str]
    bound_dollars: float
    is_final: bool


def strategy_replay(job: RentJob, policy: RentPolicy, prices: Prices) -> StrategyReplay:
    """Run one job from the start of the prices to its end; O(stretches x offers).

    Raises:
        ProblemError: A price that it would have to pay is unknown, or the prices end before it.
    """
    outcome = replay(job, policy, prices.is_known.T, prices.dollars_per_hour, prices.seconds)
    if outcome.is_late:
        raise ProblemError("the prices end before the job does", hint="give less work")
    zones = [held.zone for held in outcome.held]
    taken = [zone for zone, before in zip(zones, [None, *zones], strict=False) if zone != before]
    return StrategyReplay(
        dollars=outcome.used_dollars,
        seconds=outcome.seconds,
        held=tuple(_held(prices.offers[zone]) for zone in taken),
    )


def _held(offer: Offer) -> HeldOffer:
    return HeldOffer(
        **{**asdict(offer), "cloud": offer.cloud or None, "place": offer.place or None}
    )


def compare_strategies(job: RentJob, prices: Prices, *, cloud: str, device_type: str) -> Compared:
    """Replay all strategies from the start of the prices, for a job on their offers.

    Those that keep to one cloud are in ``cloud``; ``one_device`` takes a ``device_type``.

    Raises:
        ProblemError: The job cannot end before the prices do, whatever it takes.
    """
    outcomes: dict[str, StrategyReplay] = {}
    refused: dict[str, str] = {}
    for name, strategy in strategies(prices, cloud=cloud, device_type=device_type).items():
        try:
            outcomes[name] = strategy_replay(job, strategy, prices)
        except ProblemError as error:
            refused[name] = error.message
    least = bound(job, prices)
    return Compared(
        start_seconds=float(prices.edges[0]),
        outcomes=outcomes,
        refused=refused,
        bound_dollars=least.dollars,
        is_final=least.is_final,
    )


def compare_from(
    job: RentJob, history: OfferHistory, start_seconds: float, *, cloud: str, device_type: str
) -> Compared:
    """Compare on as much of a long history as matters, until the deadline at most.

    Raises:
        ProblemError: There are no prices at the start, or the job cannot end before they do.
        InfeasibleError: It cannot end by its deadline.
    """
    # Prices until the deadline may be years: as much as matters first, twice as much while it may
    # not suffice.
    length = _SPARE * _first_guess(job, history.between(start_seconds, start_seconds + 1.0))
    while True:
        is_all = length >= job.deadline_seconds
        length = min(length, job.deadline_seconds)
        prices = history.between(start_seconds, start_seconds + length)
        if is_all and prices.goes_on:
            prices = replace(prices, goes_on=False)  # what comes later is too late
        try:
            compared = compare_strategies(job, prices, cloud=cloud, device_type=device_type)
        except ProblemError as error:
            if is_all:
                raise InfeasibleError(
                    f"the work cannot end within {job.deadline_seconds / 3600:.4g} h on any device "
                    "that has a price",
                    hint="give a later deadline, or less work",
                ) from error
            if not prices.goes_on:
                raise
        else:
            # A later price may still lower the bound, or let a strategy go on.
            if not prices.goes_on or (compared.is_final and not compared.refused):
                return compared
        length *= 2


def _first_guess(job: RentJob, prices: Prices) -> float:
    """Seconds in which the cheapest offer of now costs what a job that does not move pays."""
    now = prices.dollars_per_second[0]
    seconds = job.restart_seconds + job.work_seconds / np.array(job.rates)
    known = np.isfinite(now)
    if not known.any() or not (now[known] > 0).all():
        return float(seconds.max())
    # In that time the cheapest offer costs as much as staying on the best one: later prices hardly
    # matter.
    return max(float((now * seconds)[known].min() / now[known].min()), float(seconds.min()))


_MOST_PAST, _MOST_PAST_MOVING = 100, 20  # windows of a history to replay on; where prices move


def compare(
    job: RentJob,
    traces: Sequence[Traces],
    *,
    history: Sequence[Traces] = (),
    policies: Sequence[str] | None = None,
    every_seconds: float | None = None,
) -> RentReport:
    """Replay policies on windows of the traces that are as long as the deadline.

    Args:
        job: The job; its ticks are those of the traces, its spot prices are of their zones (where
            prices move, their means).
        traces: What to replay on, each of as many zones. Windows in which a zone is unknown are
            left out.
        history: What ``dynamic_program`` learns from. It should hold none of the traces. With
            several zones these are found by their names.
        policies: Names; None for all, without those that need a history where there is none.
        every_seconds: From the start of one window to that of the next; None: the deadline.

    Raises:
        ProblemError: There is no window that is known throughout, ticks differ in length, the
            history is of other zones, or there is no policy of that name.
    """
    if not traces:
        raise ProblemError("there is no window of availability to replay on")
    for one in (*traces, *history):
        if one.tick_seconds != job.tick_seconds:
            raise ProblemError(
                f"{one.title}: ticks of {one.tick_seconds:g} s, others have {job.tick_seconds:g} s",
                hint="give windows of one tick length",
            )
    cut = windows_of(traces, job.num_ticks, every_seconds, most=job.num_machines)
    zones, most = traces[0].zones, most_zones(job.num_machines)
    too_many = bool(history) and policies is None and len(zones) > most
    # Zones by name: a history may have them in another order.
    learned = [] if too_many else [one.of_zones(zones, job.num_machines) for one in history]
    chain = chain_for(job, [one.ticks for one in learned]) if learned else None
    names = policies or (known.NAMES if chain else tuple(known.PLAIN))
    programs: Programs | None = None
    windows = [window for _, window in cut.windows]
    bound = least_of_each(job, windows)
    replays = []
    for name in dict.fromkeys(names):
        policy = known.policy_of(name, job, chain)
        programs = policy if isinstance(policy, Programs) else programs
        outcomes = [replay(job, policy, *window) for window in windows]
        replays.append(_summary(name, outcomes, bound))
    in_time = [entry for entry in replays if not entry.missed_deadlines]
    best = min(in_time, key=lambda entry: entry.mean_dollars, default=None)
    expected = None
    if programs is not None:
        first = [
            programs.of(
                job.spot_dollars_per_hour if prices is None else [zone[0] for zone in prices]
            ).expected(tuple(zone[0] for zone in each))
            for each, prices in windows
        ]
        mean = sum(first) / len(first)
        # Being late is priced out of all proportion in the program; such a mean says nothing.
        expected = mean if mean <= job.most_dollars else None
    shared = ticks_a_decision(job) if programs is not None else 1
    return RentReport(
        work_seconds=job.work_seconds,
        deadline_seconds=job.deadline_seconds,
        restart_seconds=job.restart_seconds,
        move_dollars=job.leaving_dollars(0),
        speeds=job.speeds,
        on_demand_dollars_per_hour=dict(zip(zones, job.on_demand_dollars_per_hour, strict=True))
        if isinstance(job.on_demand_dollars_per_hour, tuple)
        else job.on_demand_dollars_per_hour,
        machine_speeds=dict(zip(zones, job.rates, strict=False)),
        spot_dollars_per_hour=dict(zip(zones, job.spot_dollars_per_hour, strict=True))
        if job.num_zones > 1
        else job.spot_dollars_per_hour[0],
        has_moving_prices=any(one.spot_dollars_per_hour is not None for one in traces),
        windows=tuple(name for name, _ in cut.windows),
        num_left_out=cut.num_left_out,
        unused_seconds=cut.unused_seconds,
        bound_dollars=tuple(bound),
        alone_dollars=_alone(job, zones, windows) if job.num_zones > 1 else {},
        policies=tuple(replays),
        choice=None if best is None else best.policy,
        expected_dollars=expected,
        expected_dollars_90=None
        if programs is None or expected is None
        else interval_of(job, programs, learned),
        decision_seconds=shared * job.tick_seconds if shared > 1 else None,
        most_zones_to_learn=most if too_many else None,
    )


def chain_for(job: RentJob, history: Sequence[Sequence[Sequence[int | None]]]) -> Chain:
    """How spot machines come and go in a history [traces][zones][ticks], by ticks of a decision.

    Raises:
        ProblemError: There are too many zones, or no two neighbouring ticks in which all are known.
    """
    shared = ticks_a_decision(job) if job.num_zones <= most_zones(job.num_machines) else 1
    longer = [[longer_ticks(zone, shared) for zone in zones] for zones in history]
    return chain_of(longer, job.num_machines)


def _alone(
    job: RentJob, zones: Sequence[str], windows: Sequence[Window]
) -> dict[str, tuple[float, ...]]:
    """The least dollars [windows] in each zone alone, where its machines are fast enough."""
    alike: dict[RentJob, list[int]] = {}
    for place in range(len(zones)):
        # A zone whose machines are too slow has no answer alone.
        with suppress(InfeasibleError):
            alike.setdefault(job.alone(place), []).append(place)
    found = {}
    # Zones with equal terms are one problem: their windows go through it together.
    for one, places in alike.items():
        cut = [
            Window([each[place]], prices and [prices[place]])
            for place in places
            for each, prices in windows
        ]
        least = iter(least_of_each(one, cut))
        for place in places:
            found[place] = tuple(next(least) for _ in windows)
    return {zones[place]: found[place] for place in sorted(found)}


def _summary(name: str, outcomes: Sequence[RentOutcome], bound: Sequence[float]) -> PolicyReplay:
    """One policy's replays [windows] beside the least possible."""
    number = len(outcomes)
    dollars = tuple(outcome.dollars for outcome in outcomes)
    ratios = [
        paid / least if least > 0 else 1.0 for paid, least in zip(dollars, bound, strict=True)
    ]
    return PolicyReplay(
        policy=name,
        mean_dollars=sum(dollars) / number,
        mean_over_bound=sum(ratios) / number,
        missed_deadlines=sum(outcome.is_late for outcome in outcomes),
        mean_launches=sum(outcome.num_launches for outcome in outcomes) / number,
        mean_moves=sum(outcome.num_moves for outcome in outcomes) / number,
        dollars=dollars,
    )


def interval_of(job: RentJob, policy: RentPolicy, history: Sequence[Traces]) -> tuple[float, float]:
    """Between which dollars nine in ten further jobs should cost, if the future is like the past.

    The order statistics at 5 and 95 % of what the policy would have paid in windows of the history,
    and one more. Where the past has too few windows for one of them, it is what a job can cost at
    all: at the least or the highest prices of the past.
    """
    past = [replay(job, policy, *window).dollars for window in _past_windows(history, job)]
    low, high = (job.at(prices) for prices in zip(*_ranges(job, history), strict=True))
    # One more than the past on either side, as the next job may cost less or more than all of
    # them.
    ranked = [low.least_dollars, *sorted(past), high.most_dollars]
    last = len(ranked) - 1
    return ranked[floor(0.05 * last)], ranked[ceil(0.95 * last)]


def _ranges(job: RentJob, history: Sequence[Traces]) -> list[tuple[float, float]]:
    """[zones] the least and the highest price that is known."""
    told = [[price] for price in job.spot_dollars_per_hour]
    for one in history:
        for zone, prices in enumerate(one.spot_dollars_per_hour or ()):
            told[zone] += [price for price in prices if price is not None]
    return [(min(each), max(each)) for each in told]


def _past_windows(traces: Sequence[Traces], job: RentJob) -> list[Window]:
    """Windows of a history that are known throughout, an eighth of a window apart."""
    # Where there are more than 100, as many of them, evenly spread; 20 where prices move, as each
    # price has a program of its own.
    ticks = job.num_ticks
    moves = any(one.spot_dollars_per_hour is not None for one in traces)
    most = _MOST_PAST_MOVING if moves else _MOST_PAST
    found = [
        window
        for one in traces
        for first in range(0, len(one.ticks[0]) - ticks + 1, max(ticks // 8, 1))
        if (window := one.window(first, ticks, job.num_machines)) is not None
    ]
    # Evenly spread, from the first on.
    return found[:: -(-len(found) // most) or 1]


class Adviser:
    """Policies that are asked for one decision at a time."""

    def __init__(
        self,
        job: RentJob,
        zones: Sequence[str],
        *,
        history: Sequence[Traces] = (),
        policies: Sequence[str] | None = None,
        of_one_kind: bool = False,
    ) -> None:
        """Make the policies.

        Args:
            job: The job.
            zones: Names of its zones, in order.
            history: What ``dynamic_program`` learns from.
            policies: Names, of which the first decides; None for all, ``dynamic_program`` first
                where there is a history, else ``uniform_progress``.
            of_one_kind: Whether spot machines and on-demand ones cannot be held at once; where a
                policy wants both, all are on demand.

        Raises:
            ProblemError: The history is of other zones, or there is no policy of that name.
        """
        self._job, self._zones = job, tuple(zones)
        learned = [one.of_zones(zones, job.num_machines) for one in history]
        chain = chain_for(job, [one.ticks for one in learned]) if learned else None
        # The last name is the better policy, so it decides.
        names = policies or (known.NAMES if chain else tuple(known.PLAIN))[::-1]
        self.policies = {name: known.policy_of(name, job, chain) for name in names}
        if of_one_kind:
            self.policies = {name: _unmixed(each) for name, each in self.policies.items()}

    def __call__(self, state: RentState) -> RentAdvice:
        """Ask the first policy, and the others beside it.

        Raises:
            ProblemError: The state is of other zones, holds more than there is or than the job can
                use, or is at or after the deadline.
        """
        zones, job = self._zones, self._job
        now = _moment(job, zones, state)
        asked = {name: policy(job, now) for name, policy in self.policies.items()}
        choice, held = next(iter(asked.items()))
        # Ticks to spare, if the last resort were launched now.
        left = job.num_ticks - now.tick - job.ticks_for(now.work_left_seconds)
        spare = left * job.tick_seconds
        return RentAdvice(
            choice=choice,
            num_spot=held.num_spot,
            num_on_demand=held.num_on_demand,
            zone=zones[held.zone] if held.num_machines else None,
            is_change=held != now.held,
            dollars_per_hour=job.dollars_per_hour(held, now.spot_dollars_per_hour),
            spare_seconds=spare,
            decide_again_seconds=job.tick_seconds,
            reason=_reason(job, now, held, spare),
            others={
                name: held_text(*one[:2], zones[one.zone])
                for name, one in asked.items()
                if name != choice
            },
        )


def _unmixed(policy: RentPolicy) -> RentPolicy:
    def decide(job: RentJob, now: Moment) -> Held:
        held = policy(job, now)
        is_mixed = held.num_spot and held.num_on_demand
        return Held(0, held.num_machines, held.zone) if is_mixed else held

    return decide


def _moment(job: RentJob, zones: Sequence[str], state: RentState) -> Moment:
    seen = (*state.available, *state.spot_dollars_per_hour)
    for name in (*seen, *([state.zone] if state.zone else [])):
        if name not in zones:
            raise ProblemError(
                f"the state is of zone {name!r}; the offers are of {', '.join(zones)}",
                hint=did_you_mean(name, zones) or None,
            )
    there = tuple(min(state.available.get(name, 0), job.num_machines) for name in zones)
    place = None if state.zone is None else zones.index(state.zone)
    held = Held(state.num_spot, state.num_on_demand, place or 0)
    if held.num_machines and (place is None or held.num_machines > job.num_machines):
        raise ProblemError(
            f"the state holds {held.num_machines} machines in zone {state.zone}; the job can use "
            f"{job.num_machines}",
            hint="give the zone of what is held, and as many machines as the job can use",
        )
    tick = floor(state.elapsed_seconds / job.tick_seconds + 1e-9)
    if tick >= job.num_ticks:
        raise ProblemError(
            f"the state is {state.elapsed_seconds:g} s after the start, the deadline "
            f"{job.deadline_seconds:g} s",
            hint="ask while there is a tick left",
        )
    pending, lost = state.pending_seconds, held.num_spot > there[held.zone]
    if lost:
        # Spot machines that are gone are no longer held.
        held = held._replace(num_spot=there[held.zone])
        pending = job.restart_seconds
    return Moment(
        tick=tick,
        work_left_seconds=state.work_left_seconds,
        held=held,
        zone=place,
        pending_seconds=pending,
        available=there,
        run_lengths=tuple(
            1 + floor(state.unchanged_seconds.get(name, 0.0) / job.tick_seconds + 1e-9)
            for name in zones
        ),
        spot_dollars_per_hour=[
            state.spot_dollars_per_hour.get(name, price)
            for name, price in zip(zones, job.spot_dollars_per_hour, strict=True)
        ],
    )


def _reason(job: RentJob, now: Moment, held: Held, spare_seconds: float) -> str:
    line = job.work_seconds * (now.tick * job.tick_seconds / job.deadline_seconds)
    ahead = job.work_seconds - now.work_left_seconds - line
    rest = f"the work is {abs(ahead) / 3600:.3g} h {'ahead of' if ahead >= 0 else 'behind'} a "
    rest += "straight line to the deadline"
    if spare_seconds < job.tick_seconds:
        first = "there is no time left to wait for spot machines"
    elif held.num_on_demand:
        first = "waiting or spot machines alone would cost more later"
    elif held.num_spot:
        first = "spot machines are there"
    else:
        first = "no spot machine is there that is worth its restart, and there is time to wait"
    return f"{first}; {rest}"
