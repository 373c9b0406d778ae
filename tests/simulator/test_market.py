"""Many jobs on a market: dollars by hand, moves, machines that go, deadlines, quotas."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetflow
from hetflow.clusters.simulator.renting import replay
from hetflow.schema.errors import ProblemError
from hetflow.schema.jobs import Job, Jobs, ModelThroughput, Throughputs
from hetflow.schema.market import Availability, InstanceType, Market, PriceHistory, utc_text
from hetflow.schema.simulation import JobOutcome, SimulationRun
from hetflow.solvers.market.job import RentJob
from hetflow.solvers.market.policies import PLAIN
from hetflow.tests.profiles import examples

RATES = Throughputs(
    models=(ModelThroughput(model="m", steps_per_second={"V100": 2.0, "K80": 1.0}),)
)
HOUR = 3600.0
START = 1583020800.0  # 2020-03-01
AT = utc_text(START)

Turn = tuple[float, float | None]


def history(name: str, zone: str, *turns: Turn, hours: float = 1000.0) -> PriceHistory:
    """Dollars per hour from so many hours on."""
    return PriceHistory(
        cloud="aws",
        zone=zone,
        instance_type=name,
        times=tuple(utc_text(START + HOUR * hour) for hour, _ in turns),
        dollars_per_hour=tuple(price for _, price in turns),
        known_until=utc_text(START + HOUR * hours),
    )


def market(*prices: PriceHistory, **more: Any) -> Market:
    machines = (
        InstanceType(name="v", device_type="V100", on_demand_dollars_per_hour=4.0),
        InstanceType(name="k", device_type="K80", cloud="aws"),
    )
    return Market(instance_types=machines, prices=prices, **more)


def job(name: str = "a", hours: float = 1.0, **more: Any) -> Job:
    """So many hours of a V100."""
    return Job(id=name, model="m", steps=2.0 * HOUR * hours, **more)


def run(place: Market, *jobs: Job, pool: str = "4xV100,4xK80", **options: Any) -> SimulationRun:
    given: dict[str, Any] = {"market": place, "start": AT, **options}
    return hetflow.simulate(Jobs(jobs=jobs), RATES, pool, **given)


def only(found: SimulationRun) -> JobOutcome:
    (one,) = found.jobs
    return one


def test_a_job_takes_the_cheapest_work() -> None:
    dear = market(history("v", "a", (0, 1.0)), history("k", "a", (0, 0.6)))
    ended = only(run(dear, job(), restart_seconds=360.0))
    assert ended.dollars == pytest.approx(1.0 * 1.1)
    assert ended.finish_seconds == pytest.approx(1.1 * HOUR)
    slow = market(history("v", "a", (0, 1.0)), history("k", "a", (0, 0.4)))
    ended = only(run(slow, job()))
    assert ended.dollars == pytest.approx(0.4 * 2)
    assert (ended.num_restarts, ended.num_moves, ended.num_preemptions) == (0, 0, 0)


def test_a_job_moves_when_that_pays() -> None:
    """After an hour of ten the K80 costs a quarter of a V100: nine V100-hours, 18 of a K80."""
    place = market(history("v", "a", (0, 1.0)), history("k", "a", (0, 0.6), (1, 0.25)))
    found = run(place, job(hours=10), restart_seconds=360.0)
    ended = only(found)
    assert ended.dollars == pytest.approx(1.0 + 0.25 * (18.2 + 0.1))  # 0.1 h less work in the first
    assert (ended.num_moves, found.metrics.num_moves, found.metrics.num_preemptions) == (1, 1, 0)
    near = market(history("v", "a", (0, 1.0)), history("k", "a", (0, 0.6), (1, 0.4999)))
    assert only(run(near, job(hours=10), restart_seconds=360.0)).num_moves == 0


def test_nobody_waits_for_prices_that_are_not_known_yet() -> None:
    """Zone b has its first price after five hours, which a job at the start cannot know."""
    place = market(history("v", "a", (0, 1.0)), history("v", "b", (5, 0.1)))
    ended = only(run(place, job(slo_seconds=8 * HOUR)))
    assert (ended.finish_seconds, ended.dollars) == (pytest.approx(HOUR), pytest.approx(1.0))


def test_a_move_to_another_cloud_costs_its_egress() -> None:
    before = history("v", "a", (0, 1.0), (1, 2.0))
    away = PriceHistory(
        cloud="azure", zone="b", instance_type="v", times=before.times,
        dollars_per_hour=(2.0, 1.0), known_until=before.known_until,
    )  # fmt: skip
    place = market(before, away)
    assert only(run(place, job(hours=3))).dollars == pytest.approx(3.0)
    assert only(run(place, job(hours=3), cloud_move_dollars=0.5)).dollars == pytest.approx(3.5)
    assert only(run(place, job(hours=3), cloud_move_dollars=9.0)).num_moves == 0


@pytest.mark.parametrize(("checkpoint", "again"), [(0.0, 0.0), (1500.0, 600.0)])
def test_a_machine_that_goes_costs_a_restart_and_the_work_since_the_checkpoint(
    checkpoint: float, again: float
) -> None:
    """Gone after an hour: the last checkpoint was after 3000 s."""
    place = market(history("v", "a", (0, 1.0), (1, None), (2, 1.0)))
    place = Market(instance_types=(InstanceType(name="v", device_type="V100"),),
                   prices=place.prices)  # fmt: skip
    ended = only(run(place, job(hours=2), checkpoint_seconds=checkpoint, restart_seconds=0.0))
    assert ended.finish_seconds == pytest.approx(3 * HOUR + again)
    assert ended.dollars == pytest.approx(2.0 + again / HOUR)
    assert (ended.num_preemptions, ended.num_moves) == (1, 0)


def test_availability_takes_machines_away() -> None:
    window = Availability(zone="a", start=AT, tick_seconds=600.0, available=(1, 1, 1, 0, 0, 1))
    place = market(history("v", "a", (0, 1.0)), availability=(window,))
    ended = only(run(place, job(), pool="1xV100"))
    # 30 minutes on spot, 20 on demand, and back for the last 10.
    assert ended.dollars == pytest.approx(0.5 + 4.0 * 20 / 60 + 10 / 60)
    assert ended.num_preemptions == 1
    other = Availability(zone="b", start=AT, tick_seconds=600.0, available=(0,) * 6)
    for windows in ((other,), (window, other)):  # the second was ignored where the first matched
        elsewhere = market(history("v", "a", (0, 1.0)), availability=windows)
        with pytest.raises(ProblemError, match="availability of b, which has no spot price"):
            run(elsewhere, job(), pool="1xV100")


def test_a_deadline_sends_a_job_on_demand_in_time() -> None:
    """Spot K80s may go at any time, and need 20 h; 12 h are left, of which V100s need 10.1 h."""
    place = market(history("k", "a", (0, 0.1)))
    late = job(hours=10, slo_seconds=12 * HOUR)
    ended = only(run(place, late, restart_seconds=360.0, preemption_seconds=1e9))
    assert not ended.violates_slo
    assert ended.completion_seconds == pytest.approx(12 * HOUR, abs=2.0)
    # x h on a K80, then y h on a V100, a restart each: x + y = 12, (x - 0.1) + 2 (y - 0.1) = 20.
    y = 20 + 0.3 - 12
    assert ended.dollars == pytest.approx(0.1 * (12 - y) + 4.0 * y, rel=1e-3)
    patient = job(hours=10, slo_seconds=40 * HOUR)
    assert only(run(place, patient, preemption_seconds=1e9)).dollars == pytest.approx(2.0)


def test_jobs_share_the_quota() -> None:
    place = market(history("v", "a", (0, 1.0)))
    found = run(place, job("a"), job("b"), job("c"), pool="2xV100")
    assert sorted(one.finish_seconds for one in found.jobs) == [HOUR, HOUR, 2 * HOUR]
    assert found.metrics.dollars == pytest.approx(3.0)
    assert found.metrics.utilisation == pytest.approx(0.75)


def test_the_first_to_run_out_of_time_is_served_first() -> None:
    place = market(history("v", "a", (0, 1.0)))
    jobs = (job("a"), job("b", slo_seconds=HOUR + 5.0))
    found = {one.id: one for one in run(place, *jobs, pool="1xV100", preemption_seconds=1e9).jobs}
    assert not found["b"].violates_slo
    assert found["a"].start_seconds >= HOUR


@st.composite
def cases(draw: Callable[..., Any]) -> dict[str, Any]:
    prices = st.sampled_from([0.2, 0.5, 1.0, 1.5, None])
    zones = [
        history(name, zone, *[(3.0 * place, draw(prices)) for place in range(6)], hours=18.0)
        for name, zone in (("v", "a"), ("v", "b"), ("k", "a"))
    ]
    jobs = []
    for place in range(draw(st.integers(1, 4))):
        hours = draw(st.sampled_from([0.5, 2.0, 7.0]))
        slack = draw(st.sampled_from([None, 1.2, 3.0]))
        jobs.append(
            job(str(place), hours, arrival_seconds=2 * HOUR * place,
                slo_seconds=slack and slack * HOUR * (hours + 1))
        )  # fmt: skip
    return {"place": market(*zones), "jobs": jobs, "mean": draw(st.sampled_from([600.0, 2e4]))}


@settings(max_examples=examples(60), deadline=None)
@given(case=cases(), checkpoint=st.sampled_from([0.0, 900.0]), seed=st.integers(0, 9))
@pytest.mark.slow
def test_no_deadline_is_missed_and_nothing_is_free(
    case: dict[str, Any], checkpoint: float, seed: int
) -> None:
    """With room for all on demand; what is paid is at least the work at the least price."""
    asked = {
        "restart_seconds": 300.0, "preemption_seconds": case["mean"],
        "checkpoint_seconds": checkpoint, "seed": seed,
    }  # fmt: skip
    found = run(case["place"], *case["jobs"], pool="8xV100,8xK80", **asked)
    assert found.metrics.num_slo_violations == 0
    for ended in found.jobs:
        (work,) = (one.steps / 2 / HOUR for one in case["jobs"] if one.id == ended.id)
        assert ended.dollars >= 0.2 * work * (1 - 1e-9)
        assert ended.num_restarts == ended.num_moves + ended.num_preemptions
    assert run(case["place"], *case["jobs"], pool="8xV100,8xK80", **asked) == found


def test_bad_questions() -> None:
    bare = Market(
        instance_types=(InstanceType(name="v", device_type="V100"),),
        prices=(history("v", "a", (0, 1.0), hours=2.0),),
    )
    with pytest.raises(ProblemError, match=r"after 2020-03-01T02:00:00Z no machine .* job 'a'"):
        run(bare, job(hours=3), pool="1xV100")
    with pytest.raises(ProblemError, match="no machine with prices has one of P100"):
        hetflow.simulate(
            Jobs(jobs=(job(),)),
            Throughputs(models=(ModelThroughput(model="m", steps_per_second={"P100": 1.0}),)),
            "1xP100",
            market=bare,
        )
    with pytest.raises(ProblemError, match="there are no prices at 2019"):
        run(bare, job(), start="2019-03-01T00:00:00Z")
    with pytest.raises(ProblemError, match="do not fail, they are taken away"):
        run(bare, job(), failure_seconds=1e5)
    with pytest.raises(ProblemError, match="scheduler market, which needs one"):
        run(bare, job(), scheduler="rounds")
    with pytest.raises(ProblemError, match="preemption_seconds is for a market"):
        hetflow.simulate(Jobs(jobs=(job(),)), RATES, "1xV100", preemption_seconds=5.0)
    with pytest.raises(ProblemError, match="preemption_seconds must be finite and > 0"):
        run(bare, job(), preemption_seconds=-1.0)


def told(ticks: list[int]) -> Market:
    """V100s on spot at a dollar an hour in ticks of ten minutes, else on demand at four."""
    there = Availability(zone="a", start=AT, tick_seconds=600, available=tuple(ticks))
    return market(history("v", "a", (0, 1.0)), availability=(there,))


@pytest.mark.parametrize("policy", list(PLAIN))
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_a_job_under_a_policy_pays_what_the_replay_of_it_pays(policy: str, data: Any) -> None:
    ticks = data.draw(st.lists(st.integers(0, 1), min_size=24, max_size=24))
    found = only(run(told(ticks), job(hours=2, slo_seconds=4 * HOUR), rent_policy=policy,
                     restart_seconds=300.0, pool="1xV100"))  # fmt: skip
    one = RentJob(
        work_seconds=2 * HOUR, deadline_seconds=4 * HOUR, restart_seconds=300.0, tick_seconds=600.0,
        on_demand_dollars_per_hour=4.0, spot_dollars_per_hour=(1.0,),
    )  # fmt: skip
    replayed = replay(one, PLAIN[policy], [ticks])
    assert found.finish_seconds <= 4 * HOUR
    assert found.dollars == pytest.approx(replayed.used_dollars, abs=1e-6)


def test_a_policy_decides_for_jobs_with_a_deadline_alone() -> None:
    ticks = [1] * 24
    late = job("a", hours=1, slo_seconds=3 * HOUR)
    free = job("b", hours=1)
    found = {one.id: one.dollars for one in run(told(ticks), late, free,
             rent_policy="on_demand").jobs}  # fmt: skip
    assert found == {"a": pytest.approx(4.0), "b": pytest.approx(1.0)}
    with pytest.raises(ProblemError, match="rent_policy='cheapest'|known are on_demand"):
        run(told(ticks), late, rent_policy="cheapest")
    with pytest.raises(ProblemError, match="rent_policy is for a market"):
        hetflow.simulate(Jobs(jobs=(late,)), RATES, "1xV100", policy="las", rent_policy="greedy")
