"""One job under a deadline: every policy against the least possible, and that against all ways."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.clusters.simulator.renting import compare, replay
from hetflow.formats.importers.availability import read_availability
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.market import Availability
from hetflow.solvers.market import dynamic_program
from hetflow.solvers.market.chain import Chain, chain_of
from hetflow.solvers.market.dynamic_program import least_dollars
from hetflow.solvers.market.job import Held, RentJob, RentPolicy
from hetflow.solvers.market.policies import NAMES, policy_of
from hetflow.solvers.market.windows import apart
from hetflow.tests.data import reference

PUBLISHED = json.loads((reference.availability() / "cant_be_late_results.json").read_text())


def job(
    *,
    work: float = 3.0,
    deadline: float = 6.0,
    restart: float = 0.5,
    on_demand: float = 3.0,
    spot: float = 1.0,
) -> RentJob:
    """Numbers in ticks of an hour."""
    return RentJob(
        work_seconds=work * 3600,
        deadline_seconds=deadline * 3600,
        restart_seconds=restart * 3600,
        tick_seconds=3600.0,
        on_demand_dollars_per_hour=on_demand,
        spot_dollars_per_hour=(spot,),
    )


def one_chain(windows: Sequence[Sequence[int | None]]) -> Chain:
    """Of one zone."""
    return chain_of([[window] for window in windows])


NOTHING, SPOT, ON_DEMAND = Held(0, 0), Held(1, 0), Held(0, 1)


def stated(holds: Sequence[Held]) -> RentPolicy:
    """Hold what a list says."""
    return lambda job, now: holds[now.tick]


def exhaustive(one: RentJob, window: Sequence[int]) -> float:
    """The least dollars over every way to hold machines."""
    best = float("inf")
    offers = [
        (NOTHING, SPOT, ON_DEMAND) if there else (NOTHING, ON_DEMAND)
        for there in window[: one.num_ticks]
    ]
    for holds in product(*offers):
        outcome = replay(one, stated(holds), [window])
        if not outcome.is_late:
            best = min(best, outcome.dollars)
    return best


JOBS = st.builds(
    job,
    work=st.sampled_from([1.0, 1.5, 2.0, 2.5]),
    deadline=st.sampled_from([5.0, 6.0]),
    restart=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.25]),
    on_demand=st.sampled_from([2.0, 3.0]),
    spot=st.sampled_from([0.5, 1.0]),
)
WINDOWS = st.lists(st.sampled_from([0, 1]), min_size=6, max_size=6)


@given(one=JOBS, window=WINDOWS)
def test_the_least_is_that_over_every_way(one: RentJob, window: list[int]) -> None:
    assert least_dollars(one, [window]) == pytest.approx(exhaustive(one, window), rel=1e-5)


@given(one=JOBS, window=WINDOWS, history=st.lists(WINDOWS, min_size=1, max_size=3))
def test_no_policy_is_late_or_below_the_least(
    one: RentJob, window: list[int], history: list[list[int]]
) -> None:
    least = least_dollars(one, [window])
    for name in NAMES:
        outcome = replay(one, policy_of(name, one, one_chain(history)), [window])
        assert not outcome.is_late, name
        assert outcome.dollars >= least * (1 - 1e-5), name


@pytest.mark.parametrize("restart", [0.0, 0.125])
@given(
    work=st.floats(9.997, 9.99999),
    window=st.lists(st.sampled_from([0, 1]), min_size=12, max_size=12),
)
def test_seconds_that_are_not_whole_miss_no_deadline_and_keep_the_bound(
    restart: float, work: float, window: list[int]
) -> None:
    one = job(work=work - restart + 1e-7, deadline=10.0, restart=restart)
    least = least_dollars(one, [window])
    assert least < float("inf")
    for name in NAMES:
        outcome = replay(one, policy_of(name, one, one_chain([[0, 1, 1] * 9])), [window])
        assert not outcome.is_late, name
        assert outcome.dollars >= least * (1 - 1e-5), name


def test_a_market_that_is_known_is_played_as_the_optimum_would() -> None:
    # Machines are there in every other tick, and history says so; restarts are free.
    one, window = job(work=3.0, deadline=6.0, restart=0.0), [0, 1, 0, 1, 0, 1]
    policy = policy_of("dynamic_program", one, one_chain([[0, 1] * 2000]))
    assert replay(one, policy, [window]).dollars == pytest.approx(3.0)
    assert least_dollars(one, [window]) == pytest.approx(3.0)


@given(
    one=st.builds(job, work=st.sampled_from([1.0, 2.0]), deadline=st.just(4.0)),
    history=st.lists(WINDOWS, min_size=1, max_size=2),
)
def test_the_dynamic_program_equals_exhaustive_search(
    one: RentJob, history: list[list[int]]
) -> None:
    chain = one_chain(history)
    policy = dynamic_program.solve(one, chain)
    for state, expected in ((0, policy.expected((1,))), (7, policy.expected((0,)))):
        found = _expected(one, chain, 0, state, NOTHING, 0.0, one.work_seconds)
        assert expected == pytest.approx(found, rel=1e-4)


def _expected(
    one: RentJob, chain, tick: int, state: int, held: Held, pending: float, left: float
) -> float:
    """Least expected dollars, by trying everything at every node of the tree."""
    if left <= 0:
        return 0.0
    if tick == one.num_ticks:
        return float("inf")
    there = bool(chain.available[0, state])
    held = NOTHING if held == SPOT and not there else held
    best = float("inf")
    for hold in (NOTHING, SPOT, ON_DEMAND):
        if hold == SPOT and not there:
            continue
        waits = one.restart_seconds if hold != held else pending
        worked = one.worked(hold, waits)
        rest = max(waits - one.tick_seconds, 0.0)
        total = one.tick_dollars(hold) + sum(
            chance * _expected(one, chain, tick + 1, later, hold, rest, left - worked)
            for later, chance in enumerate(chain.transitions[state])
            if chance > 0
        )
        best = min(best, total)
    return best


def test_no_price_is_high_enough_to_risk_the_deadline() -> None:
    """In 20,000 windows of history no machine was ever taken away."""
    one = job(work=3.5, deadline=4.0, restart=0.5, on_demand=10_000.0, spot=3_000.0)
    policy = policy_of("dynamic_program", one, one_chain([[1] * 8] * 20_000))
    assert not replay(one, policy, [[1, 0, 0, 0]]).is_late


def test_what_is_expected_is_of_windows_as_they_begin() -> None:
    one, history = job(), [[1, 1, 0, 0, 1, 0, 1, 1]]
    policy = dynamic_program.solve(one, one_chain(history))
    windows = [
        Availability(zone=name, tick_seconds=3600.0, available=available)
        for name, available in (("a", (1,) * 6), ("b", (0,) * 6), ("c", (0, 1) * 3))
    ]
    seen = Availability(zone="h", tick_seconds=3600.0, available=tuple(history[0]))  # type: ignore[arg-type]
    report = compare(one, apart(windows), history=apart([seen]))
    mean = (policy.expected((1,)) + 2 * policy.expected((0,))) / 3
    assert report.expected_dollars == pytest.approx(mean)


@cache
def published_windows(region: str, overhead: float):
    place = reference.availability() / "cant_be_late" / region / f"overhead_{overhead:.2f}"
    return read_availability(place)


@pytest.mark.slow
@pytest.mark.parametrize(
    "published",
    [pytest.param(case, id=f"{case['deadline_h']}h-{case['overhead_h']}h") for case in PUBLISHED],
)
def test_cant_be_lates_table_to_the_cent(published: dict) -> None:
    one = RentJob(
        work_seconds=48 * 3600.0,
        deadline_seconds=published["deadline_h"] * 3600.0,
        restart_seconds=published["overhead_h"] * 3600,
        tick_seconds=600.0,
        on_demand_dollars_per_hour=3.06,
        spot_dollars_per_hour=(0.9731,),
    )
    windows = published_windows(published["region"], published["overhead_h"])
    other = published_windows("us-west-2b_v100_1", published["overhead_h"])
    report = compare(one, apart(windows), history=apart(other))
    means = {entry.policy: entry.mean_dollars for entry in report.policies}
    assert all(entry.missed_deadlines == 0 for entry in report.policies)
    for name in ("on_demand", "greedy", "uniform_progress"):
        assert means[name] == pytest.approx(published[f"{name}_mean_dollars"], abs=0.01)
    dynamic = next(entry for entry in report.policies if entry.policy == "dynamic_program")
    assert dynamic.mean_over_bound <= 1.15
    assert report.choice == "dynamic_program"
    if published["overhead_h"] == 0.2:  # its unit of 60 s rounds the shorter overhead
        bound = dict(zip(report.windows, report.bound_dollars, strict=True))
        for name, least in zip(
            published["files"], published["offline_optimum_dollars"], strict=True
        ):
            assert bound[name.removesuffix(".json")] == pytest.approx(least, abs=0.006)


def test_a_deadline_that_no_choice_can_meet_names_the_soonest_and_its_price() -> None:
    with pytest.raises(InfeasibleError) as refused:
        job(work=6.0, deadline=6.0)
    assert "even on demand" in refused.value.message
    assert refused.value.hint == "the soonest is 6.5 h, for 21.00 dollars"


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf")])
def test_prices_that_are_none_are_refused(wrong: float) -> None:
    with pytest.raises(ProblemError, match="spot_dollars_per_hour must be"):
        job(spot=wrong)


def test_nothing_is_counted_across_what_is_unknown() -> None:
    known = one_chain([[1, 1], [0, 0]])
    assert (one_chain([[1, 1, None, 0, 0]]).transitions == known.transitions).all()
    with pytest.raises(ProblemError, match="no two neighbouring ticks"):
        one_chain([[1, None, 0]])
