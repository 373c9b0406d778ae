"""Elastic jobs under a deadline: the bound and every policy against all ways to hold machines."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.api.rent import fleet as rent_fleet
from hetflow.clusters.simulator.renting import replay
from hetflow.formats.importers.availability import read_bamboo_trace, read_parcae_trace
from hetflow.formats.importers.registry import TraceOptions
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.market import Capacity
from hetflow.solvers.market import dynamic_program
from hetflow.solvers.market.chain import chain_of
from hetflow.solvers.market.dynamic_program import Modes, least_dollars
from hetflow.solvers.market.job import Held, Moment, RentJob, RentPolicy, guarded
from hetflow.solvers.market.policies import NAMES, policy_of
from hetflow.solvers.market.windows import Window, apart, windows_of
from hetflow.tests.data import reference
from hetflow.tests.profiles import examples


def job(
    *,
    work: float = 3.0,
    speeds: tuple[float, ...] = (0.0, 1.0, 2.0),
    deadline: float = 4.0,
    resize: float = 0.25,
    on_demand: float = 3.0,
    spot: float = 1.0,
) -> RentJob:
    """Numbers in ticks of an hour."""
    return RentJob(
        work_seconds=work * 3600,
        speeds=speeds,
        deadline_seconds=deadline * 3600,
        restart_seconds=resize * 3600,
        tick_seconds=3600.0,
        on_demand_dollars_per_hour=on_demand,
        spot_dollars_per_hour=(spot,),
    )


JOBS = st.builds(
    job,
    work=st.sampled_from([1.0, 2.5, 3.0]),
    speeds=st.sampled_from([(0.0, 1.0, 2.0), (0.0, 1.0, 1.5)]),
    deadline=st.just(4.0),
    resize=st.sampled_from([0.0, 0.25, 1.0, 1.25]),
    on_demand=st.sampled_from([2.0, 3.0]),
    spot=st.sampled_from([0.5, 1.0]),
)
TRACES = st.lists(st.integers(0, 3), min_size=4, max_size=4)


def stated(holds: Sequence[Held]) -> RentPolicy:
    """Hold what a list says."""
    return lambda job, now: holds[now.tick]


def ways(one: RentJob, trace: Sequence[int]):
    """Every way to hold machines, in all ticks."""
    every = [Held(*each) for each in Modes(one).holdings]
    return product(*([held for held in every if held.num_spot <= there] for there in trace))


@settings(max_examples=examples(40))
@given(one=JOBS, trace=TRACES)
def test_the_least_is_that_over_every_way(one: RentJob, trace: list[int]) -> None:
    outcomes = [replay(one, stated(holds), [trace]) for holds in ways(one, trace)]
    best = min(outcome.dollars for outcome in outcomes if not outcome.is_late)
    assert least_dollars(one, [trace]) == pytest.approx(best, rel=1e-5)


def test_unlike_speeds_and_two_zones_have_an_exact_least() -> None:
    # Four machine hours; two spot machines in two of four ticks, restarts are free.
    one = job(work=4.0, resize=0.0)
    assert least_dollars(one, [[2, 0, 2, 0]]) == pytest.approx(4.0)
    both = replace(one, spot_dollars_per_hour=(1.0, 0.5), move_dollars=0.1)
    assert least_dollars(both, [[2, 0, 0, 0], [0, 0, 2, 0]]) == pytest.approx(2 + 1 + 0.1)
    greedy = replay(both, policy_of("greedy", both, None), [[2, 0, 0, 0], [0, 0, 2, 0]])
    assert (greedy.dollars, greedy.num_moves) == (pytest.approx(3.1), 1)


@settings(max_examples=examples(40))
@given(
    one=JOBS,
    trace=TRACES,
    history=st.lists(TRACES, min_size=1, max_size=2),
)
def test_no_policy_is_late_or_below_the_bound(
    one: RentJob, trace: list[int], history: list[list[int]]
) -> None:
    chain = chain_of([[trace] for trace in history], one.num_machines)
    bound = least_dollars(one, [trace])
    for name in NAMES:
        outcome = replay(one, policy_of(name, one, chain), [trace])
        assert not outcome.is_late, name
        assert outcome.dollars >= bound * (1 - 1e-5), name


@settings(max_examples=examples(30))
@given(
    one=JOBS, traces=st.tuples(TRACES, TRACES), history=st.tuples(TRACES, TRACES),
    move=st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_several_machines_in_two_zones_are_never_late_or_below_the_least(
    one: RentJob, traces: tuple, history: tuple, move: float
) -> None:
    two = replace(one, spot_dollars_per_hour=(1.0, 0.5), move_dollars=move)
    chain = chain_of([history], two.num_machines)
    least = least_dollars(two, traces)
    for zone in (0, 1):
        assert least <= least_dollars(two.alone(zone), [traces[zone]]) * (1 + 1e-6)
    for name in NAMES:
        outcome = replay(two, policy_of(name, two, chain), traces)
        assert not outcome.is_late, name
        assert outcome.dollars >= least * (1 - 1e-5), name


def _expected(
    one: RentJob, chain, tick: int, there: int, held: Held, pending: float, left: float
) -> float:
    """Least expected dollars, by trying everything at every node of the tree."""
    if left <= 1e-9:
        return 0.0
    if tick == one.num_ticks:
        return float(dynamic_program.late_dollars(one, np.array(left)))
    if held.num_spot > there:
        held, pending = held._replace(num_spot=there), one.restart_seconds
    best = float("inf")
    for fleet in (Held(*each) for each in Modes(one).holdings):
        if fleet.num_spot > there:
            continue
        waits = pending if fleet == held else one.restart_seconds
        if fleet.num_machines == 0:
            waits = 0.0
        done = one.worked(fleet, waits)
        rest = max(waits - one.tick_seconds, 0.0)
        total = one.tick_dollars(fleet) + sum(
            chance * _expected(one, chain, tick + 1, later, fleet, rest, left - done)
            for later, chance in enumerate(chain.transitions[there])
            if chance > 0
        )
        best = min(best, total)
    return best


@settings(max_examples=examples(12))
@given(
    one=st.builds(
        job,
        work=st.sampled_from([1.0, 2.0]),
        deadline=st.just(3.0),
        resize=st.sampled_from([0.0, 0.5, 1.25]),
    ).filter(lambda one: one.num_ticks == 3),
    history=st.lists(TRACES, min_size=1, max_size=2),
)
def test_the_dynamic_program_equals_exhaustive_search(
    one: RentJob, history: list[list[int]]
) -> None:
    chain = chain_of([[trace] for trace in history], one.num_machines)
    # Quarters of machine hours are points of the grid, so nothing is interpolated.
    policy = dynamic_program.solve(one, chain, unit_seconds=900.0)
    for there, expected in enumerate(policy.expected_dollars):
        found = _expected(one, chain, 0, there, Held(0, 0), 0.0, one.work_seconds)
        assert expected == pytest.approx(found, rel=1e-4)


def test_what_is_lost_costs_a_pause_and_the_rest_goes_on() -> None:
    one = job(work=5.0, resize=0.5, deadline=6.0)
    outcome = replay(one, stated([Held(2, 0)] + [Held(1, 0)] * 5), [[2, 1, 1, 1, 1, 1]])
    # 2 x 0.5 h in the first hour, 0.5 h after the loss, then an hour in each.
    assert not outcome.is_late
    assert len(outcome.held) == 6
    assert outcome.dollars == pytest.approx(2 + 5)
    assert outcome.num_launches == 2


def test_a_policy_cannot_hold_what_is_not_there() -> None:
    with pytest.raises(ProblemError, match="tick 0: the policy asks for 2 spot"):
        replay(job(), stated([Held(2, 0)]), [[1, 1, 1, 1]])


def test_a_deadline_that_all_machines_miss_names_the_soonest_and_its_price() -> None:
    with pytest.raises(InfeasibleError) as refused:
        job(work=8.0)
    assert refused.value.hint == "the soonest is 4.25 h, for 30.00 dollars"


@pytest.mark.parametrize(
    "speeds", [(0.0,), (1.0, 1.0), (0.0, 2.0, 1.0), (0.0, float("nan")), (0.0, 1.0, float("inf"))]
)
def test_speeds_that_cannot_be_are_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(ProblemError, match="speeds must"):
        job(speeds=speeds)


def test_a_chain_counts_the_history_and_nothing_across_what_is_unknown() -> None:
    chain = chain_of([[[2, 1, 1, None, 0, 0]]], 2).transitions
    assert chain.sum(axis=1) == pytest.approx(np.ones(3))
    assert chain[1, 0] < chain[1, 1]
    assert (chain == chain_of([[[2, 1, 1]], [[0, 0]]], 2).transitions).all()
    with pytest.raises(ProblemError, match="no two neighbouring ticks"):
        chain_of([[[1, None, 0]]], 2)
    with pytest.raises(ProblemError, match="a chain of 3 zones is not possible; it takes 1 to 2"):
        chain_of([[[1, 1]] * 3], 11)


def test_a_moment_keeps_what_is_held_where_the_wish_is_not_safe() -> None:
    one = job(work=4.0, resize=0.0, deadline=4.0)
    seen: list[Moment] = []

    def waits(job: RentJob, now: Moment) -> Held:
        seen.append(now)
        return guarded(job, now, Held(0, 0))

    outcome = replay(one, waits, [[0] * 4])
    assert [held.num_on_demand for held in outcome.held] == [0, 0, 2, 2]
    assert not outcome.is_late
    assert seen[2].tick == 2


def test_the_published_traces_are_read() -> None:
    options = TraceOptions(tick_seconds=300.0, time_unit_seconds=3600.0)
    (path,) = (reference.capacity() / "bamboo").glob("*p2-xlarge-2020*")
    (trace,) = read_bamboo_trace(path, options).capacity
    assert len(trace.num_machines) == 1064  # of 88.7 h
    assert trace.num_machines[:3] == (0, 0, 0)  # 0, 9, 2 and 0 machines within the first minutes
    assert max(filter(None, trace.num_machines)) == 16
    parcae = read_parcae_trace(reference.capacity() / "parcae", TraceOptions()).capacity
    assert [one.zone for one in parcae] == [
        "trace_hh_55_65", "trace_hl_15_25", "trace_lh_80_90", "trace_ll_10_11"
    ]  # fmt: skip
    assert all(len(one.num_machines) == 60 and one.tick_seconds == 60 for one in parcae)
    assert parcae[0].num_machines[:10] == (32,) * 8 + (29, 29)


def test_on_a_published_trace_ours_is_within_15_percent_of_the_bound() -> None:
    traces = {
        one.zone: one
        for one in read_parcae_trace(reference.capacity() / "parcae", TraceOptions()).capacity
    }
    held_out = traces.pop("trace_lh_80_90")
    halves = [
        Capacity(
            zone=one.zone,
            tick_seconds=one.tick_seconds,
            num_machines=tuple((count or 0) // 4 for count in one.num_machines),
        )
        for one in (held_out, *traces.values())
    ]
    report = rent_fleet(
        halves[:1],
        history=halves[1:],
        work_seconds=0.6 * 8 * 2400,
        deadline_seconds=2400,
        resize_seconds=10,
        num_machines=8,
        on_demand_dollars_per_hour=0.9,
        spot_dollars_per_hour=0.27,
    )
    ours = next(entry for entry in report.policies if entry.policy == "dynamic_program")
    assert all(entry.missed_deadlines == 0 for entry in report.policies)
    assert ours.mean_over_bound <= 1.15
    assert report.choice == "dynamic_program"


def test_windows_are_cut_at_their_steps_and_machines_at_what_the_job_can_use() -> None:
    trace = Capacity(zone="a", tick_seconds=60.0, num_machines=(1, 2, 3, 4, 5))
    assert windows_of(apart([trace]), 2, 120.0, most=3).windows == (
        ("a +0 h", Window([(1, 2)])),
        ("a +0.0333333 h", Window([(3, 3)])),
    )
    gap = Capacity(zone="b", tick_seconds=60.0, num_machines=(1, None, 3))
    with pytest.raises(ProblemError, match="b: tick 1 is unknown, and so is one in each of 2"):
        windows_of(apart([gap]), 2, 60.0, most=3)
