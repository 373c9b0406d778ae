"""Elastic fair sharing (VirtualFlow algorithm 1) and EasyScale's proposals."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.easyscale import Variant
from hetflow.clusters.mechanisms.elastic import fair_shares
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.mechanisms.seats import DeviceLayout
from hetflow.clusters.simulator.cases import SCHEDULERS, Case, run_case
from hetflow.clusters.simulator.events import (
    FairShareOptions,
    ProposalOptions,
    est_rate,
    simulate_fair_share,
    simulate_proposals,
)
from hetflow.clusters.simulator.failures import FailureEvents, FailureOptions
from hetflow.papers.easyscale.schedulers import simulate_yarn
from hetflow.papers.easyscale.taking import take
from hetflow.schema.errors import HetflowError, InfeasibleError
from hetflow.schema.jobs import Job, Throughputs
from hetflow.tests.profiles import examples

MakeJob = Callable[..., Job]


@pytest.fixture
def single(table: Throughputs) -> ClusterPool:
    return ClusterPool(throughputs=table, num_devices={"fast": 4})


def test_shares_follow_weights_and_demands() -> None:
    assert fair_shares([1, 1], [4, 4], 4) == [2, 2]
    assert fair_shares([1, 3], [4, 4], 4) == [1, 3]
    assert fair_shares([1, 10], [4, 2], 4) == [2, 2]  # what one cannot use goes to the other
    assert fair_shares([10, 1], [4, 4], 4) == [3, 1]  # everybody gets at least one
    assert fair_shares([9, 1, 1], [4, 4, 4], 4) == [2, 1, 1]
    assert fair_shares([1, 9, 1], [4, 4, 4], 2) == [1, 1, 0]  # but where there are too few


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 8)), min_size=1, max_size=10),
    st.integers(1, 16),
)
def test_shares_fit_and_waste_nothing(jobs: list[tuple[float, int]], free: int) -> None:
    demands = [demand for _, demand in jobs]
    shares = fair_shares([weight for weight, _ in jobs], demands, free)
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))
    assert sum(shares) == min(free, sum(demands))
    assert all(shares) or len(jobs) > free


def test_running_jobs_shrink_for_a_newcomer_and_grow_back(
    single: ClusterPool, job: MakeJob
) -> None:
    jobs = [
        job(0, steps=16000.0, scale_factor=4),
        job(1, steps=4000.0, scale_factor=4, arrival_seconds=500.0),
    ]
    run = simulate_fair_share(jobs, single)
    # 500 s on 4, then both on 2 at 8 steps/s: job 1 ends 500 s later, job 0 grows back.
    assert [done.id for done in run.jobs] == ["1", "0"]
    assert run.jobs[0].finish_seconds == pytest.approx(1000.0)
    assert run.jobs[1].finish_seconds == pytest.approx(1250.0)
    assert run.jobs[0].queueing_seconds == 0.0
    assert run.jobs[1].num_restarts == 2


def test_static_priority_waits_for_the_whole_demand(single: ClusterPool, job: MakeJob) -> None:
    jobs = [
        job(0, steps=8000.0, scale_factor=2),
        job(1, steps=16000.0, scale_factor=4, arrival_seconds=1.0, priority_weight=10.0),
        job(2, steps=800.0, scale_factor=2, arrival_seconds=2.0),
    ]
    run = simulate_fair_share(jobs, single, FairShareOptions(scheduler="static_priority"))
    ends = {done.id: done.finish_seconds for done in run.jobs}
    assert ends == pytest.approx({"0": 1000.0, "1": 2000.0, "2": 2100.0})


def test_resizing_costs_its_seconds(single: ClusterPool, job: MakeJob) -> None:
    jobs = [
        job(0, steps=16000.0, scale_factor=4),
        job(1, steps=4000.0, scale_factor=4, arrival_seconds=500.0),
    ]
    run = simulate_fair_share(jobs, single, FairShareOptions(resize_seconds=10.0))
    assert run.end_seconds > 1250.0


def test_a_job_that_held_nothing_restarts_and_is_not_resized(
    table: Throughputs, job: MakeJob
) -> None:
    """A failed gang starts again; an elastic job that lost one of its devices is resized."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 2})
    failures = FailureOptions(mean_seconds=20000.0, repair_seconds=100.0, seed=5)

    def end(**given: object) -> float:
        options = FairShareOptions(failures=failures, **given)  # type: ignore[arg-type]
        return simulate_fair_share(
            [job(0, steps=160000.0, scale_factor=2)], pool, options
        ).end_seconds

    for scheduler, costs in (("static_priority", "restart_seconds"), ("elastic", "resize_seconds")):
        free: dict[str, object] = {
            "scheduler": scheduler, "resize_seconds": 0.0, "restart_seconds": 0.0,
        }  # fmt: skip
        other = {"restart_seconds", "resize_seconds"} - {costs}
        assert end(**free) == end(**free | dict.fromkeys(other, 10.0))
        assert end(**free) < end(**free | {costs: 10.0})


def test_fair_sharing_is_for_one_type(pool: ClusterPool, job: MakeJob) -> None:
    with pytest.raises(HetflowError, match="one device type"):
        simulate_fair_share([job(0)], pool)


def test_rate_of_ests_is_one_over_the_overload() -> None:
    assert est_rate((4.0, 1.0), (2, 0), 4) == pytest.approx(2.0)  # 2 ESTs each
    assert est_rate((4.0, 2.0), (1, 1), 3) == pytest.approx(2.0)  # 2 + 1
    assert est_rate((4.0, 0.0), (0, 3), 1) == 0.0


def test_an_elastic_job_mixes_types_where_that_is_faster(pool: ClusterPool, job: MakeJob) -> None:
    jobs = [job(0, model="rnn", steps=8000.0, scale_factor=4), job(1, model="rnn", scale_factor=4)]
    mixed = simulate_proposals(jobs, pool)
    gang = simulate_yarn(jobs, pool)
    assert mixed.end_seconds <= gang.end_seconds
    assert {span.device_type for span in mixed.spans} == {"fast", "slow"}


def test_jobs_yield_to_serving_and_come_back(table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4})
    serving = ((100.0, (4,)), (300.0, (0,)))
    jobs = [job(0, steps=16000.0, scale_factor=4)]  # 4 ESTs at 16 mini-batches a second
    alone = simulate_proposals(jobs, pool)
    yielding = simulate_proposals(jobs, pool, ProposalOptions(serving=serving))
    assert alone.end_seconds == pytest.approx(1000.0)
    assert yielding.end_seconds == pytest.approx(1200.0)


def test_a_job_falls_back_where_more_devices_are_slower(table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4})

    def measured(_: Job, counts: tuple[int, ...]) -> float:
        return 1.0 if sum(counts) <= 2 else 0.1

    jobs = [
        job(0, steps=800.0, scale_factor=2),
        job(1, steps=8000.0, scale_factor=4, arrival_seconds=1.0),
    ]
    run = simulate_proposals(jobs, pool, ProposalOptions(measured=measured))
    assert {span.num_devices for span in run.spans if span.job == "1"} == {2}
    assert run.end_seconds == pytest.approx(1001.0)


def test_a_newcomer_takes_devices_where_both_gain(table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4})
    jobs = [
        job(0, steps=16000.0, scale_factor=4),
        job(1, steps=4000.0, scale_factor=4, arrival_seconds=500.0),
    ]
    run = simulate_proposals(jobs, pool, ProposalOptions(variant=Variant(trade=take)))
    # 500 s on 4 at 16 a second, then 2 each at 8: job 1 ends 500 s later, job 0 grows back.
    ends = {done.id: done.finish_seconds for done in run.jobs}
    assert ends == pytest.approx({"0": 1250.0, "1": 1000.0})
    alone = simulate_proposals(jobs, pool)
    ends = {done.id: done.finish_seconds for done in alone.jobs}
    assert ends == pytest.approx({"0": 1000.0, "1": 1250.0})


@pytest.mark.parametrize("takes", [False, True])
def test_proposals_never_oversubscribe(pool: ClusterPool, job: MakeJob, takes: bool) -> None:
    models = ("conv", "rnn")
    jobs = [
        job(n, model=models[n % 2], scale_factor=(1, 2, 4)[n % 3], arrival_seconds=200.0 * n)
        for n in range(20)
    ]
    run = simulate_proposals(
        jobs, pool, ProposalOptions(variant=Variant(trade=take if takes else None))
    )
    assert len(run.jobs) == 20
    for time in {span.start_seconds for span in run.spans}:
        now = [s for s in run.spans if s.start_seconds <= time < s.end_seconds]
        for name, number in pool.num_devices.items():
            assert sum(s.num_devices for s in now if s.device_type == name) <= number


@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_every_mechanism_tells_how_far_it_is(
    scheduler: str, table: Throughputs, job: MakeJob
) -> None:
    case = Case(throughputs=table, num_devices={"fast": 2}, scheduler=scheduler)
    heard: list[tuple[int, float]] = []
    run = run_case(case, [job(n, steps=9000.0) for n in range(5)], lambda *told: heard.append(told))
    assert heard == sorted(heard)
    assert heard[-1][0] == 5
    assert heard[-1][1] >= run.end_seconds


EVENTS = [name for name in SCHEDULERS.names() if not name.endswith("rounds")]


def failing(table: Throughputs, scheduler: str, number: int, failures: FailureOptions) -> Case:
    return Case(
        throughputs=table, num_devices={"fast": number}, scheduler=scheduler, restart_seconds=30.0,
        failure_seconds=failures.mean_seconds, repair_seconds=failures.repair_seconds,
        seed=failures.seed,
    )  # fmt: skip


@pytest.mark.parametrize("scheduler", EVENTS)
def test_a_failure_costs_the_repair_and_a_restart(
    table: Throughputs, job: MakeJob, scheduler: str
) -> None:
    failures = FailureOptions(mean_seconds=3000.0, repair_seconds=500.0, seed=3)
    case = failing(table, scheduler, 1, failures)
    run = run_case(case, [job(0, steps=80000.0)])
    quiet = run_case(replace(case, failure_seconds=None), [job(0, steps=80000.0)])
    assert run.num_failures > 3
    assert run.end_seconds == pytest.approx(quiet.end_seconds + 530.0 * run.num_failures)
    assert run.jobs[0].num_restarts == run.num_failures
    assert run.busy_seconds["fast"] == pytest.approx(quiet.end_seconds + 30.0 * run.num_failures)


@pytest.mark.parametrize("scheduler", EVENTS)
def test_failures_never_leave_more_devices_held_than_are_up(
    table: Throughputs, job: MakeJob, scheduler: str
) -> None:
    failures = FailureOptions(mean_seconds=4000.0, repair_seconds=1000.0, seed=1)
    case = failing(table, scheduler, 4, failures)
    jobs = [
        job(i, steps=20000.0, scale_factor=1 + i % 2, arrival_seconds=200.0 * i) for i in range(8)
    ]
    run = run_case(case, jobs)
    assert run == run_case(case, jobs)
    assert len(run.jobs) == 8
    assert run.num_failures > 5
    down = FailureEvents(failures, DeviceLayout.flat(np.array([4])))
    for now in np.linspace(0.0, run.end_seconds, 400):
        down.until(now)
        held = sum(
            span.num_devices for span in run.spans if span.start_seconds <= now < span.end_seconds
        )
        assert held <= down.up()[0]


@pytest.mark.slow
def test_devices_fail_at_their_own_rate() -> None:
    options = FailureOptions(mean_seconds=100.0, repair_seconds=50.0)
    events = FailureEvents(options, DeviceLayout.flat(np.array([3, 1])))
    kinds = [kind for devices in events.until(1_500_000.0) for kind, _ in devices]
    # Up for 100 s on average, down for 50: each device fails 10,000 times.
    assert kinds.count(0) == pytest.approx(30_000, rel=0.03)
    assert kinds.count(1) == pytest.approx(10_000, rel=0.03)


def test_failures_that_let_nothing_end_are_refused(
    single: ClusterPool, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetflow.clusters.simulator.events._MOST_FAILURES", 1000)
    often = FailureOptions(mean_seconds=1e-9, repair_seconds=1.0)
    with pytest.raises(InfeasibleError, match="1e-07 % of the time .* make failures rarer"):
        simulate_fair_share([job(0)], single, FairShareOptions(failures=often))
    often = FailureOptions(mean_seconds=1000.0, repair_seconds=0.0)
    options = FairShareOptions(failures=often, resize_seconds=1e5)
    with pytest.raises(
        InfeasibleError, match="1000 failures of devices and no job that ended between them"
    ):
        simulate_fair_share([job(0, steps=1e6)], single, options)
