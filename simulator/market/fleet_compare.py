"""Policies for one elastic job under a deadline, replayed beside what it costs at least."""

from collections.abc import Sequence

from ...schema.errors import ProblemError
from ...schema.market import Capacity, FleetReport
from ...solvers.market.fleet import named, offline
from ...solvers.market.fleet.chain import transitions_of
from ...solvers.market.fleet.job import Fleet, FleetJob, FleetMoment
from ...solvers.market.fleet.policies.dynamic_program import DynamicProgram, ticks_a_decision
from ...solvers.market.windows import longer_ticks
from .fleet_replay import replay
from .summaries import choice_of, in_time, interval_of, past_windows, summary_of


class Stated:
    """Holds what a list [ticks] says, as far as it goes."""

    def __init__(self, holds: Sequence[Fleet]) -> None:
        self._holds = holds

    def choose(self, job: FleetJob, now: FleetMoment) -> Fleet:
        """The entry of this tick."""
        return self._holds[now.tick]


def windows_of(
    traces: Sequence[Capacity], num_ticks: int, every_ticks: int
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Cut traces into windows of equal length; a window has a name, and machines by tick.

    Args:
        traces: What to cut.
        num_ticks: Length of a window.
        every_ticks: From the start of one window to that of the next.

    Raises:
        ProblemError: A trace is too short, or unknown in a window.
    """
    found = []
    for trace in traces:
        counts = trace.num_machines
        if len(counts) < num_ticks:
            raise ProblemError(
                f"{trace.zone}: its {len(counts)} ticks end before the deadline",
                hint="give longer traces, or an earlier deadline",
            )
        for first in range(0, len(counts) - num_ticks + 1, every_ticks):
            window = counts[first : first + num_ticks]
            if None in window:
                raise ProblemError(
                    f"{trace.zone}: tick {first + window.index(None)} is unknown",
                    hint="a replay needs traces that are known throughout",
                )
            hours = first * trace.tick_seconds / 3600
            known = tuple(count for count in window if count is not None)
            found.append((f"{trace.zone} from {hours:g} h", known))
    return tuple(found)


def compare(
    job: FleetJob,
    traces: Sequence[Capacity],
    *,
    history: Sequence[Capacity] = (),
    policies: Sequence[str] | None = None,
    every_seconds: float | None = None,
) -> FleetReport:
    """Replay policies on windows of traces that are as long as the deadline.

    Args:
        job: The job; its tick is that of the traces.
        traces: What to replay on.
        history: What ``dynamic_program`` learns from. It should hold none of the traces.
        policies: Names; None for all, without those that need a history where there is none.
        every_seconds: From the start of one window of a trace to the next; None: the deadline.

    Raises:
        ProblemError: No traces, a trace that is too short or unknown somewhere, ticks of unlike
            lengths, or no policy of that name.
    """
    if not traces:
        raise ProblemError("there is no trace of capacity to replay on")
    for trace in (*traces, *history):
        if trace.tick_seconds != job.tick_seconds:
            raise ProblemError(
                f"{trace.zone}: ticks of {trace.tick_seconds:g} s, others have "
                f"{job.tick_seconds:g} s",
                hint="give traces of one tick length",
            )
    step = job.num_ticks if every_seconds is None else round(every_seconds / job.tick_seconds)
    if step < 1:
        raise ProblemError(
            f"every_seconds must be at least a tick of {job.tick_seconds:g} s, got {every_seconds}"
        )
    windows = windows_of(traces, job.num_ticks, step)
    shared = ticks_a_decision(job) if history else 1
    learned = [longer_ticks(trace.num_machines, shared) for trace in history]
    chain = transitions_of(learned, job.num_machines) if history else None
    bounds = [offline.solve(job, window) for _, window in windows]
    least = [known.bound_dollars for known in bounds]
    plans = [
        replay(job, Stated(known.holds), window)
        for known, (_, window) in zip(bounds, windows, strict=True)
    ]
    names = policies or named.POLICIES.tried(has_history=chain is not None)
    replays, expected, interval = [], None, None
    for name in dict.fromkeys(names):
        policy = named.policy_of(name, job, chain)
        if isinstance(policy, DynamicProgram):
            first = [policy.expected_dollars[min(window[0], job.num_machines)]
                     for _, window in windows]  # fmt: skip
            expected = sum(first) / len(first)
            past = past_windows([[one.num_machines] for one in history], job.num_ticks)
            interval = interval_of(
                [replay(job, policy, window).dollars for (window,) in past],
                least=job.least_dollars,
                most=job.most_dollars,
            )
        outcomes = [replay(job, policy, window) for _, window in windows]
        changes = [outcome.num_changes for outcome in outcomes]
        replays.append(summary_of(name, outcomes, changes, least))
    return FleetReport(
        work_seconds=job.work_seconds,
        speeds=job.speeds,
        deadline_seconds=job.deadline_seconds,
        resize_seconds=job.resize_seconds,
        on_demand_dollars_per_hour=job.on_demand_dollars_per_hour,
        spot_dollars_per_hour=job.spot_dollars_per_hour,
        windows=tuple(name for name, _ in windows),
        bound_dollars=tuple(least),
        plan_dollars=tuple(
            min([plan.dollars, *(entry.dollars[place] for entry in in_time(replays))])
            for place, plan in enumerate(plans)
        ),
        policies=tuple(replays),
        choice=choice_of(replays),
        expected_dollars=expected,
        expected_dollars_90=interval,
        decision_seconds=shared * job.tick_seconds if shared > 1 else None,
    )
