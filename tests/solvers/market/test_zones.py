"""A job that may move between zones: every policy against the least, that against all ways."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.api.rent import zones as rent_zones
from hetflow.clusters.simulator.renting import compare, replay
from hetflow.formats.importers.availability import read_availability
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.market import Availability
from hetflow.solvers.market import dynamic_program
from hetflow.solvers.market.chain import chain_of
from hetflow.solvers.market.dynamic_program import least_dollars
from hetflow.solvers.market.job import Held, RentJob, RentPolicy
from hetflow.solvers.market.policies import NAMES, policy_of
from hetflow.solvers.market.windows import joined, traces_of
from hetflow.tests.data import reference
from hetflow.tests.profiles import examples

START = "2024-01-01T00:00:00Z"


def job(
    *,
    work: float = 2.0,
    deadline: float = 5.0,
    restart: float = 0.5,
    spot: tuple[float, ...] = (1.0, 1.0),
    move: float = 0.0,
    on_demand: float = 3.0,
) -> RentJob:
    """Numbers in ticks of an hour."""
    return RentJob(
        work_seconds=work * 3600,
        deadline_seconds=deadline * 3600,
        restart_seconds=restart * 3600,
        tick_seconds=3600.0,
        on_demand_dollars_per_hour=on_demand,
        spot_dollars_per_hour=spot,
        move_dollars=move,
    )


def stated(holds: Sequence[Held]) -> RentPolicy:
    """Hold what a list says."""
    return lambda job, now: holds[now.tick]


JOBS = st.builds(
    job,
    work=st.sampled_from([1.0, 1.5, 2.0]),
    deadline=st.just(4.0),
    restart=st.sampled_from([0.0, 0.5, 1.25]),
    spot=st.sampled_from([(1.0, 1.0), (0.5, 1.0), (1.0, 0.5)]),
    move=st.sampled_from([0.0, 0.25, 2.0]),
)
ZONE = st.lists(st.sampled_from([0, 1]), min_size=4, max_size=4)
WINDOWS = st.tuples(ZONE, ZONE)
PRICES = st.tuples(*2 * (st.lists(st.sampled_from([0.25, 1.0, 2.5, 4.0]), min_size=4, max_size=4),))
OFFERS = (Held(0, 0), *(Held(*each, zone) for each in ((1, 0), (0, 1)) for zone in (0, 1)))


def exhaustive(
    one: RentJob,
    windows: Sequence[Sequence[int]],
    prices: Sequence[Sequence[float]] | None = None,
) -> float:
    """The least dollars over every way to hold machines anywhere."""
    best = float("inf")
    offers = [
        [held for held in OFFERS if held.num_spot <= windows[held.zone][tick]]
        for tick in range(one.num_ticks)
    ]
    for holds in product(*offers):
        outcome = replay(one, stated(holds), windows, prices)
        if not outcome.is_late:
            best = min(best, outcome.dollars)
    return best


@settings(max_examples=examples(40))
@given(one=JOBS, windows=WINDOWS, prices=st.none() | PRICES)
def test_the_least_is_that_over_every_way(
    one: RentJob, windows: tuple, prices: tuple | None
) -> None:
    least = least_dollars(one, windows, prices)
    assert least == pytest.approx(exhaustive(one, windows, prices), rel=1e-5)


def test_each_tick_costs_what_it_costs_then() -> None:
    """Two hours of work in three, where the second is dear: by hand."""
    one, windows = job(work=2.0, deadline=3.0, restart=0.0), ([1, 1, 1], [0, 0, 0])
    prices = ([1.0, 2.5, 0.25], [9.0, 9.0, 9.0])
    spot = [Held(1, 0), Held(0, 0), Held(1, 0)]
    assert replay(one, stated(spot), windows, prices).dollars == pytest.approx(1.25)
    assert least_dollars(one, windows, prices) == pytest.approx(1.25)
    assert replay(one, policy_of("greedy", one, None), windows, prices).dollars == pytest.approx(
        3.5
    )


def test_prices_that_stay_are_one_price() -> None:
    one, windows = job(spot=(1.0, 2.0)), ([1, 0, 1, 1, 0], [0, 1, 1, 0, 1])
    still = ([1.0] * 5, [2.0] * 5)
    for name in NAMES:
        policy = policy_of(name, one, chain_of([windows]))
        assert replay(one, policy, windows, still) == replay(one, policy, windows)
    assert least_dollars(one, windows, still) == least_dollars(one, windows)


def test_the_program_is_of_the_prices_of_now() -> None:
    """A spot machine dearer than one on demand is left alone, whatever it cost before."""
    one = job(work=2.0, deadline=4.0, restart=0.0, spot=(1.0,), on_demand=3.0)
    policy = policy_of("dynamic_program", one, chain_of([[[1] * 50]]))
    outcome = replay(one, policy, [[1, 1, 1, 1]], [[4.0, 4.0, 1.0, 1.0]])
    assert outcome.dollars == pytest.approx(2.0)
    dear = replay(one, policy, [[1, 1, 1, 1]], [[4.0, 4.0, 4.0, 4.0]])
    assert dear.dollars == pytest.approx(6.0)


@settings(max_examples=examples(60))
@given(
    one=JOBS,
    windows=WINDOWS,
    prices=st.none() | PRICES,
    history=st.lists(WINDOWS, min_size=1, max_size=2),
)
def test_no_policy_is_late_or_below_the_least(
    one: RentJob, windows: tuple, prices: tuple | None, history: list[tuple]
) -> None:
    least = least_dollars(one, windows, prices)
    for name in NAMES:
        outcome = replay(one, policy_of(name, one, chain_of(history)), windows, prices)
        assert not outcome.is_late, name
        assert outcome.dollars >= least * (1 - 1e-5), name


@settings(max_examples=examples(40))
@given(one=JOBS, windows=WINDOWS)
def test_another_zone_never_makes_the_least_dearer(one: RentJob, windows: tuple) -> None:
    least = least_dollars(one, windows)
    for zone in (0, 1):
        alone = least_dollars(one.alone(zone), [windows[zone]])
        assert least <= alone * (1 + 1e-6)


def test_a_job_goes_on_in_the_other_zone() -> None:
    # Four hours of work, each zone is there for two of them; a move costs a quarter.
    one = job(work=4.0, deadline=8.0, restart=0.0, move=0.25)
    windows = ([1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0])
    assert least_dollars(one, windows) == pytest.approx(4.25)
    outcome = replay(one, policy_of("greedy", one, None), windows)
    assert (outcome.dollars, outcome.num_moves) == (pytest.approx(4.25), 1)
    assert [held.zone for held in outcome.held] == [0, 0, 1, 1]
    # Where a move costs more than it saves, the optimum stays and waits.
    dear = job(work=4.0, deadline=8.0, restart=0.0, move=50.0)
    assert least_dollars(dear, windows) == pytest.approx(2 + 2 * 3)


def test_a_market_that_is_known_is_played_as_the_optimum_would() -> None:
    # The zones take turns, and history says so.
    one = job(work=3.0, deadline=6.0, restart=0.0, move=0.1)
    history = [([0, 1] * 2000, [1, 0] * 2000)]
    windows = ([0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0])
    policy = policy_of("dynamic_program", one, chain_of(history))
    assert least_dollars(one, windows) == pytest.approx(3.0)  # no move: every other hour in one
    assert replay(one, policy, windows).dollars == pytest.approx(3.0)


def _expected(
    one: RentJob, chain, tick: int, state: int, held: Held, place: int | None, pending: float,
    left: float,
) -> float:  # fmt: skip
    """Least expected dollars, by trying everything at every node of the tree."""
    if left <= 1e-9:
        return 0.0
    if tick == one.num_ticks:
        return dynamic_program.LATE_DOLLARS
    there = chain.available[:, state]
    if held.num_spot > there[held.zone]:
        held = Held(0, 0, held.zone)
    best = float("inf")
    for offer in OFFERS:
        if offer.num_spot > there[offer.zone]:
            continue
        worked, rest, where, dollars = 0.0, 0.0, place, 0.0
        if offer.num_machines:
            goes_on = offer == held
            waits = pending if goes_on else one.restart_seconds
            worked = max(one.tick_seconds - waits, 0.0)
            rest, where = max(waits - one.tick_seconds, 0.0), offer.zone
            dollars = one.tick_dollars(offer)
            dollars += 0.0 if goes_on else one.moving_dollars(place, offer.zone)
        total = dollars + sum(
            chance * _expected(one, chain, tick + 1, later, offer, where, rest, left - worked)
            for later, chance in enumerate(chain.transitions[state])
            if chance > 1e-12
        )
        best = min(best, total)
    return min(best, dynamic_program.LATE_DOLLARS)


@settings(max_examples=examples(8))
@given(
    one=st.builds(
        job,
        work=st.sampled_from([0.5, 1.0]),
        deadline=st.just(2.0),
        restart=st.sampled_from([0.0, 0.5]),
        spot=st.sampled_from([(1.0, 1.0), (0.5, 1.0)]),
        move=st.sampled_from([0.0, 0.25]),
    ),
    history=st.lists(WINDOWS, min_size=1, max_size=2),
    state=st.integers(0, 63),
)
def test_the_dynamic_program_equals_exhaustive_search(
    one: RentJob, history: list[tuple], state: int
) -> None:
    chain = chain_of(history)
    # Quarters of hours are whole units, so nothing is interpolated.
    policy = dynamic_program.solve(one, chain, unit_seconds=900.0)
    found = _expected(one, chain, 0, state, Held(0, 0), None, 0.0, one.work_seconds)
    assert policy.expected_dollars[state] == pytest.approx(found, rel=1e-4)


def test_a_chain_knows_that_zones_go_together() -> None:
    same = chain_of([[[1, 1, 0, 0] * 50, [1, 1, 0, 0] * 50]])
    both = same.state_of((1, 1), (1, 1))
    still = same.state_of((1, 1), (2, 2))
    assert same.available[:, both].tolist() == [1, 1]
    assert same.transitions[both, both] + same.transitions[both, still] > 0.9
    with pytest.raises(ProblemError, match="a chain of 7 zones is not possible"):
        chain_of([[[1, 0]] * 7])
    with pytest.raises(ProblemError, match="in which all zones are known"):
        chain_of([[[1, 1, None, None], [None, None, 0, 0]]])


def test_a_policy_cannot_hold_what_is_not_there() -> None:
    with pytest.raises(
        ProblemError, match="tick 0: the policy asks for 1 spot and 0 on-demand machines in zone 1"
    ):
        replay(job(), stated([Held(1, 0, 1)]), ([1] * 5, [0] * 5))


def window(zone: str, start: str | None, ticks: Sequence[int | None]) -> Availability:
    return Availability(zone=zone, start=start, tick_seconds=3600.0, available=tuple(ticks))  # type: ignore[arg-type]


def test_windows_of_a_zone_are_joined_by_their_times() -> None:
    parts = (
        window("a", "2024-01-01T04:00:00Z", (0, 1)),
        window("b", None, (1,)),
        window("a", START, (1, 1, 0)),
        window("a", "2024-01-01T01:00:00Z", (1, None)),
    )
    assert joined(parts) == (window("a", START, (1, 1, 0, None, 0, 1)), window("b", None, (1,)))
    with pytest.raises(ProblemError, match="two windows disagree about 2024-01-01T01:00:00Z"):
        joined((*parts, window("a", "2024-01-01T01:00:00Z", (0,))))
    with pytest.raises(ProblemError, match="but 1800 s later"):
        joined((*parts, window("a", "2024-01-01T00:30:00Z", (0,))))
    with pytest.raises(ProblemError, match="span more than 5000000 ticks"):
        joined((*parts, window("a", "9024-01-01T00:00:00Z", (0,))))


def test_zones_are_compared_over_the_time_that_they_have_in_common() -> None:
    traces = traces_of(
        [window("a", START, (1, 1, 0, 0, 1)), window("b", "2024-01-01T02:00:00Z", (0, 1, 1, 1))]
    )
    assert traces.ticks == ((0, 0, 1), (0, 1, 1))
    before, after = traces.split(traces.begin_seconds + 3600)
    assert before.ticks == ((0,), (0,))
    assert after.ticks == ((0, 1), (1, 1))
    with pytest.raises(ProblemError, match="zones a, b have no time in common"):
        traces_of([window("a", START, (1,)), window("b", "2024-01-01T02:00:00Z", (0,))])


def test_windows_with_an_unknown_tick_are_left_out_and_counted() -> None:
    zones = [window("a", START, [1] * 12), window("b", START, [None] + [1] * 11)]
    told = {
        "work_seconds": 7200, "deadline_seconds": 4 * 3600, "restart_seconds": 0,
        "on_demand_dollars_per_hour": 3, "spot_dollars_per_hour": {"a": 1, "b": 0.5},
    }  # fmt: skip
    report = rent_zones(zones, **told)
    assert report.windows == ("2024-01-01T04:00:00Z", "2024-01-01T08:00:00Z")
    assert report.num_left_out == 1
    assert report.bound_dollars == pytest.approx((1.0, 1.0))
    assert report.alone_dollars["a"] == pytest.approx((2.0, 2.0))
    with pytest.raises(ProblemError, match="a, b: tick 0 is unknown"):
        rent_zones([zones[0], window("b", START, [None] * 4)], **told, policies=["greedy"])


@pytest.mark.slow
def test_on_the_published_windows_ours_is_near_the_least_with_two_zones() -> None:
    windows = [
        one
        for zone in ("us-west-2a_v100_1", "us-west-2b_v100_1")
        for one in read_availability(
            reference.availability() / "cant_be_late" / zone / "overhead_0.02",
            trace_start=START,
        )
    ]
    traces = traces_of(windows)
    assert traces.zones == ("us-west-2a_v100_1", "us-west-2b_v100_1")
    assert len(traces.ticks[0]) == 1699  # no tick is in dispute, and none is missing
    assert None not in traces.ticks[0]
    middle = traces.begin_seconds + 850 * 600
    history, rest = traces.split(middle)
    both = RentJob(
        work_seconds=48 * 3600.0, deadline_seconds=52 * 3600.0, restart_seconds=72.0,
        tick_seconds=600.0, on_demand_dollars_per_hour=3.06,
        spot_dollars_per_hour=(0.9731, 0.9731),
    )  # fmt: skip
    report = compare(both, [rest], history=[history], every_seconds=6 * 3600)
    assert all(entry.missed_deadlines == 0 for entry in report.policies)
    ours = next(entry for entry in report.policies if entry.policy == "dynamic_program")
    assert ours.mean_over_bound <= 1.15
    assert report.choice == "dynamic_program"


@settings(max_examples=examples(40))
@given(
    work=st.sampled_from([1.0, 1.5, 2.0]),
    restart=st.sampled_from([0.0, 0.5]),
    rates=st.sampled_from([(1.0, 0.5), (0.5, 1.0), (0.25, 1.5)]),
    spot=st.sampled_from([(1.0, 0.3), (1.0, 0.6)]),
    on_demand=st.sampled_from([3.0, (3.0, 1.0), (1.0, 2.0)]),
    windows=WINDOWS,
    history=WINDOWS,
)
def test_machines_of_unlike_speed_have_an_exact_least_and_are_never_late(
    work: float, restart: float, rates: tuple, spot: tuple, on_demand: Any, windows: tuple,
    history: tuple,
) -> None:  # fmt: skip
    one = replace(job(work=1.0, deadline=4.0, restart=restart, spot=spot), rates=rates)
    one = replace(one, work_seconds=work * 3600, on_demand_dollars_per_hour=on_demand)
    least = least_dollars(one, windows)
    assert least == pytest.approx(exhaustive(one, windows), rel=1e-5)
    for name in NAMES:
        outcome = replay(one, policy_of(name, one, chain_of([history])), windows)
        assert not outcome.is_late, name
        assert outcome.dollars >= least * (1 - 1e-5), name


def test_a_slow_cheap_machine_is_held_while_there_is_time() -> None:
    """Two hours of work in six: the slow type is half as fast, at a quarter of the price."""
    one = replace(job(deadline=6.0, restart=0.0, spot=(1.0, 0.25)), rates=(1.0, 0.5))
    there = ([1] * 6, [1] * 6)
    assert least_dollars(one, there) == pytest.approx(4 * 0.25)
    assert replay(one, policy_of("greedy", one, None), there).dollars == pytest.approx(1.0)
    tight = replace(one, deadline_seconds=3 * 3600.0)
    # Two hours of the slow type do half as much as the hour of the fast one that is left.
    assert least_dollars(tight, there) == pytest.approx(2 * 0.25 + 1.0)
    assert not replay(tight, policy_of("greedy", tight, None), there).is_late
    with pytest.raises(InfeasibleError, match="2 h of work cannot end within 3 h"):
        tight.alone(1)
