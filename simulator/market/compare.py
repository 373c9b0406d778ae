"""Policies for one job under a deadline, replayed on the same windows beside the least possible."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from ...schema.errors import ProblemError
from ...schema.market import Availability, PolicyReplay, RentReport, ZonesReport, utc_text
from ...solvers.market import named
from ...solvers.market.chain import MOST_ZONES, chain_of
from ...solvers.market.deadline import DeadlineJob
from ...solvers.market.dynamic_program import DynamicProgram, ticks_a_decision
from ...solvers.market.offline import least_dollars
from ...solvers.market.windows import joined, longer_ticks, parts_of, start_seconds, whole_ticks
from .replay import replay
from .summaries import choice_of, interval_of, past_windows, summary_of

Ticks = tuple[int | None, ...]
Window = Sequence[Sequence[int]]
"""[zones][ticks] 1 there, 0 gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """What both reports say."""

    bound_dollars: tuple[float, ...]
    policies: tuple[PolicyReplay, ...]
    mean_moves: dict[str, float]
    expected_dollars: float | None
    expected_dollars_90: tuple[float, float] | None
    decision_seconds: float | None


def _compare(
    job: DeadlineJob,
    windows: Sequence[Window],
    learned: Sequence[Sequence[Ticks]],
    policies: Sequence[str] | None,
) -> _Compared:
    """Replay policies; ``learned`` [traces][zones][ticks] is empty where there is no history."""
    shared = ticks_a_decision(job) if learned and job.num_zones <= MOST_ZONES else 1
    chain = None
    if learned:
        chain = chain_of([[longer_ticks(zone, shared) for zone in zones] for zones in learned])
    bound = [least_dollars(job, window) for window in windows]
    names = policies or named.POLICIES.tried(has_history=chain is not None)
    replays, moves, expected, interval = [], {}, None, None
    for name in dict.fromkeys(names):
        policy = named.policy_of(name, job, chain)
        if isinstance(policy, DynamicProgram):
            first = [policy.expected(tuple(bool(zone[0]) for zone in each)) for each in windows]
            mean = sum(first) / len(first)
            expected = mean if mean <= job.most_dollars else None  # what is late costs more
            past = past_windows(learned, job.num_ticks)
            interval = interval_of(
                [replay(job, policy, window).dollars for window in past],
                least=job.least_dollars,
                most=job.most_dollars,
            )
        outcomes = [replay(job, policy, window) for window in windows]
        launches = [outcome.num_launches for outcome in outcomes]
        replays.append(summary_of(name, outcomes, launches, bound))
        moves[name] = sum(outcome.num_moves for outcome in outcomes) / len(outcomes)
    return _Compared(
        bound_dollars=tuple(bound),
        policies=tuple(replays),
        mean_moves=moves,
        expected_dollars=expected,
        expected_dollars_90=None if expected is None else interval,
        decision_seconds=shared * job.tick_seconds if shared > 1 else None,
    )


def compare(
    job: DeadlineJob,
    windows: Sequence[Availability],
    *,
    history: Sequence[Availability] = (),
    policies: Sequence[str] | None = None,
) -> RentReport:
    """Replay policies on windows of one zone.

    Args:
        job: The job; its tick is that of the windows.
        windows: What to replay on. Each is as long as the deadline, and known throughout; longer
            ones are cut into as many windows as they hold.
        history: What ``dynamic_program`` learns from. It should hold none of the windows.
        policies: Names; None for all, without those that need a history where there is none.

    Raises:
        ProblemError: No windows, a window that is too short or unknown somewhere, ticks of unlike
            lengths, or no policy of that name.
    """
    if not windows:
        raise ProblemError("there is no window of availability to replay on")
    _check_ticks(job, [*windows, *history])
    given = sum(len(window.available) for window in windows)
    windows = [part for window in windows for part in parts_of(window, job.num_ticks)]
    ticks = [[_known(window, job)] for window in windows]
    compared = _compare(job, ticks, [[one.available] for one in history], policies)
    return RentReport(
        work_seconds=job.work_seconds,
        deadline_seconds=job.deadline_seconds,
        restart_seconds=job.restart_seconds,
        on_demand_dollars_per_hour=job.on_demand_dollars_per_hour,
        spot_dollars_per_hour=job.spot_dollars_per_hour[0],
        windows=tuple(window.zone for window in windows),
        unused_seconds=(given - len(windows) * job.num_ticks) * job.tick_seconds,
        bound_dollars=compared.bound_dollars,
        policies=compared.policies,
        choice=choice_of(compared.policies),
        expected_dollars=compared.expected_dollars,
        expected_dollars_90=compared.expected_dollars_90,
        decision_seconds=compared.decision_seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Availability of zones over the time in which all have windows.

    ``ticks``: [zones][ticks]; the first tick begins at ``begin_seconds`` since 1970.
    """

    zones: tuple[str, ...]
    tick_seconds: float
    begin_seconds: float
    ticks: tuple[Ticks, ...]

    def split(self, seconds: float) -> tuple["Traces", "Traces"]:
        """The ticks that end by a time, and those that begin at it or later."""
        ticks = (seconds - self.begin_seconds) / self.tick_seconds
        ticks = min(max(ticks, 0.0), float(len(self.ticks[0])))
        before, after = floor(ticks), ceil(ticks)
        first = replace(self, ticks=tuple(zone[:before] for zone in self.ticks))
        begin = self.begin_seconds + after * self.tick_seconds
        last = tuple(zone[after:] for zone in self.ticks)
        return first, replace(self, begin_seconds=begin, ticks=last)


def traces_of(windows: Sequence[Availability]) -> Traces:
    """Join windows by zone, and cut them to the time that all zones have in common.

    Raises:
        ProblemError: There are no windows; one does not say when it begins; ticks differ in length
            or do not begin together; or the zones have no time in common.
    """
    if not windows:
        raise ProblemError("there is no window of availability to replay on")
    for window in windows:
        start_seconds(window)
        if window.tick_seconds != windows[0].tick_seconds:
            raise ProblemError(
                f"{window.zone}: ticks of {window.tick_seconds:g} s, others have "
                f"{windows[0].tick_seconds:g} s",
                hint="give windows of one tick length",
            )
    each = joined(windows)
    tick_seconds = each[0].tick_seconds
    begin = max(map(start_seconds, each))
    firsts = [whole_ticks(begin - start_seconds(one), tick_seconds, one.zone) for one in each]
    length = min(len(one.available) - first for one, first in zip(each, firsts, strict=True))
    names = tuple(f"{one.zone} {one.instance_type or ''}".strip() for one in each)
    if length < 1:
        raise ProblemError(
            f"zones {', '.join(names)} have no time in common",
            hint="give windows of the same time",
        )
    return Traces(
        zones=names,
        tick_seconds=tick_seconds,
        begin_seconds=begin,
        ticks=tuple(
            one.available[first : first + length] for one, first in zip(each, firsts, strict=True)
        ),
    )


def compare_zones(
    job: DeadlineJob,
    traces: Traces,
    *,
    history: Traces | None = None,
    policies: Sequence[str] | None = None,
    every_seconds: float | None = None,
) -> ZonesReport:
    """Replay policies on windows of the traces that are as long as the deadline.

    Args:
        job: The job; its tick is that of the traces, its spot prices are of their zones.
        traces: What to replay on. Windows in which a zone is unknown are left out.
        history: What ``dynamic_program`` learns from. It should hold none of the traces.
        policies: Names; None for all, without those that need a history where there is none.
        every_seconds: From the start of one window to that of the next; None: the deadline.

    Raises:
        ProblemError: No window is known in all zones, the history is of other zones, or no policy
            of that name; ``dynamic_program`` is asked for and there are too many zones for it.
    """
    windows, num_left_out = _windows(job, traces, every_seconds)
    learned: list[list[Ticks]] = []
    if history is not None and (policies is not None or len(traces.zones) <= MOST_ZONES):
        learned = [[history.ticks[place] for place in _order(history, traces)]]
    compared = _compare(job, [window for _, window in windows], learned, policies)
    return ZonesReport(
        work_seconds=job.work_seconds,
        deadline_seconds=job.deadline_seconds,
        restart_seconds=job.restart_seconds,
        move_dollars=job.move_dollars,
        on_demand_dollars_per_hour=job.on_demand_dollars_per_hour,
        spot_dollars_per_hour=dict(zip(traces.zones, job.spot_dollars_per_hour, strict=True)),
        windows=tuple(name for name, _ in windows),
        num_left_out=num_left_out,
        bound_dollars=compared.bound_dollars,
        alone_dollars={
            name: tuple(least_dollars(job.alone(place), [window[place]]) for _, window in windows)
            for place, name in enumerate(traces.zones)
        },
        policies=compared.policies,
        mean_moves=compared.mean_moves,
        choice=choice_of(compared.policies),
        expected_dollars=compared.expected_dollars,
        expected_dollars_90=compared.expected_dollars_90,
        decision_seconds=compared.decision_seconds,
        most_zones_to_learn=MOST_ZONES if history is not None and not learned else None,
    )


def _check_ticks(job: DeadlineJob, windows: Sequence[Availability]) -> None:
    for window in windows:
        if window.tick_seconds != job.tick_seconds:
            raise ProblemError(
                f"{window.zone}: ticks of {window.tick_seconds:g} s, others have "
                f"{job.tick_seconds:g} s",
                hint="give windows of one tick length",
            )


def _known(window: Availability, job: DeadlineJob) -> list[int]:
    """The ticks until the deadline."""
    ticks = window.available[: job.num_ticks]
    if len(ticks) < job.num_ticks:
        raise ProblemError(
            f"{window.zone}: its {len(ticks)} ticks end before the deadline",
            hint="give longer windows, or an earlier deadline",
        )
    known = [tick for tick in ticks if tick is not None]
    if len(known) < len(ticks):
        raise ProblemError(
            f"{window.zone}: tick {ticks.index(None)} is unknown",
            hint="a replay needs windows that are known until the deadline",
        )
    return list(known)


def _order(history: Traces, traces: Traces) -> list[int]:
    """The places of the traces' zones in the history."""
    if history.tick_seconds != traces.tick_seconds:
        raise ProblemError(
            f"the history has ticks of {history.tick_seconds:g} s, the windows have "
            f"{traces.tick_seconds:g} s",
            hint="give windows of one tick length",
        )
    missing = [name for name in traces.zones if name not in history.zones]
    if missing:
        raise ProblemError(
            f"the history says nothing of {', '.join(missing)}; it has {', '.join(history.zones)}",
            hint="give a history of the same zones",
        )
    return [history.zones.index(name) for name in traces.zones]


def _windows(
    job: DeadlineJob, traces: Traces, every_seconds: float | None
) -> tuple[list[tuple[str, tuple[tuple[int, ...], ...]]], int]:
    """Windows by name, [zones][ticks], and how many were left out."""
    length, tick_seconds = job.num_ticks, traces.tick_seconds
    step = length if every_seconds is None else round(every_seconds / tick_seconds)
    if step < 1:
        raise ProblemError(
            f"every_seconds must be at least a tick of {tick_seconds:g} s, got {every_seconds}"
        )
    span = len(traces.ticks[0])
    if span < length:
        raise ProblemError(
            f"the zones have {span} ticks in common, the deadline is after {length}",
            hint="give longer windows, or an earlier deadline",
        )
    found, left_out = [], 0
    for first in range(0, span - length + 1, step):
        cut = [zone[first : first + length] for zone in traces.ticks]
        known = tuple(tuple(tick for tick in zone if tick is not None) for zone in cut)
        if any(len(zone) < length for zone in known):
            left_out += 1
            continue
        found.append((utc_text(traces.begin_seconds + first * tick_seconds), known))
    if not found:
        raise ProblemError(
            f"in each of {left_out} windows there are ticks in which a zone is unknown",
            hint="give windows that are known until the deadline, or an earlier deadline",
        )
    return found, left_out
