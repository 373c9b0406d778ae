"""A pool at the prices of markets: the cheapest way to have each device, at a time."""

import pytest

from hetflow.planning.market_prices import device_prices, priced_by, priced_pool
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
    before = device_prices([gone], "2020-02-01T00:00:00Z")
    assert before["V100"].title == "one on demand"


def test_a_pool_takes_the_prices() -> None:
    pool, used = priced_pool(Cluster.parse("4xv100,2xK80"), [market(history("four", "b", 4.0))])
    assert {n: kind.dollars_per_hour for n, kind in pool.device_types.items()} == {
        "V100": 1.0,
        "K80": 0.3,
    }
    assert used["V100"].title == "aws b four spot"


def test_bad_questions() -> None:
    with pytest.raises(ProblemError, match="no price of 'V10'; did you mean 'V100'"):
        priced_pool(Cluster.parse("V10"), [market()])
    with pytest.raises(ProblemError, match="not in UTC"):
        priced_pool(Cluster.parse("V100"), [market()], "2020-03-01T00:00:00+01:00")
    with pytest.raises(ProblemError, match="no market"):
        priced_by(Cluster.parse("V100"), None, DAY.format(1))
    bare = Market(prices=(history("one", "a", 1.0),))
    with pytest.raises(ProblemError, match="does not say what devices"):
        device_prices([bare])
    wrong = Market(instance_types=market().instance_types, prices=(history("fourr", "a", 1.0),))
    with pytest.raises(ProblemError) as refused:
        device_prices([wrong])
    assert "the nearest that the market describes is 'four'" in str(refused.value.hint)
