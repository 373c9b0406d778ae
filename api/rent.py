"""``hetflow.rent.deadline``."""

from collections.abc import Sequence
from pathlib import Path

from ..importers.availability import read_availability
from ..schema.errors import ProblemError
from ..schema.market import Availability, RentReport
from ..schema.records import PositiveSeconds, RentDollars, SpotDollars
from ..simulator.market.compare import compare
from ..solvers.market.deadline import DeadlineJob
from ..solvers.market.windows import fewest_parts, shorter_ticks
from .calls import checks

Windows = Sequence[Availability | Path | str]


@checks
def rent(
    windows: Windows,
    *,
    work_seconds: PositiveSeconds,
    deadline_seconds: PositiveSeconds,
    on_demand_dollars_per_hour: RentDollars,
    spot_dollars_per_hour: SpotDollars,
    restart_seconds: float = 300.0,
    history: Windows = (),
    policies: Sequence[str] | None = None,
) -> RentReport:
    """Compare policies for renting one machine for a job with a deadline: spot, on demand, or both.

    Policies are replayed on windows of availability. Their costs are compared with the least
    possible cost of each window, which needs to know the window in advance.

    Args:
        windows: Availability to replay on: records, files, or folders of files. One that is
            several deadlines long counts as so many windows.
        work_seconds: Duration of the job on a machine that is never preempted.
        deadline_seconds: Time from the start by which the job must be done.
        on_demand_dollars_per_hour: Price of an on-demand machine.
        spot_dollars_per_hour: Price of a spot machine.
        restart_seconds: Time from a launch until work continues from the last checkpoint.
        history: Availability from which ``dynamic_program`` learns how machines come and go. It
            should not contain any of ``windows``.
        policies: Out of ``on_demand``, ``greedy``, ``time_sliced``, ``uniform_progress`` and
            ``dynamic_program``; None takes all that can be used.

    Returns:
        The cost of each policy on each window, and the cheapest policy that missed no deadline.

    Raises:
        ProblemError: A number, a window or a policy's name cannot be used.
        InfeasibleError: The work cannot end in time on any machine.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import Availability
        >>> there = Availability(zone="a", tick_seconds=600, available=(1, 1, 0, 1, 1, 1))
        >>> report = hetflow.rent.deadline(
        ...     [there], work_seconds=1800, deadline_seconds=3600, restart_seconds=0,
        ...     on_demand_dollars_per_hour=3, spot_dollars_per_hour=1,
        ... )
        >>> report.choice, report.bound_dollars
        ('greedy', (0.5,))
    """
    read = _read(windows)
    if not read:
        raise ProblemError("there is no window of availability to replay on")
    # A job whose end falls between two looks at the market is in time all the same.
    parts = fewest_parts(read[0].tick_seconds, work_seconds + restart_seconds, deadline_seconds)
    read, learned = shorter_ticks(read, parts), shorter_ticks(_read(history), parts)
    job = DeadlineJob(
        work_seconds=work_seconds,
        deadline_seconds=deadline_seconds,
        restart_seconds=restart_seconds,
        tick_seconds=read[0].tick_seconds,
        on_demand_dollars_per_hour=on_demand_dollars_per_hour,
        spot_dollars_per_hour=(spot_dollars_per_hour,),
    )
    return compare(job, read, history=learned, policies=policies)


def _read(windows: Windows) -> list[Availability]:
    found: list[Availability] = []
    for window in windows:
        found += [window] if isinstance(window, Availability) else read_availability(Path(window))
    return found
