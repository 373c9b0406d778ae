"""Policies for one job under a deadline, replayed on the same windows beside the least possible."""

from collections.abc import Sequence
from math import isfinite

from ...schema.errors import ProblemError
from ...schema.market import Availability, RentReport
from ...solvers.market import named
from ...solvers.market.chain import chain_of
from ...solvers.market.deadline import DeadlineJob
from ...solvers.market.offline import least_dollars
from ...solvers.market.policies.dynamic_program import DynamicProgram, ticks_a_decision
from ...solvers.market.windows import longer_ticks, parts_of
from .replay import replay
from .summaries import choice_of, interval_of, past_windows, summary_of


def compare(
    job: DeadlineJob,
    windows: Sequence[Availability],
    *,
    history: Sequence[Availability] = (),
    policies: Sequence[str] | None = None,
) -> RentReport:
    """Replay policies on windows.

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
    ticks = [_known(window, job) for window in windows]
    shared = ticks_a_decision(job) if history else 1
    chain = chain_of(longer_ticks(one.available, shared) for one in history) if history else None
    names = policies or named.POLICIES.tried(has_history=chain is not None)
    bound = [least_dollars(job, window) for window in ticks]
    replays, expected, interval = [], None, None
    for name in dict.fromkeys(names):
        policy = named.policy_of(name, job, chain)
        if isinstance(policy, DynamicProgram):
            first = [policy.expected(bool(window[0])) for window in ticks]
            expected = sum(first) / len(first) if all(map(isfinite, first)) else None
            past = past_windows([[one.available] for one in history], job.num_ticks)
            interval = interval_of(
                [replay(job, policy, window).dollars for (window,) in past],
                least=job.least_dollars,
                most=job.most_dollars,
            )
        outcomes = [replay(job, policy, window) for window in ticks]
        launches = [outcome.num_launches for outcome in outcomes]
        replays.append(summary_of(name, outcomes, launches, bound))
    return RentReport(
        work_seconds=job.work_seconds,
        deadline_seconds=job.deadline_seconds,
        restart_seconds=job.restart_seconds,
        on_demand_dollars_per_hour=job.on_demand_dollars_per_hour,
        spot_dollars_per_hour=job.spot_dollars_per_hour,
        windows=tuple(window.zone for window in windows),
        unused_seconds=(given - len(windows) * job.num_ticks) * job.tick_seconds,
        bound_dollars=tuple(bound),
        policies=tuple(replays),
        choice=choice_of(replays),
        expected_dollars=expected,
        expected_dollars_90=None if expected is None else interval,
        decision_seconds=shared * job.tick_seconds if shared > 1 else None,
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
