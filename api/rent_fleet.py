"""``hetflow rent fleet`` from Python."""

from collections.abc import Sequence
from pathlib import Path

from ..schema import files
from ..schema.errors import FileError, ProblemError
from ..schema.market import Capacity, FleetReport, Market
from ..schema.options import option
from ..schema.records import PositiveSeconds, RentDollars, SpotDollars
from ..simulator.market.fleet_compare import compare
from ..solvers.market.fleet.job import FleetJob
from ..solvers.market.windows import fewest_parts, shorter_ticks
from .calls import checks

Traces = Sequence[Capacity | Path | str]


@checks
def rent_fleet(
    traces: Traces,
    *,
    work_seconds: PositiveSeconds,
    deadline_seconds: PositiveSeconds,
    on_demand_dollars_per_hour: RentDollars,
    spot_dollars_per_hour: SpotDollars,
    num_machines: int | None = None,
    speeds: Sequence[float] | None = None,
    resize_seconds: float = 60.0,
    every_seconds: float | None = None,
    history: Traces = (),
    policies: Sequence[str] | None = None,
) -> FleetReport:
    """Compare policies for renting machines for an elastic job with a deadline.

    The job uses up to so many machines, spot and on demand. When spot machines are taken away it
    goes on with what is left. Policies are replayed on windows of the traces that are as long as
    the deadline, beside the least possible cost, which needs to know the window in advance.

    Args:
        traces: Capacity to replay on: records, or files with ``hetflow.market/1``.
        work_seconds: The work, in seconds of one machine (``speeds[1]`` = 1).
        deadline_seconds: Time from the start by which the job must be done.
        on_demand_dollars_per_hour: Price of an on-demand machine.
        spot_dollars_per_hour: Price of a spot machine.
        num_machines: The most that the job can use, if n machines are n times as fast as one.
        speeds: Else the speed on 0, 1, ... machines: 0 first, and never falling.
        resize_seconds: No work is done for so long whenever the machines change.
        every_seconds: From the start of one window of a trace to that of the next; None: the
            deadline, so that windows do not overlap.
        history: Capacity from which ``dynamic_program`` learns. It should hold none of ``traces``.
        policies: Out of ``on_demand``, ``greedy``, ``uniform_progress`` and ``dynamic_program``;
            None takes all that can be used.

    Returns:
        The cost of each policy on each window, and the cheapest policy that missed no deadline.

    Raises:
        ProblemError: A number, a trace or a policy's name cannot be used.
        InfeasibleError: The work cannot end in time on all machines on demand.
        FileError: A file is missing, has faults, or holds no capacity.

    Example:
        >>> from hetflow.api.rent_fleet import rent_fleet
        >>> from hetflow.schema.market import Capacity
        >>> there = Capacity(zone="a", tick_seconds=600, num_machines=(2, 2, 0, 2, 2, 2))
        >>> report = rent_fleet(
        ...     [there], work_seconds=4800, deadline_seconds=3600, resize_seconds=0,
        ...     num_machines=2, on_demand_dollars_per_hour=3, spot_dollars_per_hour=1.5,
        ... )
        >>> report.choice, round(report.bound_dollars[0], 6)
        ('greedy', 2.0)
    """
    read = _read(traces)
    if not read:
        raise ProblemError("there is no trace of capacity to replay on")
    each = _speeds(num_machines, speeds)
    parts, learned = 1, _read(history)
    if max(each, default=0.0) > 0:
        # A job whose end falls between two looks at the market is in time all the same.
        needed = work_seconds / max(each) + resize_seconds
        parts = fewest_parts(read[0].tick_seconds, needed, deadline_seconds)
    read, learned = shorter_ticks(read, parts), shorter_ticks(learned, parts)
    job = FleetJob(
        work_seconds=work_seconds,
        speeds=each,
        deadline_seconds=deadline_seconds,
        resize_seconds=resize_seconds,
        tick_seconds=read[0].tick_seconds,
        on_demand_dollars_per_hour=on_demand_dollars_per_hour,
        spot_dollars_per_hour=spot_dollars_per_hour,
    )
    return compare(job, read, history=learned, policies=policies, every_seconds=every_seconds)


def _speeds(num_machines: int | None, speeds: Sequence[float] | None) -> tuple[float, ...]:
    if (num_machines is None) == (speeds is None):
        raise ProblemError(
            f"say how fast the job is: give {option('num_machines')} or "
            f"{option('speeds')}, not both"
        )
    if speeds is not None:
        return tuple(speeds)
    if num_machines is None or not 1 <= num_machines <= 64:
        raise ProblemError(f"{option('num_machines')} must be 1 to 64, got {num_machines}")
    return tuple(map(float, range(num_machines + 1)))


def _read(traces: Traces) -> list[Capacity]:
    found: list[Capacity] = []
    for trace in traces:
        if isinstance(trace, Capacity):
            found.append(trace)
            continue
        market = files.read(Path(trace), Market)
        if not market.capacity:
            raise FileError(
                f"{trace}: $.capacity: holds no counts of spot machines",
                hint="import them in the format bamboo-trace or parcae-trace (hetflow import)",
            )
        found += market.capacity
    return found
