"""``hetflow rent zones`` from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..importers.availability import read_availability
from ..schema.errors import ProblemError
from ..schema.market import Availability, ZonesReport, utc_seconds
from ..schema.options import option
from ..schema.records import PositiveSeconds, RentDollars, SpotDollars
from ..schema.spelling import nearest
from ..simulator.market.compare import Traces, compare_zones, traces_of
from ..solvers.market.deadline import DeadlineJob
from ..solvers.market.windows import fewest_parts, shorter_ticks
from .calls import checks

Windows = Sequence[Availability | Path | str]


@checks
def rent_zones(
    windows: Windows,
    *,
    work_seconds: PositiveSeconds,
    deadline_seconds: PositiveSeconds,
    on_demand_dollars_per_hour: RentDollars,
    spot_dollars_per_hour: SpotDollars | Mapping[str, SpotDollars],
    restart_seconds: float = 300.0,
    move_dollars: float = 0.0,
    every_seconds: float | None = None,
    history: Windows = (),
    learn_until: str | None = None,
    policies: Sequence[str] | None = None,
) -> ZonesReport:
    """Compare policies for a job with a deadline that may rent its machine in any of several zones.

    The windows of each zone are joined by their times into one trace. Policies are replayed on
    windows of the traces that are as long as the deadline. Their costs are compared with the least
    possible cost, with all zones known in advance, and with that of staying in one zone.

    Args:
        windows: Availability that says when it begins: records, files, or folders of files.
        work_seconds: Duration of the job on a machine that is never preempted.
        deadline_seconds: Time from the start by which the job must be done.
        on_demand_dollars_per_hour: Price of an on-demand machine, in every zone.
        spot_dollars_per_hour: Price of a spot machine: of all zones, or by zone.
        restart_seconds: Time from a launch until work continues from the last checkpoint.
        move_dollars: Of a launch in another zone than the last one: the egress of the checkpoint.
        every_seconds: From the start of one window to that of the next; None: the deadline, so
            that windows do not overlap.
        history: Availability of the same zones from which ``dynamic_program`` learns. It should not
            contain any of ``windows``.
        learn_until: Else learn from the windows' ticks before this UTC time, and replay on those
            after it.
        policies: Out of ``on_demand``, ``greedy``, ``time_sliced``, ``uniform_progress`` and
            ``dynamic_program``; None takes all that can be used.

    Returns:
        The cost of each policy on each window, and the cheapest policy that missed no deadline.

    Raises:
        ProblemError: A number, a window, a zone or a policy's name cannot be used.
        InfeasibleError: The work cannot end in time on any machine.
        FileError: A file is missing or has faults.

    Example:
        >>> from hetflow.api.rent_zones import rent_zones
        >>> from hetflow.schema.market import Availability
        >>> zones = [
        ...     Availability(zone=name, start="2024-01-01T00:00:00Z", tick_seconds=600, available=a)
        ...     for name, a in (("a", (1, 1, 0, 0, 0, 0)), ("b", (0, 0, 1, 1, 0, 0)))
        ... ]
        >>> report = rent_zones(
        ...     zones, work_seconds=2400, deadline_seconds=3600, restart_seconds=0,
        ...     on_demand_dollars_per_hour=3, spot_dollars_per_hour=0.6,
        ... )
        >>> report.choice, [round(dollars, 4) for dollars in report.bound_dollars]
        ('greedy', [0.4])
    """
    read = _read(windows)
    parts = 1
    if read:  # a job whose end falls between two looks at the market is in time all the same
        needed = work_seconds + restart_seconds
        parts = fewest_parts(read[0].tick_seconds, needed, deadline_seconds)
    traces = traces_of(shorter_ticks(read, parts))
    learned: Traces | None = None
    if history:
        learned = traces_of(shorter_ticks(_read(history), parts))
    if learn_until is not None:
        if learned is not None:
            raise ProblemError(
                f"say what to learn from: give {option('history')} or "
                f"{option('learn_until')}, not both"
            )
        learned, traces = traces.split(utc_seconds(learn_until, option("learn_until"), "time"))
        if not learned.ticks[0] or not traces.ticks[0]:
            raise ProblemError(
                f"{option('learn_until', learn_until)} leaves nothing to "
                + ("replay on" if learned.ticks[0] else "learn from"),
                hint="name a time within the windows",
            )
    prices = _prices(spot_dollars_per_hour, traces.zones)
    job = DeadlineJob(
        work_seconds=work_seconds,
        deadline_seconds=deadline_seconds,
        restart_seconds=restart_seconds,
        tick_seconds=traces.tick_seconds,
        on_demand_dollars_per_hour=on_demand_dollars_per_hour,
        spot_dollars_per_hour=prices,
        move_dollars=move_dollars,
    )
    return compare_zones(
        job,
        traces,
        history=learned,
        policies=policies,
        every_seconds=every_seconds,
    )


def _prices(given: float | Mapping[str, float], zones: tuple[str, ...]) -> tuple[float, ...]:
    """The spot price of each zone."""
    if not isinstance(given, Mapping):
        return (given,) * len(zones)
    for name in given:
        if name not in zones:
            guess = nearest(name, zones)
            raise ProblemError(
                f"{option('spot_dollars_per_hour')} names zone {name!r}; the windows are of "
                f"{', '.join(zones)}",
                hint=f"did you mean {guess!r}?" if guess else None,
            )
    missing = [zone for zone in zones if zone not in given]
    if missing:
        raise ProblemError(
            f"there is no spot price of zone {missing[0]!r}",
            hint=f"add {option('spot_dollars_per_hour', f'{missing[0]}=DOLLARS')}, or give one "
            "price for all",
        )
    return tuple(given[zone] for zone in zones)


def _read(windows: Windows) -> list[Availability]:
    found: list[Availability] = []
    for window in windows:
        found += [window] if isinstance(window, Availability) else read_availability(Path(window))
    return found
