"""Price strategies: hand-made markets whose answer is known, and a bound that none is below."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.clusters.simulator.renting import compare_from, compare_strategies, strategy_replay
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.market import InstanceType, Market, PriceHistory, StrategyReplay, utc_text
from hetflow.solvers.market.job import RentJob
from hetflow.solvers.market.offers import (
    OfferHistory,
    Prices,
    bound,
    history_of,
    job_on,
    prices_of,
    strategies,
)

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


Asked = dict[str, Any]


def job(work: float, **others: Any) -> Asked:
    return {"work": work, "work_per_second": RATES, **others}


def on(one: Asked, prices: Prices | OfferHistory) -> RentJob:
    return job_on(prices.offers, **one)


def replay(one: Asked, name: str, prices: Prices) -> StrategyReplay:
    return strategy_replay(on(one, prices), strategies(prices)[name], prices)


def least_dollars(one: Asked, prices: Prices) -> float:
    return bound(on(one, prices), prices).dollars


def costs(one: Asked, prices: Prices) -> dict[str, float]:
    return {name: replay(one, name, prices).dollars for name in strategies(prices)}


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
    stays = replay(job(12.0), "multi_cloud", prices)
    assert stays.dollars == pytest.approx(7.2 + 9.0)
    moves = replay(job(12.0), "dynamic", prices)
    assert moves.dollars == pytest.approx(7.2 + 4 * 0.4)
    assert [offer.instance_type for offer in moves.held] == ["v1", "k1"]
    # Who knows the prices takes the V100 for an hour only: 4 units, then 1, then 7.
    assert least_dollars(job(12.0), prices) <= 3.6 + 2.0 + 7 * 0.4


def test_a_move_costs_its_restart_and_its_egress() -> None:
    prices = prices_of([market({
        ("aws", "v1"): [2.0] * 2 + [9.0] * 7, ("azure", "v1"): [3.0] * 9,
    })], RATES)  # fmt: skip
    one = job(16.0, restart_seconds=1800.0, cloud_move_dollars=0.25)
    outcome = replay(one, "dynamic", prices)
    # Half an hour of two is a restart; two and a half hours of work and half a restart are left.
    assert outcome.dollars == pytest.approx(2 * 2.0 + 0.25 + 3 * 3.0)
    assert outcome.num_moves == 1
    assert outcome.seconds == pytest.approx(5 * HOUR)
    dear = job(16.0, restart_seconds=1800.0, cloud_move_dollars=20.0)
    assert replay(dear, "dynamic", prices).num_moves == 0
    # Egress is what the cloud that is left takes.
    out = job(16.0, restart_seconds=1800.0, egress_dollars={"aws": 0.25, "azure": 99.0})
    assert replay(out, "dynamic", prices) == outcome
    kept = job(16.0, restart_seconds=1800.0, egress_dollars={"aws": 20.0})
    assert replay(kept, "dynamic", prices).num_moves == 0


def test_an_unknown_price_is_never_made_up() -> None:
    prices = prices_of([market({
        ("aws", "v1"): [1.0, None, 1.0, 1.0], ("azure", "v1"): [2.0] * 4,
    })], RATES)  # fmt: skip
    with pytest.raises(ProblemError, match="at 1970-01-01T01:00:00Z no price is known"):
        replay(job(8.0), "multi_cloud", prices)
    moved = replay(job(8.0), "dynamic", prices)
    assert moved.dollars == pytest.approx(3.0)
    with pytest.raises(ProblemError, match="the prices end before the job does"):
        replay(job(99.0), "dynamic", prices)
    with pytest.raises(ProblemError, match="cannot end before its prices do"):
        least_dollars(job(99.0), prices)


class Held:
    """Every way to hold offers, one an hour: what each costs."""

    def __init__(self, one: Asked, prices: Prices) -> None:
        self.one, self.prices = on(one, prices), prices

    def least(self) -> float:
        count = len(self.prices.offers)
        ways = product(range(count), repeat=len(self.prices.seconds))
        return min(self._dollars(way) for way in ways)

    def _dollars(self, way: tuple[int, ...]) -> float:
        left, pending, paid, before = self.one.work_seconds, 0.0, 0.0, -1
        for hour, (offer, length) in enumerate(zip(way, self.prices.seconds, strict=True)):
            if offer != before:
                pending = self.one.restart_seconds
                here, there = (self.prices.offers[i].cloud for i in (offer, before))
                if before >= 0 and here != there:
                    paid += self.one.move_dollars[before]
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
    for name in strategies(prices):
        try:
            paid = replay(one, name, prices).dollars
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
    prices, history = prices_of(markets, RATES).since(start), history_of(markets, RATES)
    whole = compare_strategies(on(one, prices), prices, **asked)
    part = compare_from(on(one, history), history, start, **asked)
    assert part.outcomes == whole.outcomes
    assert part.start_seconds == whole.start_seconds
    assert part.bound_dollars <= min(outcome.dollars for outcome in whole.outcomes.values()) + 1e-9
    assert part.bound_dollars > 0


def test_when_all_prices_are_known() -> None:
    late = market({("aws", "v1"): [None, None, 1.0, 1.0], ("aws", "k1"): [1.0, 1.0, 1.0, None]})
    assert history_of([late], RATES).all_known_seconds() == 2 * HOUR
    with pytest.raises(ProblemError, match="there are no prices at 1970-01-02"):
        history_of([late], RATES).between(24 * HOUR, 25 * HOUR)


def test_under_a_deadline_what_is_too_slow_is_left_alone() -> None:
    """Eight units: two hours of the V100, or eight of a K80 that costs a tenth."""
    market_ = market({("aws", "v1"): [2.0] * 9, ("aws", "k1"): [0.2] * 9})
    history, asked = history_of([market_], RATES), {"cloud": "aws", "device_type": "V100"}
    free = compare_from(on(job(8.0), history), history, 0.0, **asked)
    assert free.outcomes["dynamic"].dollars == pytest.approx(1.6)
    tight = on(job(8.0, deadline_seconds=7 * HOUR), history)
    found = compare_from(tight, history, 0.0, **asked)
    # An hour of the V100, after which the K80 does the other half in time.
    assert found.outcomes["dynamic"].dollars == pytest.approx(2.0 + 4 * 0.2)
    assert found.outcomes["dynamic"].seconds <= 7 * HOUR
    # Six and two thirds hours on the K80 and a third of one on the V100 would do.
    assert 1.6 < found.bound_dollars <= 20 / 3 * 0.2 + 2.0 / 3 + 1e-9
    late = on(job(8.0, deadline_seconds=1.9 * HOUR), history)
    with pytest.raises(InfeasibleError, match=r"cannot end within 1\.9 h"):
        compare_from(late, history, 0.0, **asked)


@given(data=st.data())
def test_no_strategy_that_moves_is_late_or_below_the_bound_of_its_deadline(data: Any) -> None:
    names = [("aws", "v1"), ("aws", "k1"), ("azure", "v1"), ("azure", "k8")]
    known = st.floats(0.05, 5.0)
    markets = [
        market({name: data.draw(st.lists(known, min_size=24, max_size=24)) for name in names})
    ]
    history = history_of(markets, RATES)
    work = data.draw(st.floats(1.0, 16.0))
    restart = data.draw(st.sampled_from([0.0, 300.0, 4000.0]))
    needed = work / RATES["V100"] + restart
    deadline = needed * data.draw(st.floats(1.0, 3.0))
    one = on(job(work, restart_seconds=restart, deadline_seconds=deadline), history)
    found = compare_from(one, history, 0.0, cloud="aws", device_type="V100")
    assert not found.refused
    for outcome in found.outcomes.values():
        assert outcome.seconds <= deadline * (1 + 1e-9)
        assert outcome.dollars >= found.bound_dollars * (1 - 1e-9)
