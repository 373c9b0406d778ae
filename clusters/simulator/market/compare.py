"""Policies for one job under a deadline, replayed on the same windows beside the least possible."""

from collections.abc import Sequence
from contextlib import suppress
from math import ceil, floor

from ....schema.errors import InfeasibleError, ProblemError
from ....schema.market import PolicyReplay, RentReport
from ....solvers.market import policies as known
from ....solvers.market.chain import Chain, chain_of, most_zones
from ....solvers.market.dynamic_program import Programs, least_of_each, ticks_a_decision
from ....solvers.market.job import RentJob, RentPolicy
from ....solvers.market.windows import Traces, Window, longer_ticks, windows_of
from .replay import RentOutcome, replay

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
        expected = mean if mean <= job.most_dollars else None  # what is late costs more
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
        with suppress(InfeasibleError):
            alike.setdefault(job.alone(place), []).append(place)
    found = {}
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
    """Windows of a history that are known throughout, an eighth of a window apart.

    Where there are more than 100, as many of them, evenly spread; 20 where prices move, as each
    price has a program of its own.
    """
    ticks = job.num_ticks
    moves = any(one.spot_dollars_per_hour is not None for one in traces)
    most = _MOST_PAST_MOVING if moves else _MOST_PAST
    found = [
        window
        for one in traces
        for first in range(0, len(one.ticks[0]) - ticks + 1, max(ticks // 8, 1))
        if (window := one.window(first, ticks, job.num_machines)) is not None
    ]
    return found[:: -(-len(found) // most) or 1]
