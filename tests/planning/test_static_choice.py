"""Machines for a training that stays on them: dollars a sample, the Pareto front, what is asked."""

from itertools import product

import pytest

from hetflow.planning.static_choice import StaticChoice, chosen, measured_choices, static_choices
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.jobs import MixThroughput, ModelThroughput, Throughputs
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


def rates(number: int, apart: float | None = None, **steps_per_second: float) -> ModelThroughput:
    return ModelThroughput(
        model="m",
        scale_factor=number,
        steps_per_second=steps_per_second,
        unconsolidated_steps_per_second=None if apart is None else {"V100": apart},
    )


def test_throughputs_give_their_own_numbers_of_devices_and_mixes() -> None:
    """By hand: 3600 steps at 2, 3 and 0.5 steps/s take 0.5, 1/3 and 2 hours."""
    table = Throughputs(
        models=(rates(1, V100=2.0, K80=0.5, T4=0.0), rates(4, V100=9.0)),
        mixes=(MixThroughput(model="m", scale_factor=2, devices={"V100": 1, "K80": 1},
                             steps_per_second=3.0),),
    )  # fmt: skip
    place = market(("v", "v100", 1, 4.0, None), ("k", "K80", 2, 2.0, None), ("t", "T4", 1, 1, None),
                   ("k1", "K80", 1, 1.5, None))  # fmt: skip
    found = measured_choices(table, [place], steps=3600, most_devices=2)
    told = {tuple(one.devices.items()): (one.hours, one.dollars) for one in found}
    assert told == {
        (("V100", 1),): pytest.approx((0.5, 2.0)),
        (("K80", 1),): pytest.approx((2.0, 3.0)),
        (("V100", 1), ("K80", 1)): pytest.approx((1 / 3, 5.5 / 3)),
    }
    assert [one.is_pareto for one in found] == [True, False, False]
    assert {one.dollars_per_million_samples for one in found} == {None}
    sized = measured_choices(table, [place], steps=3600, batch_size=100)
    assert {one.devices["V100"] for one in sized if "V100" in one.devices} == {1, 4}
    for one in sized:
        assert one.dollars_per_million_samples == pytest.approx(one.dollars / 360e3 * 1e6)


def test_devices_on_several_machines_have_the_rate_of_unconsolidated_ones() -> None:
    place = market(("one", "V100", 1, 3.0, None), ("two", "V100", 2, 8.0, None))
    table = Throughputs(models=(rates(2, apart=1.0, V100=2.0),))
    found = measured_choices(table, [place], steps=3600)
    assert [(one.dollars, one.hours, one.machines) for one in found] == [
        (pytest.approx(4.0), 0.5, {"two on demand": 1}),
        (pytest.approx(6.0), 1.0, {"one on demand": 2}),
    ]
    never = Throughputs(models=(rates(2, apart=0.0, V100=2.0),))
    assert [one.hours for one in measured_choices(never, [place], steps=3600)] == [0.5]
    alike = Throughputs(models=(rates(2, V100=2.0),))
    (only,) = measured_choices(alike, [place], steps=3600)
    assert (only.hours, only.machines) == (0.5, {"one on demand": 2})


def test_throughputs_that_give_no_choice_say_why() -> None:
    place = market(("four", "V100", 4, 3.0, None))
    table = Throughputs(models=(rates(2, V100=2.0),))
    with pytest.raises(InfeasibleError, match=r"just the devices of a throughput \(2xV100\)"):
        measured_choices(table, [place], steps=1)
    with pytest.raises(ProblemError, match="no throughput is of the model 'n'"):
        measured_choices(table, [place], steps=1, model="n")
    with pytest.raises(ProblemError, match="no machine with a price has one of K80"):
        measured_choices(Throughputs(models=(rates(1, K80=1.0),)), [place], steps=1)
    with pytest.raises(ProblemError, match="2000 devices of a type: at most 1024 are priced"):
        measured_choices(Throughputs(models=(rates(2000, V100=1.0),)), [place], steps=1)
    two = Throughputs(models=(rates(1, V100=1.0), ModelThroughput(model="n", steps_per_second={})))
    with pytest.raises(ProblemError, match="of 2 models: m, n"):
        measured_choices(two, [place], steps=1)
    with pytest.raises(ProblemError, match="no machine with a price has one of"):
        measured_choices(two, [place], steps=1, model="n")
