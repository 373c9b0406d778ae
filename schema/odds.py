"""What a market's past tells: how long machines last, prices, how zones go together."""

from typing import Annotated, Literal

from pydantic import Field

from .market import Share
from .records import Count, Dollars, Index, Name, PositiveSeconds, Seconds, record, register_keys

Correlation = Annotated[float, Field(ge=-1 - 1e-9, le=1 + 1e-9)]


@record
class PreemptionRate:
    """Preemptions over the time at risk, from an age on (None: all ages).

    ``mean_seconds`` is None where nothing was preempted, ``high_seconds`` likewise; ``low_seconds``
    and ``high_seconds`` are a 95 % interval of the mean.
    """

    from_age_seconds: Seconds | None = None
    at_risk_seconds: PositiveSeconds
    num_preemptions: Index
    mean_seconds: PositiveSeconds | None = None
    low_seconds: Seconds
    high_seconds: PositiveSeconds | None = None


@record
class Survivors:
    """The part of machines that get so old, by Kaplan-Meier, with a 95 % interval."""

    age_seconds: Seconds
    part: Share
    low: Share
    high: Share


@record
class ZoneOdds:
    """How long spot machines last in a zone, of a type where one is named.

    ``num_lifetimes`` were seen from their beginning, ``num_censored`` of these not to their end.
    ``mean_seconds`` is the mean of the lifetime or of ``horizon_seconds``, the longest seen, where
    that is shorter; ``median_seconds`` None where fewer than half were preempted. The intervals of
    checkpoints, Young's and Daly's, need a checkpoint's time, and a preemption.
    """

    zone: Name
    instance_type: Name | None = None
    num_windows: Count
    available_share: Share
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
    lost_share: Annotated[float, Field(ge=0)] | None = None


@record
class PriceOdds:
    """Quantiles of a price over the time in which it is known, as ``parts`` of the report."""

    cloud: Name
    place: Name
    instance_type: Name
    dollars_per_hour: tuple[Dollars, ...]


@record
class Together:
    """How two zones go together: Pearson's correlation of prices, or of availability."""

    of: Literal["prices", "availability"]
    first: Name
    second: Name
    correlation: Correlation


@record
class OddsReport:
    """Estimates from windows of availability and histories of prices."""

    schema: Literal["hetflow.odds/1"] = "hetflow.odds/1"
    zones: tuple[ZoneOdds, ...] = ()
    parts: tuple[Share, ...] = ()
    prices: tuple[PriceOdds, ...] = ()
    together: tuple[Together, ...] = ()
    checkpoint_seconds: PositiveSeconds | None = None


register_keys(PreemptionRate, Survivors, ZoneOdds, PriceOdds, Together, OddsReport)
