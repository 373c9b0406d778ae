"""Price strategies: hand-made markets whose answer is known, and a bound that none is below."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.clusters.simulator.market.prices import compare, compare_from, replay
from hetflow.schema.errors import ProblemError
from hetflow.schema.market import InstanceType, Market, PriceHistory, utc_text
from hetflow.solvers.market.offers import MovingJob, Prices, history_of, prices_of
from hetflow.solvers.market.price_bound import least_dollars
from hetflow.solvers.market.price_strategies import strategies

HOUR = 3600.0
MACHINES = (
    InstanceType(name="v1", device_type="V100"),
    InstanceType(name="v8", device_type="V100", num_devices=8),
    InstanceType(name="k1", device_type="K80"),
    InstanceType(name="k8", device_type="K80", num_devices=8),
)
RATES = {"V100": 4.0 / HOUR, "K80": 1.0 / HOUR}


def market(hourly: dict[tuple[str, str], list[float | None]]) -> Market:
    """By cloud and machine, dollars by hour."""
    return Market(
        instance_types=MACHINES,
        prices=tuple(
            PriceHistory(
                cloud=cloud,
                region="here",
                instance_type=name,
                times=tuple(utc_text(HOUR * hour) for hour in range(len(dollars))),
                dollars_per_hour=tuple(dollars),
                known_until=utc_text(HOUR * len(dollars)),
            )
            for (cloud, name), dollars in hourly.items()
        ),
    )


def job(work: float, **others: Any) -> MovingJob:
    return MovingJob(work=work, work_per_second=RATES, **others)


def costs(one: MovingJob, prices: Prices) -> dict[str, float]:
    return {name: replay(one, entry, prices).dollars for name, entry in strategies().items()}


def test_each_strategy_finds_what_it_may_take() -> None:
    prices = prices_of([market({
        ("aws", "v1"): [8.0] * 9, ("aws", "k1"): [1.6] * 9, ("aws", "k8"): [8.0] * 9,
        ("azure", "v1"): [3.6] * 2 + [9.0] * 7, ("azure", "k1"): [2.0] * 2 + [0.4] * 7,
    })], RATES)  # fmt: skip
    found = costs(job(8.0), prices)
    # Two hours of V100 or eight of K80.
    assert found["one_device"] == pytest.approx(16.0)
    assert found["gpu_type"] == pytest.approx(8 * 1.6)
    assert found["multi_gpu"] == pytest.approx(8 * 1.0)
    assert found["multi_cloud"] == pytest.approx(7.2)
    stays = replay(job(12.0), strategies()["multi_cloud"], prices)
    assert stays.dollars == pytest.approx(7.2 + 9.0)
    moves = replay(job(12.0), strategies()["dynamic"], prices)
    assert moves.dollars == pytest.approx(7.2 + 4 * 0.4)
    assert [offer.instance_type for offer in moves.held] == ["v1", "k1"]
    # Who knows the prices takes the V100 for an hour only: 4 units, then 1, then 7.
    assert least_dollars(job(12.0), prices) <= 3.6 + 2.0 + 7 * 0.4


def test_a_move_costs_its_restart_and_its_egress() -> None:
    prices = prices_of([market({
        ("aws", "v1"): [2.0] * 2 + [9.0] * 7, ("azure", "v1"): [3.0] * 9,
    })], RATES)  # fmt: skip
    one = job(16.0, restart_seconds=1800.0, cloud_move_dollars=0.25)
    outcome = replay(one, strategies()["dynamic"], prices)
    # Half an hour of two is a restart; two and a half hours of work and half a restart are left.
    assert outcome.dollars == pytest.approx(2 * 2.0 + 0.25 + 3 * 3.0)
    assert outcome.num_moves == 1
    assert outcome.seconds == pytest.approx(5 * HOUR)
    dear = job(16.0, restart_seconds=1800.0, cloud_move_dollars=20.0)
    assert replay(dear, strategies()["dynamic"], prices).num_moves == 0
    # Egress is what the cloud that is left takes.
    out = job(16.0, restart_seconds=1800.0, egress_dollars={"aws": 0.25, "azure": 99.0})
    assert replay(out, strategies()["dynamic"], prices) == outcome
    kept = job(16.0, restart_seconds=1800.0, egress_dollars={"aws": 20.0})
    assert replay(kept, strategies()["dynamic"], prices).num_moves == 0


def test_an_unknown_price_is_never_made_up() -> None:
    prices = prices_of([market({
        ("aws", "v1"): [1.0, None, 1.0, 1.0], ("azure", "v1"): [2.0] * 4,
    })], RATES)  # fmt: skip
    with pytest.raises(ProblemError, match="at 1970-01-01T01:00:00Z no price is known"):
        replay(job(8.0), strategies()["multi_cloud"], prices)
    moved = replay(job(8.0), strategies()["dynamic"], prices)
    assert moved.dollars == pytest.approx(3.0)
    with pytest.raises(ProblemError, match="the prices end before the job does"):
        replay(job(99.0), strategies()["dynamic"], prices)
    with pytest.raises(ProblemError, match="cannot end before its prices do"):
        least_dollars(job(99.0), prices)


class Held:
    """Every way to hold offers, one an hour: what each costs."""

    def __init__(self, one: MovingJob, prices: Prices) -> None:
        self.one, self.prices = one, prices

    def least(self) -> float:
        count = len(self.prices.offers)
        ways = product(range(count), repeat=len(self.prices.seconds))
        return min(self._dollars(way) for way in ways)

    def _dollars(self, way: tuple[int, ...]) -> float:
        left, pending, paid, before = self.one.work, 0.0, 0.0, -1
        for hour, (offer, length) in enumerate(zip(way, self.prices.seconds, strict=True)):
            if offer != before:
                pending = self.one.restart_seconds
                here, there = (self.prices.offers[i].cloud for i in (offer, before))
                if before >= 0 and here != there:
                    paid += self.one.cloud_move_dollars + self.one.egress_dollars.get(there, 0.0)
            before = offer
            rate = RATES[self.prices.offers[offer].device_type]
            price = self.prices.dollars_per_second[hour, offer]
            if pending + left / rate <= length:
                return float(paid + price * (pending + left / rate))
            paid += price * length
            left -= max(length - pending, 0.0) * rate
            pending = max(pending - length, 0.0)
        return float("inf")


dollars = st.floats(0.0, 5.0, allow_subnormal=False)


@given(data=st.data())
def test_no_way_to_hold_offers_is_below_the_bound(data: Any) -> None:
    names = [("aws", "v1"), ("aws", "k8"), ("azure", "k1")]
    prices = prices_of(
        [market({name: data.draw(st.lists(dollars, min_size=5, max_size=5)) for name in names})],
        RATES,
    )
    one = job(
        data.draw(st.floats(0.5, 4.0)),
        restart_seconds=data.draw(st.sampled_from([0.0, 600.0, 3600.0, 5400.0])),
        cloud_move_dollars=data.draw(st.sampled_from([0.0, 0.5])),
        egress_dollars=data.draw(st.sampled_from([{}, {"aws": 0.3}, {"azure": 0.3}])),
    )
    least = Held(one, prices).least()
    if np.isfinite(least):
        assert least_dollars(one, prices) <= least * (1 + 1e-9) + 1e-9


@given(data=st.data())
def test_no_strategy_is_below_the_bound(data: Any) -> None:
    names = [("aws", "v1"), ("aws", "k1"), ("aws", "v8"), ("azure", "v1"), ("azure", "k8")]
    known = dollars.filter(lambda value: value > 0.01)
    prices = prices_of(
        [market({name: data.draw(st.lists(known, min_size=24, max_size=24)) for name in names})],
        RATES,
    )
    one = job(
        data.draw(st.floats(1.0, 16.0)),
        restart_seconds=data.draw(st.sampled_from([0.0, 300.0, 4000.0])),
        cloud_move_dollars=data.draw(st.sampled_from([0.0, 0.5])),
    )
    least = least_dollars(one, prices)
    for name, entry in strategies().items():
        try:
            paid = replay(one, entry, prices).dollars
        except ProblemError:
            continue  # it went on beyond the prices
        assert paid >= least * (1 - 1e-9), name


def test_with_devices_alike_and_free_moves_the_bound_is_the_optimum() -> None:
    generator = np.random.default_rng(3)
    table = {("aws", "v1"): generator.uniform(1, 3, 12).tolist(),
             ("azure", "v1"): generator.uniform(1, 3, 12).tolist()}  # fmt: skip
    prices = prices_of([market(table)], RATES)
    cheapest = [min(pair) for pair in zip(*table.values(), strict=True)]
    assert least_dollars(job(40.0), prices) == pytest.approx(sum(cheapest[:10]), rel=1e-9)
    assert costs(job(40.0), prices)["dynamic"] == pytest.approx(sum(cheapest[:10]))


@given(data=st.data())
def test_many_offers_taken_together_bound_what_each_costs(data: Any) -> None:
    """What is done beyond 64 offers is a bound on few."""
    names = [("aws", "v1"), ("aws", "v8"), ("azure", "v1")]
    prices = prices_of(
        [market({name: data.draw(st.lists(dollars, min_size=5, max_size=5)) for name in names})],
        RATES,
    )
    one = job(data.draw(st.floats(0.5, 8.0)), restart_seconds=1800.0, cloud_move_dollars=0.5)
    least = Held(one, prices).least()
    many = replace(prices, offers=prices.offers * 22, dollars_per_second=np.tile(
        prices.dollars_per_second, 22))  # fmt: skip
    if np.isfinite(least):
        assert least_dollars(one, many) <= least * (1 + 1e-9) + 1e-9


@given(data=st.data())
def test_a_part_of_the_history_says_what_all_of_it_says(data: Any) -> None:
    names = [("aws", "v1"), ("aws", "k1"), ("azure", "k8")]
    known = st.floats(0.2, 4.0)
    markets = [
        market({name: data.draw(st.lists(known, min_size=60, max_size=60)) for name in names})
    ]
    one = job(data.draw(st.floats(0.5, 12.0)), restart_seconds=300.0)
    start = HOUR * data.draw(st.integers(0, 5))
    asked = {"cloud": "aws", "device_type": "V100"}
    whole = compare(one, prices_of(markets, RATES).since(start), **asked)
    part = compare_from(one, history_of(markets, RATES), start, **asked)
    assert part.outcomes == whole.outcomes
    assert part.start == whole.start
    assert part.bound_dollars <= min(outcome.dollars for outcome in whole.outcomes.values()) + 1e-9
    assert part.bound_dollars > 0


def test_when_all_prices_are_known() -> None:
    late = market({("aws", "v1"): [None, None, 1.0, 1.0], ("aws", "k1"): [1.0, 1.0, 1.0, None]})
    table = prices_of([late], RATES)
    assert history_of([late], RATES).all_known_seconds() == table.all_known_seconds() == 2 * HOUR
    with pytest.raises(ProblemError, match="there are no prices at 1970-01-02"):
        history_of([late], RATES).between(24 * HOUR, 25 * HOUR)
