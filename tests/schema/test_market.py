"""Price histories: parallel lists of times and dollars, and what is refused."""

from typing import Any

import pytest

from hetflow.schema.errors import ProblemError
from hetflow.schema.files import from_json, to_json
from hetflow.schema.market import InstanceType, Market, PriceHistory

FIRST, SECOND = "2020-03-01T00:00:00Z", "2020-03-01T12:00:00Z"


def history(**others: Any) -> PriceHistory:
    values: dict[str, Any] = {
        "cloud": "aws",
        "zone": "us-east-1a",
        "instance_type": "p2.xlarge",
        "times": (FIRST, SECOND),
        "dollars_per_hour": (0.9, None),
        "known_until": "2020-03-02T00:00:00Z",
    }
    return PriceHistory(**{**values, **others})


def test_a_market_with_prices_survives_its_file() -> None:
    machine = InstanceType(
        name="p2.xlarge", device_type="K80", cloud="aws", egress_dollars_per_gigabyte=0.09
    )
    market = Market(instance_types=(machine,), prices=(history(),))
    assert from_json(to_json(market), Market) == market
    assert market.instance_type_of(market.prices[0]) == machine
    assert market.instance_type_of(history(cloud="azure")) is None
    assert history().stretches() == [
        (1583020800.0, 1583064000.0, 0.9),
        (1583064000.0, 1583107200.0, None),
    ]


def test_a_machine_of_the_region_comes_before_one_of_any() -> None:
    anywhere = InstanceType(name="p2.xlarge", device_type="K80", on_demand_dollars_per_hour=1.0)
    there = InstanceType(name="p2.xlarge", device_type="K80", cloud="aws", region="eu")
    market = Market(instance_types=(anywhere, there), prices=(history(region="us"),))
    assert market.instance_type_of(history(region="eu")) == there
    assert market.instance_type_of(history(region="us")) == anywhere
    assert market.has_history(anywhere)
    assert not market.has_history(there)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"dollars_per_hour": (0.9, -0.1)}, r"dollars_per_hour\[1\]: must be >= 0"),
        ({"dollars_per_hour": (0.9, float("nan"))}, r"dollars_per_hour\[1\]: must be finite"),
        ({"dollars_per_hour": (0.9,)}, "2 times and 1 dollars_per_hour"),
        ({"times": (SECOND, FIRST)}, f"times must increase, but {FIRST} comes too late"),
        ({"times": (FIRST, FIRST)}, "times must increase"),
        ({"times": (FIRST, "2020-03-01T12:00:00")}, "is not in UTC; end it with Z"),
        ({"times": (FIRST, "2020-03-01T12:00:00+01:00")}, "is not in UTC"),
        ({"times": (FIRST, "noon")}, "times must be a time such as"),
        ({"known_until": FIRST}, "known_until .* is before the last time"),
        ({"currency": "EUR"}, r"currency: must be 'USD', got 'EUR'"),
        ({"zone": None}, "give a zone or a region"),
    ],
)
def test_what_is_wrong_is_said(others: dict[str, Any], said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        history(**others)


def test_a_machine_has_one_history_a_place() -> None:
    with pytest.raises(ProblemError, match="aws us-east-1a p2.xlarge: has two histories"):
        Market(prices=(history(), history()))
