"""Quantiles over time, and correlations over what both sides know."""

import pytest

from hetflow.schema.market import Availability, PriceHistory
from hetflow.solvers.market.odds import availability_correlation, price_correlation

DAY = "2020-03-0{}T00:00:00Z".format


def history(
    *dollars: float | None, zone: str = "a", until: int = 9, first: int = 1
) -> PriceHistory:
    """A price a day, the last until the day ``until``."""
    return PriceHistory(
        cloud="aws", zone=zone, instance_type="m", dollars_per_hour=dollars,
        times=tuple(DAY(first + day) for day in range(len(dollars))), known_until=DAY(until),
    )  # fmt: skip


def test_quantiles_are_over_time() -> None:
    """1 $ for a day, 2 $ for a day, unknown for one, 3 $ for five."""
    told = history(1.0, 2.0, None, 3.0).quantiles((0.1, 0.2, 0.5, 1.0))
    assert told == [1.0, 2.0, 3.0, 3.0]
    assert history(None).quantiles((0.5,)) is None


def test_prices_go_together() -> None:
    up = history(1.0, 2.0, 3.0, until=4)
    assert price_correlation(up, history(2.0, 4.0, 6.0, until=4)) == pytest.approx(1.0)
    assert price_correlation(up, history(3.0, 2.0, 1.0, until=4)) == pytest.approx(-1.0)
    # Only the first two days count; then 5 $ for as long: no third day, no change.
    assert price_correlation(up, history(5.0, 5.0, None, until=4)) is None
    assert price_correlation(up, history(1.0, 5.0, None, until=4)) == pytest.approx(1.0)
    assert price_correlation(up, history(1.0, first=5, until=6)) is None
    # By time: 1, 1, 3 beside 1, 3, 3 is 1/2 (days alike), whatever the number of entries.
    one, other = history(1.0, 1.0, 3.0, until=4), history(1.0, 3.0, until=4)
    assert price_correlation(one, other) == pytest.approx(0.5)


def window(*ticks: int | None, start: str | None = DAY(1), tick: float = 3600.0) -> Availability:
    return Availability(zone="z", start=start, tick_seconds=tick, available=ticks)  # type: ignore[arg-type]


def test_zones_go_together() -> None:
    one = window(1, 0, 1, 0)
    assert availability_correlation(one, window(1, 0, 1, 0)) == pytest.approx(1.0)
    assert availability_correlation(one, window(0, 1, 0, 1)) == pytest.approx(-1.0)
    later = window(0, 1, 0, None, start="2020-03-01T01:00:00Z")
    assert availability_correlation(one, later) == pytest.approx(1.0)
    assert availability_correlation(later, one) == pytest.approx(1.0)
    for other in (window(1, 1, 1, 1), window(1, start=None), window(1, 0, tick=60.0),
                  window(1, 0, start="2021-03-01T00:00:00Z"),
                  window(0, 1, 0, start="2020-03-01T00:30:00Z")):  # fmt: skip
        assert availability_correlation(one, other) is None
