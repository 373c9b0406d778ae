"""Machines for a training that stays on them: dollars a sample, the Pareto front, what is asked."""

from itertools import product

import pytest

from hetflow.planning.static_choice import StaticChoice, chosen, static_choices
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.market import InstanceType, Market
from hetflow.schema.profile import BatchPoint, Profile

V_SECONDS, K_SECONDS = 0.001, 0.003  # a sample


def profile(device_type: str, seconds: float) -> Profile:
    """Passes of any power of two, in proportion; nothing else takes time."""
    return Profile(
        model="m", device_type=device_type, device_memory_bytes=1 << 34, weight_bytes=1,
        update_seconds=0.0,
        batch_curve=tuple(
            BatchPoint(batch_size=2**n, step_seconds=seconds * 2**n, peak_memory_bytes=1)
            for n in range(10)
        ),
    )  # fmt: skip


PROFILES = (profile("V100", V_SECONDS), profile("K80", K_SECONDS))


def market(*machines: tuple[str, str, int, float, float | None]) -> Market:
    """Name, device, how many, dollars on demand and spot."""
    return Market(
        instance_types=tuple(
            InstanceType(name=name, device_type=device, num_devices=number,
                         on_demand_dollars_per_hour=dollars, spot_dollars_per_hour=spot)
            for name, device, number, dollars, spot in machines
        )
    )  # fmt: skip


def choices(place: Market, *, most: int = 2, steps: int = 1000) -> tuple[StaticChoice, ...]:
    return static_choices(PROFILES, [place], batch_size=512, steps=steps, most_devices=most)


def by_devices(found: tuple[StaticChoice, ...], *, is_spot: bool) -> dict[str, StaticChoice]:
    return {
        "+".join(f"{number}{name}" for name, number in one.devices.items()): one
        for one in found
        if one.is_spot == is_spot
    }


def test_dollars_a_sample_decide_and_not_dollars_an_hour() -> None:
    """A K80 costs half of a V100, and takes three times as long."""
    found = choices(market(("v", "V100", 1, 4.0, None), ("k", "K80", 1, 2.0, None)))
    each = by_devices(found, is_spot=False)
    assert each["1V100"].hours == pytest.approx(512 * V_SECONDS * 1000 / 3600)
    assert each["1V100"].dollars == pytest.approx(4.0 * each["1V100"].hours)
    assert each["1K80"].dollars == pytest.approx(2.0 * 3 * each["1V100"].hours)
    assert found[0].dollars == pytest.approx(each["1V100"].dollars)  # of two it is the same
    # 384 of 512 samples on the V100: as fast as the two are together.
    mixed = each["1V100+1K80"]
    assert mixed.step_seconds == pytest.approx(384 * V_SECONDS, rel=0.01)
    assert mixed.dollars == pytest.approx(6.0 * 0.75 * each["1V100"].hours, rel=0.01)
    assert mixed.dollars_per_million_samples == pytest.approx(mixed.dollars / 512e3 * 1e6)


def test_a_split_over_unlike_devices_is_taken_where_it_is_cheaper() -> None:
    """One K80 comes almost for nothing, and no second V100 fits the deadline's budget."""
    place = market(("v", "V100", 1, 4.0, None), ("k", "K80", 1, 0.4, None))
    found = choices(place, most=1)
    alone = by_devices(found, is_spot=False)["1V100"].hours
    assert chosen(found, deadline_hours=0.8 * alone).devices == {"V100": 1, "K80": 1}
    assert chosen(found).devices == {"K80": 1}
    assert chosen(found, deadline_hours=alone).devices == {"V100": 1, "K80": 1}


def test_machines_have_just_the_devices_for_the_fewest_dollars() -> None:
    place = market(("one", "V100", 1, 3.0, 1.0), ("four", "V100", 4, 10.0, 3.9),
                   ("two", "V100", 2, 5.0, None))  # fmt: skip
    found = choices(place, most=7)
    on_demand, spot = by_devices(found, is_spot=False), by_devices(found, is_spot=True)
    assert on_demand["4V100"].machines in ({"four on demand": 1}, {"two on demand": 2})
    assert on_demand["7V100"].dollars / on_demand["7V100"].hours == pytest.approx(18.0)
    assert spot["4V100"].machines == {"four spot": 1}
    assert spot["5V100"].machines == {"four spot": 1, "one spot": 1}


def test_the_front_is_what_no_other_choice_beats() -> None:
    place = market(("v", "V100", 1, 4.0, 1.5), ("k", "K80", 1, 1.5, 0.4))
    found = choices(place, most=3)
    for one, other in product(found, found):
        beats = other.hours < one.hours and other.dollars <= one.dollars
        assert not (one.is_pareto and beats)
    for one in found:
        if not one.is_pareto:
            assert any(o.hours <= one.hours and o.dollars <= one.dollars for o in found if o != one)
    assert [one.dollars for one in found] == sorted(one.dollars for one in found)


def test_what_cannot_be_met_says_what_can() -> None:
    found = choices(market(("v", "V100", 1, 4.0, None)), most=2)
    hours = {one.devices["V100"]: one.hours for one in found}
    with pytest.raises(InfeasibleError, match=r"no choice ends within 0.01 h; the soonest takes"):
        chosen(found, deadline_hours=0.01)
    with pytest.raises(InfeasibleError, match=r"no choice costs 0.01 \$ or less; the cheapest is"):
        chosen(found, budget_dollars=0.01)
    rich = chosen(found, budget_dollars=100.0)
    assert rich.devices == {"V100": 2}
    assert rich.hours == pytest.approx(hours[1] / 2)
    with pytest.raises(ProblemError, match="no machine with a price has one of V100, K80"):
        choices(market(("t", "T4", 1, 1.0, None)))
    with pytest.raises(ProblemError, match="must be >= 1"):
        choices(market(("v", "V100", 1, 4.0, None)), steps=0)
