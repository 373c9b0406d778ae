"""A pool at the prices of markets: the cheapest way to have each device, at a time."""

from dataclasses import replace

import pytest

from hetflow.planning.market_prices import device_prices, market_offers, priced_pool
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import ProblemError
from hetflow.schema.market import InstanceType, Market, PriceHistory

DAY = "2020-03-0{}T00:00:00Z"


def history(name: str, zone: str, *dollars: float | None, until: int = 5) -> PriceHistory:
    return PriceHistory(
        cloud="aws",
        zone=zone,
        instance_type=name,
        times=tuple(DAY.format(day + 1) for day in range(len(dollars))),
        dollars_per_hour=dollars,
        known_until=DAY.format(until),
    )


def market(*histories: PriceHistory) -> Market:
    return Market(
        instance_types=(
            InstanceType(name="one", device_type="V100", on_demand_dollars_per_hour=3.0),
            InstanceType(name="four", device_type="V100", num_devices=4),
            InstanceType(name="old", device_type="K80", spot_dollars_per_hour=0.3),
        ),
        prices=histories,
    )


def test_the_cheapest_device_counts() -> None:
    asked = market(history("one", "a", 1.0, 2.0, 4.0), history("four", "b", 6.0, 3.2, 20.0))
    first = device_prices([asked], DAY.format(1))["V100"]
    assert (first.dollars_per_hour, first.title) == (1.0, "aws a one spot")
    second = device_prices([asked], DAY.format(2))["V100"]
    assert (second.dollars_per_hour, second.title) == (0.8, "aws b four spot")
    last = device_prices([asked])["V100"]
    assert (last.dollars_per_hour, last.title) == (3.0, "one on demand")
    assert device_prices([asked])["K80"].dollars_per_hour == 0.3


def test_what_is_unknown_is_no_price() -> None:
    gone = market(history("one", "a", 1.0, None), history("four", "b", 2.0, until=3))
    assert device_prices([gone], DAY.format(2))["V100"].dollars_per_hour == 0.5
    assert device_prices([gone], DAY.format(4))["V100"].title == "one on demand"
    assert device_prices([gone])["V100"].title == "one on demand"  # known until the 5th, as unknown
    for outside in ("2020-02-01T00:00:00Z", "2020-04-01T00:00:00Z"):
        with pytest.raises(ProblemError, match="the price histories of aws are known from"):
            device_prices([gone], outside)


def test_a_time_after_the_records_of_one_of_several_markets_is_refused() -> None:
    longer = market(replace(history("four", "b", 2.0, until=9), cloud="azure"))
    with pytest.raises(ProblemError, match="of aws are known from 2020-03-01.* to 2020-03-05"):
        device_prices([longer, market(history("one", "a", 1.0))], DAY.format(7))
    assert device_prices([longer], DAY.format(7))["V100"].dollars_per_hour == 0.5


def test_the_last_prices_are_of_one_time_at_which_all_of_the_last_day_are_known() -> None:
    """AWS reports changes: each machine's history ends with its own last one."""
    early = replace(history("four", "b", 2.0), known_until="2020-03-05T06:00:00Z")
    both = market(history("one", "a", 1.0, until=6), early, history("old", "a", 9.0, until=3))
    assert device_prices([both])["V100"].title == "aws b four spot"
    assert device_prices([both], DAY.format(6))["V100"].title == "aws a one spot"
    assert "K80" not in device_prices([both])


def test_a_fixed_spot_price_does_not_fill_in_for_a_history() -> None:
    asked = market(history("old", "a", 0.1, None))
    assert device_prices([asked], DAY.format(1))["K80"].dollars_per_hour == 0.1
    assert "K80" not in device_prices([asked], DAY.format(2))
    prices, _ = market_offers([asked], ["K80"], DAY.format(1))
    assert [offer.title for offer in prices.offers] == ["aws a old"]


def test_a_pool_takes_the_prices() -> None:
    pool, used = priced_pool(Cluster.parse("4xv100,2xK80"), [market(history("four", "b", 4.0))])
    assert {n: kind.dollars_per_hour for n, kind in pool.device_types.items()} == {
        "v100": 1.0,
        "K80": 0.3,
    }
    assert used["v100"].title == "aws b four spot"


def test_bad_questions() -> None:
    with pytest.raises(ProblemError, match="no price of 'V10'; did you mean 'V100'"):
        priced_pool(Cluster.parse("V10"), [market()])
    with pytest.raises(ProblemError, match="not in UTC"):
        priced_pool(Cluster.parse("V100"), [market()], "2020-03-01T00:00:00+01:00")
    with pytest.raises(ProblemError, match="no market"):
        priced_pool(Cluster.parse("V100"), None, DAY.format(1))
    bare = Market(prices=(history("one", "a", 1.0),))
    with pytest.raises(ProblemError, match="does not say what devices"):
        device_prices([bare])
    wrong = Market(instance_types=market().instance_types, prices=(history("fourr", "a", 1.0),))
    with pytest.raises(ProblemError) as refused:
        device_prices([wrong])
    assert "the nearest that the market describes is 'four'" in str(refused.value.hint)
