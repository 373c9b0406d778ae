"""Estimates from a market's past: lifetimes of spot machines, prices, correlations of zones."""

from typing import Annotated, Literal

from pydantic import Field

from .market import Share
from .records import Count, Dollars, Index, Name, PositiveSeconds, Seconds, record

Correlation = Annotated[float, Field(ge=-1 - 1e-9, le=1 + 1e-9)]


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
    part: Share
    low: Share
    high: Share


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
    parts: tuple[Share, ...] = ()
    prices: tuple[PriceOdds, ...] = ()
    together: tuple[ZoneCorrelation, ...] = ()
    checkpoint_seconds: PositiveSeconds | None = None
