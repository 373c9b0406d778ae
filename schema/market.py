"""Spot markets: prices of machines, and when a zone had spot machines available.

Times are absolute, in UTC. An unknown value is None; it is never zero and never filled in.
"""

from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from .errors import ProblemError
from .options import option
from .records import (
    Count,
    Dollars,
    Fraction,
    Index,
    Name,
    NonNegative,
    PositiveDollars,
    PositiveRate,
    PositiveSeconds,
    Seconds,
    record,
)
from .spelling import nearest

Correlation = Annotated[float, Field(ge=-1 - 1e-9, le=1 + 1e-9)]


@record
class InstanceType:
    """A machine that can be rented: its devices, and its prices in dollars per hour (or None)."""

    name: Name
    device_type: Name
    num_devices: Count = 1
    region: Name | None = None
    on_demand_dollars_per_hour: PositiveDollars | None = None
    spot_dollars_per_hour: Dollars | None = None
    cloud: Name | None = None
    egress_dollars_per_gigabyte: Dollars | None = None


@record
class PriceHistory:
    """The price of a machine over time, in one zone or region of one cloud.

    ``times`` are in UTC, such as 2020-03-23T16:09:42Z, and strictly increasing. A price holds from
    its time to the next one, and the last price to ``known_until``. None is an interval with an
    unknown price. Before the first time, the price is unknown too.
    """

    cloud: Name
    region: Name | None = None
    zone: Name | None = None
    instance_type: Name
    times: tuple[Name, ...]
    dollars_per_hour: tuple[Dollars | None, ...]
    known_until: Name
    currency: Literal["USD"] = "USD"

    def __post_init__(self) -> None:
        if self.region is None and self.zone is None:
            raise ProblemError(f"prices of {self.instance_type!r}: give a zone or a region")
        if not self.times or len(self.times) != len(self.dollars_per_hour):
            raise ProblemError(
                f"{self.title}: {len(self.times)} times and {len(self.dollars_per_hour)} "
                "dollars_per_hour; give as many of each, and one at least"
            )
        starts = self.start_seconds()
        for before, after, text in zip(starts, starts[1:], self.times[1:], strict=False):
            if after <= before:
                raise ProblemError(
                    f"{self.title}: times must increase, but {text} comes too late",
                    hint="sort the times, each with its price",
                )
        if utc_seconds(self.known_until, self.title, "known_until") < starts[-1]:
            raise ProblemError(
                f"{self.title}: known_until {self.known_until} is before the last time "
                f"{self.times[-1]}"
            )

    @property
    def place(self) -> str:
        """The zone, or the region if no zone is stated."""
        return self.zone or self.region or ""

    @property
    def title(self) -> str:
        """Cloud, place and machine, for messages and figures."""
        return f"{self.cloud} {self.place} {self.instance_type}"

    def start_seconds(self) -> list[float]:
        """Each time as seconds since 1970-01-01T00:00:00Z."""
        return list(_start_seconds(self.times, self.title))

    def stretches(self) -> list[tuple[float, float, float | None]]:
        """Start and end (seconds since 1970) and dollars per hour of each interval, in order."""
        starts = self.start_seconds()
        ends = [*starts[1:], self.end_seconds()]
        return list(zip(starts, ends, self.dollars_per_hour, strict=True))

    def known(self) -> list[tuple[float, float]]:
        """Dollars per hour and for how many seconds, as far as they are known, from the least."""
        return sorted(
            (dollars, end - start)
            for start, end, dollars in self.stretches()
            if dollars is not None and end > start
        )

    def quantiles(self, parts: Sequence[float]) -> list[float] | None:
        """Dollars per hour below which the price was for each part of the known time.

        None where no price is known.
        """
        known = self.known()
        passed = list(accumulate(seconds for _, seconds in known))
        if not known:
            return None
        places = [bisect_left(passed, part * passed[-1]) for part in parts]
        return [known[min(place, len(known) - 1)][0] for place in places]

    def end_seconds(self) -> float:
        """``known_until`` as seconds since 1970-01-01T00:00:00Z."""
        return utc_seconds(self.known_until, self.title, "known_until")


@record
class Availability:
    """Whether spot machines were available, in ticks of equal length.

    ``available`` holds, per tick, 1 (a machine could be rented and was not preempted), 0 (none) or
    None (unknown). ``start`` is the UTC time of the first tick, such as 2022-10-26T00:00:00Z; None
    if the source does not state it.
    """

    zone: Name
    instance_type: Name | None = None
    start: Name | None = None
    tick_seconds: PositiveSeconds
    available: tuple[Literal[0, 1] | None, ...]

    def __post_init__(self) -> None:
        if not self.available:
            raise ProblemError(f"zone {self.zone!r}: available is empty; give at least one tick")
        if self.start is not None:
            utc_seconds(self.start, f"zone {self.zone!r}", "start")


@record
class Capacity:
    """How many spot machines one could hold at once, in ticks of equal length.

    ``num_machines`` holds, per tick, the least number that was held during it, or None (unknown).
    Machines that are lost and replaced within a tick do not show. ``start`` is the UTC time of the
    first tick; None if the source does not state it.
    """

    zone: Name
    instance_type: Name | None = None
    start: Name | None = None
    tick_seconds: PositiveSeconds
    num_machines: tuple[Index | None, ...]

    def __post_init__(self) -> None:
        if not self.num_machines:
            raise ProblemError(f"zone {self.zone!r}: num_machines is empty; give at least one tick")
        if self.start is not None:
            utc_seconds(self.start, f"zone {self.zone!r}", "start")


@record
class Market:
    """Machines to rent, their prices over time, and when they were available."""

    schema: Literal["hetflow.market/1"] = "hetflow.market/1"
    instance_types: tuple[InstanceType, ...] = ()
    availability: tuple[Availability, ...] = ()
    capacity: tuple[Capacity, ...] = ()
    prices: tuple[PriceHistory, ...] = ()

    def __post_init__(self) -> None:
        seen = set()
        for history in self.prices:
            if history.title in seen:
                raise ProblemError(f"{history.title}: has two histories of prices; keep one")
            seen.add(history.title)

    def instance_type_of(self, history: PriceHistory) -> InstanceType | None:
        """Return the instance type of a price history; None if the market does not describe it."""
        # An instance type without a cloud or a region matches all of them; one that names them
        # comes before it.
        name = history.instance_type
        found = [one for one in self.instance_types if one.name == name and _is_of(history, one)]
        named = [(one.cloud is not None) + (one.region is not None) for one in found]
        return found[named.index(max(named))] if found else None

    def has_history(self, machine: InstanceType) -> bool:
        """Whether a price history is of an instance type, whose fixed spot price then says nothing.

        The history also says when the price is unknown.
        """
        return any(_is_of(history, machine) for history in self.prices)

    def described(self, history: PriceHistory) -> InstanceType:
        """Return the instance type of a price history.

        Raises:
            ProblemError: The market does not describe it; the message names the nearest that it
                describes.
        """
        found = self.instance_type_of(history)
        if found is None:
            guess = nearest(history.instance_type, [one.name for one in self.instance_types])
            raise ProblemError(
                f"{history.title}: the market does not say what devices it has",
                hint=f"import the prices again with {option('instance_types', 'FILE')}"
                + (f"; the nearest that the market describes is {guess!r}" if guess else ""),
            )
        return found


def _is_of(history: PriceHistory, machine: InstanceType) -> bool:
    return (
        machine.name == history.instance_type
        and machine.cloud in (None, history.cloud)
        and machine.region in (None, history.region)
    )


@record
class PolicyReplay:
    """The cost of a policy on each window.

    ``dollars``: [windows], in order. ``missed_deadlines`` is the number of windows in which the job
    ended late. ``mean_over_bound`` is the mean over windows of dollars / least possible dollars. A
    launch is any change of the machines, also by loss; a move is one in another zone.
    """

    policy: Name
    mean_dollars: Dollars
    mean_over_bound: float
    missed_deadlines: Index
    mean_launches: NonNegative
    mean_moves: NonNegative = 0.0
    dollars: tuple[Dollars, ...]


@record
class RentReport:
    """Policies for one job with a deadline, replayed on windows of spot availability.

    ``speeds``: [machines + 1] speed on 0, 1, ... machines, relative to work of ``work_seconds``;
    ``machine_speeds``: how many times as fast those of each zone are, where they are not alike.
    ``spot_dollars_per_hour`` is by zone where there are several; the means of the offers' where
    prices move (``has_moving_prices``). ``unused_seconds`` of the
    availability given are in no window: less than a deadline at the ends, and ``num_left_out``
    windows with unknown ticks. ``bound_dollars``: [windows], the least that any policy could pay if
    it knew the window in advance; ``alone_dollars`` likewise for a job that stays in one zone.
    ``choice`` is the cheapest policy that missed no deadline. ``expected_dollars`` is the mean cost
    that the dynamic program expects from the history and the first tick of each window.
    ``expected_dollars_90``: between which nine in ten jobs should cost under it, by its replays on
    windows of the history; beyond these, what a job can cost at all.
    ``decision_seconds`` is how often that program decides, where this is less often than each tick.
    ``most_zones_to_learn`` is how many zones it can learn, where there are more and it was left
    out.
    """

    schema: Literal["hetflow.rent/1"] = "hetflow.rent/1"
    work_seconds: PositiveSeconds
    deadline_seconds: PositiveSeconds
    restart_seconds: Seconds
    move_dollars: Dollars = 0.0
    speeds: tuple[NonNegative, ...] = (0.0, 1.0)
    machine_speeds: dict[str, PositiveRate] = Field(default_factory=dict)
    on_demand_dollars_per_hour: PositiveDollars | dict[str, PositiveDollars]
    spot_dollars_per_hour: Dollars | dict[str, Dollars]
    has_moving_prices: bool = False
    windows: tuple[Name, ...]
    num_left_out: Index = 0
    unused_seconds: Seconds = 0.0
    bound_dollars: tuple[Dollars, ...]
    alone_dollars: dict[str, tuple[Dollars, ...]] = Field(default_factory=dict)
    policies: tuple[PolicyReplay, ...]
    choice: Name | None = None
    expected_dollars: Dollars | None = None
    expected_dollars_90: tuple[Dollars, Dollars] | None = None
    decision_seconds: PositiveSeconds | None = None
    most_zones_to_learn: Count | None = None


def held_text(num_spot: int, num_on_demand: int, zone: str | None) -> str:
    """What is held, in words: ``2 spot and 1 on demand in us-west-2a``."""
    kinds = ((num_spot, "spot"), (num_on_demand, "on demand"))
    words = " and ".join(f"{number} {kind}" for number, kind in kinds if number)
    return f"{words} in {zone}" if words else "nothing"


@record
class RentState:
    """What a running job holds, has still to do, and can rent now.

    ``elapsed_seconds`` since its start. ``zone`` is that of its last launch, None before the first.
    ``pending_seconds`` of its restart are still to come. ``available`` is how many spot machines
    each zone has; ``unchanged_seconds`` for how long that has been so, None: not for long.
    ``spot_dollars_per_hour`` by zone, where it is not what was asked for.
    """

    schema: Literal["hetflow.rent_state/1"] = "hetflow.rent_state/1"
    elapsed_seconds: Seconds
    work_left_seconds: PositiveSeconds
    num_spot: Index = 0
    num_on_demand: Index = 0
    zone: Name | None = None
    pending_seconds: Seconds = 0.0
    available: dict[str, Index]
    unchanged_seconds: dict[str, Seconds] = Field(default_factory=dict)
    spot_dollars_per_hour: dict[str, Dollars] = Field(default_factory=dict)


@record
class RentAdvice:
    """What a running job should hold now: the ``choice``'s machines in its zone.

    ``spare_seconds``: how long it could still do nothing and end in time, all on demand.
    ``others``: what other policies would hold, as text.
    """

    schema: Literal["hetflow.rent_advice/1"] = "hetflow.rent_advice/1"
    choice: Name
    num_spot: Index
    num_on_demand: Index
    zone: Name | None = None
    is_change: bool
    dollars_per_hour: Dollars
    spare_seconds: float
    decide_again_seconds: PositiveSeconds
    reason: str
    others: dict[str, str] = Field(default_factory=dict)


@record
class RentHeld:
    """What a job held from a time on, in seconds since its start, and why."""

    at_seconds: Seconds
    num_spot: Index = 0
    num_on_demand: Index = 0
    zone: Name | None = None
    dollars_per_hour: Dollars = 0.0
    why: str


@record
class RentRun:
    """A training on rented machines: what it cost, beside what was predicted.

    Seconds are those of the market; in a replay it runs ``time_scale`` times as fast as real time,
    from ``started_seconds`` on (since 1970 in UTC). Machines are paid to the second, in the
    prediction too. ``num_preemptions`` is how often a machine was taken away,
    ``num_steps_repeated`` what was done again after that, and ``checkpoint_every`` steps lay
    between checkpoints. ``longest_restart_seconds`` is what a launch took until its first step.
    ``parameters_digest`` is that of the trained parameters.
    """

    schema: Literal["hetflow.rent_run/1"] = "hetflow.rent_run/1"
    status: Literal["running", "done"]
    policy: Name
    work_seconds: PositiveSeconds
    deadline_seconds: PositiveSeconds
    restart_seconds: Seconds
    num_steps: Count
    checkpoint_every: Index
    time_scale: PositiveSeconds = 1.0
    started_seconds: Seconds
    seconds: Seconds = 0.0
    dollars: Dollars = 0.0
    num_launches: Index = 0
    num_moves: Index = 0
    num_preemptions: Index = 0
    num_steps_repeated: Index = 0
    longest_restart_seconds: Seconds = 0.0
    predicted_seconds: PositiveSeconds
    predicted_dollars: Dollars
    predicted_launches: Index
    parameters_digest: Name | None = None
    held: tuple[RentHeld, ...] = ()

    @property
    def is_late(self) -> bool:
        """Whether it ended, or is, after its deadline."""
        return self.seconds > self.deadline_seconds


@record
class HeldOffer:
    """A device of a rented machine, as a strategy on price histories held it.

    ``cloud`` and ``place`` are None where the market does not state them for a fixed price.
    """

    cloud: Name | None = None
    place: Name | None = None
    instance_type: Name
    device_type: Name
    num_devices: Count
    is_spot: bool = True

    @property
    def title(self) -> str:
        """Cloud, place and machine, and how it is rented where it is on demand."""
        kind = None if self.is_spot else "on-demand"
        return " ".join(filter(None, (self.cloud, self.place, self.instance_type, kind)))


@record
class StrategyReplay:
    """What a job cost under a strategy, how long it took, and what it held in turn."""

    dollars: Dollars
    seconds: PositiveSeconds
    held: tuple[HeldOffer, ...]

    @property
    def num_moves(self) -> int:
        """Launches after the first."""
        return len(self.held) - 1


@record
class PriceReport:
    """Strategies for one job, replayed on price histories from ``start`` (UTC) on.

    ``egress_dollars``: by cloud, of taking the checkpoint out of it, beside ``cloud_move_dollars``.
    ``outcomes``: by strategy, in order. ``refused`` says why one could not be replayed. No way to
    move costs less than ``bound_dollars``.
    """

    schema: Literal["hetflow.rent_prices/1"] = "hetflow.rent_prices/1"
    start: Name
    work_hours: PositiveSeconds
    rates: dict[str, PositiveDollars]
    restart_seconds: Seconds
    cloud_move_dollars: Dollars
    bound_dollars: Dollars
    outcomes: dict[str, StrategyReplay]
    refused: dict[str, str] = Field(default_factory=dict)
    egress_dollars: dict[str, Dollars] = Field(default_factory=dict)
    deadline_seconds: PositiveSeconds | None = None


@record
class PreemptionRate:
    """The rate of preemptions of machines older than an age (None: of all ages).

    ``mean_seconds`` is the time at risk divided by the preemptions. ``low_seconds`` and
    ``high_seconds`` are its 95 % confidence interval. Without preemptions, ``mean_seconds`` and
    ``high_seconds`` are None.
    """

    from_age_seconds: Seconds | None = None
    at_risk_seconds: PositiveSeconds
    num_preemptions: Index
    mean_seconds: PositiveSeconds | None = None
    low_seconds: Seconds
    high_seconds: PositiveSeconds | None = None


@record
class Survivors:
    """The fraction of machines that reach an age (Kaplan-Meier), with its 95 % interval."""

    age_seconds: Seconds
    part: Fraction
    low: Fraction
    high: Fraction


@record
class ZoneOdds:
    """How long spot machines last in a zone, or those of one instance type if it is named.

    ``num_lifetimes`` machines were observed from their start; the end of ``num_censored`` of these
    was not observed. ``mean_seconds`` is the mean of min(lifetime, ``horizon_seconds``), where
    ``horizon_seconds`` is the longest observation. ``median_seconds`` is None if fewer than half
    were preempted. The checkpoint intervals of Young and of Daly are None unless the time of a
    checkpoint is known and some machine was preempted.
    """

    zone: Name
    instance_type: Name | None = None
    num_windows: Count
    available_share: Fraction
    rate: PreemptionRate
    by_age: tuple[PreemptionRate, ...] = ()
    num_lifetimes: Index = 0
    num_censored: Index = 0
    horizon_seconds: Seconds | None = None
    median_seconds: Seconds | None = None
    mean_seconds: Seconds | None = None
    mean_low_seconds: Seconds | None = None
    mean_high_seconds: Seconds | None = None
    survivors: tuple[Survivors, ...] = ()
    young_seconds: PositiveSeconds | None = None
    daly_seconds: PositiveSeconds | None = None
    lost_share: NonNegative | None = None


@record
class PriceOdds:
    """Quantiles of a price over the time in which it is known, for the report's ``parts``."""

    cloud: Name
    place: Name
    instance_type: Name
    dollars_per_hour: tuple[Dollars, ...]


@record
class ZoneCorrelation:
    """Pearson's correlation of two zones' prices, or of their availability."""

    of: Literal["prices", "availability"]
    first: Name
    second: Name
    correlation: Correlation


@record
class OddsReport:
    """Estimates from windows of availability and price histories."""

    schema: Literal["hetflow.odds/1"] = "hetflow.odds/1"
    zones: tuple[ZoneOdds, ...] = ()
    parts: tuple[Fraction, ...] = ()
    prices: tuple[PriceOdds, ...] = ()
    together: tuple[ZoneCorrelation, ...] = ()
    checkpoint_seconds: PositiveSeconds | None = None


@lru_cache(maxsize=1024)  # parsed once for validation and once for use
def _start_seconds(times: tuple[str, ...], title: str) -> tuple[float, ...]:
    return tuple(utc_seconds(text, title, "times") for text in times)


def utc_seconds(text: str, owner: str, key: str) -> float:
    """Convert a UTC time to seconds since 1970-01-01T00:00:00Z.

    Args:
        text: The time, such as 2022-10-26T00:00:00Z.
        owner: What the time belongs to, for the error message.
        key: The key or flag that holds the time, for the error message.

    Raises:
        ProblemError: The text is not a time, or not in UTC.
    """
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ProblemError(
            f"{owner}: {key} must be a time such as 2022-10-26T00:00:00Z, got {text[:60]!r}"
        ) from None
    if parsed.tzinfo is not UTC and parsed.utcoffset() != timedelta(0):
        raise ProblemError(f"{owner}: {key} {text[:60]!r} is not in UTC; end it with Z")
    return parsed.timestamp()


def utc_text(seconds: float) -> str:
    """Convert seconds since 1970-01-01T00:00:00Z to a time such as 2022-10-26T00:00:00Z."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat()
    return text.replace("+00:00", "Z")


Markets = Market | Path | str | Sequence[Market | Path | str]
"""Markets, or their files."""
Windows = Sequence[Availability | Path | str]
"""Windows of availability, or their files and folders."""
Offers = Sequence[Availability | Capacity | PriceHistory | Path | str]
"""When spot machines were there, how many, and at what prices; or their files and folders."""
