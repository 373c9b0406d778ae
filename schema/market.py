"""Spot markets: what machines cost, and when a zone had them.

Times are absolute and in UTC. What is unknown is None, never zero and never filled in.
"""

from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field

from .errors import ProblemError
from .records import Count, Dollars, Name, PositiveDollars, PositiveSeconds, record, register_keys

Share = Annotated[float, Field(ge=0, le=1)]


@record
class InstanceType:
    """A machine that can be rented: its devices, and its prices in dollars per hour."""

    name: Name
    device_type: Name
    num_devices: Count = 1
    region: Name | None = None
    on_demand_dollars_per_hour: PositiveDollars | None = None
    spot_dollars_per_hour: Dollars | None = None


@record
class Availability:
    """Whether spot machines could be had, tick by tick.

    ``available`` holds 1 (a machine could be had and was kept), 0 (none) or None (unknown).
    ``start`` is the UTC time of the first tick, as in 2022-10-26T00:00:00Z; None where the source
    does not say.
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
            _check_utc(self.start, self.zone)


@record
class Market:
    """Machines to rent, and what is known of when they could be had."""

    schema: Literal["hetflow.market/1"] = "hetflow.market/1"
    instance_types: tuple[InstanceType, ...] = ()
    availability: tuple[Availability, ...] = ()


@record
class PolicyReplay:
    """What a policy cost on each window, in the windows' order.

    ``dollars``: [windows]; ``missed_deadlines`` counts the windows that ended late.
    ``mean_over_bound`` is the mean over windows of its dollars by the least possible.
    """

    policy: Name
    mean_dollars: Dollars
    mean_over_bound: float
    missed_deadlines: Annotated[int, Field(ge=0)]
    mean_launches: Annotated[float, Field(ge=0)]
    dollars: tuple[Dollars, ...]


@record
class RentReport:
    """Policies for one job under a deadline, replayed on windows of spot availability.

    ``bound_dollars``: [windows], the least that any policy could have paid with the window known
    in advance. ``choice`` is the cheapest policy that missed no deadline. ``expected_dollars`` is
    what the dynamic program expects from the history alone.
    """

    schema: Literal["hetflow.rent/1"] = "hetflow.rent/1"
    work_seconds: PositiveSeconds
    deadline_seconds: PositiveSeconds
    restart_seconds: Annotated[float, Field(ge=0)]
    on_demand_dollars_per_hour: PositiveDollars
    spot_dollars_per_hour: Dollars
    windows: tuple[Name, ...]
    bound_dollars: tuple[Dollars, ...]
    policies: tuple[PolicyReplay, ...]
    choice: Name | None = None
    expected_dollars: Dollars | None = None


def _check_utc(text: str, zone: str) -> None:
    try:
        parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ProblemError(
            f"zone {zone!r}: start must be a time such as 2022-10-26T00:00:00Z, got {text[:60]!r}"
        ) from None
    if parsed.utcoffset() != timedelta(0):
        raise ProblemError(f"zone {zone!r}: start {text[:60]!r} is not in UTC; end it with Z")


register_keys(InstanceType, Availability, Market, PolicyReplay, RentReport)
