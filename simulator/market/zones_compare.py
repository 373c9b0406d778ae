"""Policies for one job that may move between zones, replayed beside the least possible cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from ...schema.errors import ProblemError
from ...schema.market import Availability, ZonesReport, utc_text
from ...solvers.market import offline
from ...solvers.market.windows import joined, longer_ticks, start_seconds, whole_ticks
from ...solvers.market.zones import named
from ...solvers.market.zones.chain import MOST_ZONES, chain_of_zones
from ...solvers.market.zones.job import ZonesJob
from ...solvers.market.zones.offline import least_dollars
from ...solvers.market.zones.policies.dynamic_program import DynamicProgram, ticks_a_decision
from .summaries import choice_of, interval_of, past_windows, summary_of
from .zones_replay import replay

Ticks = tuple[int | None, ...]


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


def compare(
    job: ZonesJob,
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
    chain, is_too_many = None, len(traces.zones) > MOST_ZONES
    learned: list[Ticks] = []
    shared = 1
    if history is not None and not (is_too_many and policies is None):
        learned = [history.ticks[place] for place in _order(history, traces)]
        if not is_too_many:
            shared = ticks_a_decision(job)
        chain = chain_of_zones([[longer_ticks(zone, shared) for zone in learned]])
    bound = [least_dollars(job, window) for _, window in windows]
    names = policies or named.POLICIES.tried(has_history=chain is not None)
    replays, moves, expected, interval = [], {}, None, None
    for name in dict.fromkeys(names):
        policy = named.policy_of(name, job, chain)
        if isinstance(policy, DynamicProgram):
            first = [
                policy.expected(tuple(bool(zone[0]) for zone in window)) for _, window in windows
            ]
            expected = sum(first) / len(first)
            past = past_windows([learned], job.job.num_ticks)
            interval = interval_of(
                [replay(job, policy, window).dollars for window in past],
                least=job.least_dollars,
                most=job.most_dollars,
            )
        outcomes = [replay(job, policy, window) for _, window in windows]
        launches = [outcome.num_launches for outcome in outcomes]
        replays.append(summary_of(name, outcomes, launches, bound))
        moves[name] = sum(outcome.num_moves for outcome in outcomes) / len(outcomes)
    return ZonesReport(
        work_seconds=job.job.work_seconds,
        deadline_seconds=job.job.deadline_seconds,
        restart_seconds=job.job.restart_seconds,
        move_dollars=job.move_dollars,
        on_demand_dollars_per_hour=job.job.on_demand_dollars_per_hour,
        spot_dollars_per_hour=dict(zip(traces.zones, job.spot_dollars_per_hour, strict=True)),
        windows=tuple(name for name, _ in windows),
        num_left_out=num_left_out,
        bound_dollars=tuple(bound),
        alone_dollars={
            name: tuple(
                offline.least_dollars(job.alone(place), window[place]) for _, window in windows
            )
            for place, name in enumerate(traces.zones)
        },
        policies=tuple(replays),
        mean_moves=moves,
        choice=choice_of(replays),
        expected_dollars=expected,
        expected_dollars_90=interval,
        decision_seconds=shared * job.job.tick_seconds if shared > 1 else None,
        most_zones_to_learn=MOST_ZONES if history is not None and chain is None else None,
    )


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
    job: ZonesJob, traces: Traces, every_seconds: float | None
) -> tuple[list[tuple[str, tuple[tuple[int, ...], ...]]], int]:
    """Windows by name, [zones][ticks], and how many were left out."""
    length, tick_seconds = job.job.num_ticks, traces.tick_seconds
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
