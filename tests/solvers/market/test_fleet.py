"""Elastic jobs under a deadline: the bound and every policy against all ways to hold machines."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.api.rent_fleet import rent_fleet
from hetflow.importers.capacity import read_bamboo_trace, read_parcae_trace
from hetflow.importers.registry import TraceOptions
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.market import Capacity
from hetflow.simulator.market import fleet_compare, replay
from hetflow.simulator.market.fleet_compare import Stated
from hetflow.simulator.market.fleet_replay import replay as replay_fleet
from hetflow.solvers.market import named as single
from hetflow.solvers.market.deadline import DeadlineJob
from hetflow.solvers.market.fleet import offline
from hetflow.solvers.market.fleet.chain import transitions_of
from hetflow.solvers.market.fleet.job import Fleet, FleetJob, FleetMoment
from hetflow.solvers.market.fleet.named import NAMES, policy_of
from hetflow.solvers.market.fleet.policies import dynamic_program
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
) -> FleetJob:
    """Numbers in ticks of an hour."""
    return FleetJob(
        work_seconds=work * 3600,
        speeds=speeds,
        deadline_seconds=deadline * 3600,
        resize_seconds=resize * 3600,
        tick_seconds=3600.0,
        on_demand_dollars_per_hour=on_demand,
        spot_dollars_per_hour=spot,
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


def ways(one: FleetJob, trace: Sequence[int]):
    """Every way to hold machines, in all ticks."""
    every = offline.fleets_of(one.num_machines)
    offers = [[fleet for fleet in every if fleet.num_spot <= there] for there in trace]
    return product(*offers)


@settings(max_examples=examples(40))
@given(one=JOBS, trace=TRACES)
def test_the_optimum_of_all_ways_is_between_the_bound_and_the_plan(
    one: FleetJob, trace: list[int]
) -> None:
    outcomes = [replay_fleet(one, Stated(holds), trace) for holds in ways(one, trace)]
    best = min(outcome.dollars for outcome in outcomes if not outcome.is_late)
    known = offline.solve(one, trace)
    plan = replay_fleet(one, Stated(known.holds), trace)
    assert not plan.is_late
    assert known.bound_dollars <= best + 1e-9 <= plan.dollars + 2e-9


@settings(max_examples=examples(40))
@given(one=JOBS, trace=TRACES, value=st.floats(0.0, 0.003))
def test_the_relaxed_program_is_the_least_over_all_ways(
    one: FleetJob, trace: list[int], value: float
) -> None:
    relaxed = offline.Relaxed(one, trace)
    found, holds = relaxed.least(value)
    each = [
        sum(map(one.tick_dollars, way)) - value * relaxed.work_of(way) for way in ways(one, trace)
    ]
    assert found == pytest.approx(min(each), abs=1e-9)
    mine = sum(map(one.tick_dollars, holds)) - value * relaxed.work_of(holds)
    assert mine == pytest.approx(found, abs=1e-9)


def test_the_bound_is_the_optimum_where_that_is_known() -> None:
    # Four machine hours; two spot machines in two of four ticks, resizes are free.
    one = job(work=4.0, resize=0.0)
    known = offline.solve(one, [2, 0, 2, 0])
    assert known.bound_dollars == pytest.approx(4.0)
    assert replay_fleet(one, Stated(known.holds), [2, 0, 2, 0]).dollars == pytest.approx(4.0)


@settings(max_examples=examples(40))
@given(
    one=JOBS,
    trace=TRACES,
    history=st.lists(TRACES, min_size=1, max_size=2),
)
def test_no_policy_is_late_or_below_the_bound(
    one: FleetJob, trace: list[int], history: list[list[int]]
) -> None:
    chain = transitions_of(history, one.num_machines)
    bound = offline.solve(one, trace).bound_dollars
    for name in NAMES:
        outcome = replay_fleet(one, policy_of(name, one, chain), trace)
        assert not outcome.is_late, name
        assert outcome.dollars >= bound - 1e-9, name


@settings(max_examples=examples(60))
@given(
    resize=st.sampled_from([0.0, 0.25, 1.0, 1.25]),
    work=st.sampled_from([2.0, 2.5, 4.0]),
    trace=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    name=st.sampled_from(["greedy", "uniform_progress"]),
)
def test_one_machine_is_a_job_of_can_t_be_late(
    resize: float, work: float, trace: list[int], name: str
) -> None:
    fleet = job(work=work, speeds=(0.0, 1.0), deadline=8.0, resize=resize)
    alone = DeadlineJob(
        work_seconds=work * 3600,
        deadline_seconds=8 * 3600.0,
        restart_seconds=resize * 3600,
        tick_seconds=3600.0,
        on_demand_dollars_per_hour=3.0,
        spot_dollars_per_hour=(1.0,),
    )
    several = replay_fleet(fleet, policy_of(name, fleet, None), trace)
    one = replay.replay(alone, single.policy_of(name, alone, None), [trace])
    # Once the time left is hardly enough, the two may differ in which safe choice they take.
    calm, left, pending = 0, fleet.work_seconds, 0.0
    for tick, held in enumerate(several.held):
        if fleet.ticks_for(left, 1) >= fleet.num_ticks - tick:
            break
        if tick == 0 or held != several.held[tick - 1]:
            pending = fleet.resize_seconds if held.num_machines else 0.0
        left -= fleet.worked(held, pending)
        pending = max(pending - fleet.tick_seconds, 0.0)
        calm = tick + 1
    assert [(held.num_spot, held.num_on_demand) for held in several.held[:calm]] == [
        (int(held.hold == 1), int(held.hold == 2)) for held in one.held[:calm]
    ]


def _expected(
    one: FleetJob, chain, tick: int, there: int, held: Fleet, pending: float, left: float
) -> float:
    """Least expected dollars, by trying everything at every node of the tree."""
    if left <= 1e-9:
        return 0.0
    if tick == one.num_ticks:
        return dynamic_program.late_dollars(one, left)
    if held.num_spot > there:
        held, pending = Fleet(there, held.num_on_demand), one.resize_seconds
    best = float("inf")
    for fleet in offline.fleets_of(one.num_machines):
        if fleet.num_spot > there:
            continue
        waits = pending if fleet == held else one.resize_seconds
        if fleet.num_machines == 0:
            waits = 0.0
        done = one.worked(fleet, waits)
        rest = max(waits - one.tick_seconds, 0.0)
        total = one.tick_dollars(fleet) + sum(
            chance * _expected(one, chain, tick + 1, later, fleet, rest, left - done)
            for later, chance in enumerate(chain[there])
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
    one: FleetJob, history: list[list[int]]
) -> None:
    chain = transitions_of(history, one.num_machines)
    # Quarters of machine hours are points of the grid, so nothing is interpolated.
    units = round(one.work_seconds / 900)
    policy = dynamic_program.solve(one, chain, num_units=units)
    for there, expected in enumerate(policy.expected_dollars):
        found = _expected(one, chain, 0, there, Fleet(0, 0), 0.0, one.work_seconds)
        assert expected == pytest.approx(found, rel=1e-4)


def test_what_is_lost_costs_a_pause_and_the_rest_goes_on() -> None:
    one = job(work=5.0, resize=0.5, deadline=6.0)
    outcome = replay_fleet(one, Stated([Fleet(2, 0)] + [Fleet(1, 0)] * 5), [2, 1, 1, 1, 1, 1])
    # 2 x 0.5 h in the first hour, 0.5 h after the loss, then an hour in each.
    assert not outcome.is_late
    assert len(outcome.held) == 6
    assert outcome.dollars == pytest.approx(2 + 5)
    assert outcome.num_changes == 2


def test_a_policy_cannot_hold_what_is_not_there() -> None:
    with pytest.raises(ProblemError, match="tick 0: the policy asks for 2 spot"):
        replay_fleet(job(), Stated([Fleet(2, 0)]), [1, 1, 1, 1])


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
    chain = transitions_of([[2, 1, 1, None, 0, 0]], 2)
    assert chain.sum(axis=1) == pytest.approx(np.ones(3))
    assert chain[1, 0] < chain[1, 1]
    same = transitions_of([[2, 1, 1], [0, 0]], 2)
    assert (chain == same).all()
    with pytest.raises(ProblemError, match="no two neighbouring ticks"):
        transitions_of([[1, None, 0]], 2)


def test_a_moment_keeps_what_is_held_where_the_wish_is_not_safe() -> None:
    one = job(work=4.0, resize=0.0, deadline=4.0)
    seen: list[FleetMoment] = []

    class Waits:
        def choose(self, job: FleetJob, now: FleetMoment) -> Fleet:
            seen.append(now)
            return offline_guard(job, now)

    def offline_guard(job: FleetJob, now: FleetMoment) -> Fleet:
        from hetflow.solvers.market.fleet.job import guarded

        return guarded(job, now, Fleet(0, 0))

    outcome = replay_fleet(one, Waits(), [0] * 4)
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


def test_windows_are_cut_at_their_steps() -> None:
    trace = Capacity(zone="a", tick_seconds=60.0, num_machines=(1, 2, 3, 4, 5))
    assert fleet_compare.windows_of([trace], 2, 2) == (
        ("a from 0 h", (1, 2)),
        ("a from 0.0333333 h", (3, 4)),
    )
    gap = Capacity(zone="b", tick_seconds=60.0, num_machines=(1, None, 3))
    with pytest.raises(ProblemError, match="b: tick 1 is unknown"):
        fleet_compare.windows_of([gap], 2, 1)
