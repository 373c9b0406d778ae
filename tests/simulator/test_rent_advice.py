"""What ``rent --next`` says is what the same policy does in a replay, at every tick."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.simulator.renting import Adviser, chain_for, replay
from hetflow.schema.market import RentState
from hetflow.solvers.market.job import Held, Moment, RentJob
from hetflow.solvers.market.policies import NAMES, policy_of
from hetflow.solvers.market.windows import Traces
from hetflow.tests.profiles import examples

ZONES = ("a", "b")
TRACE = st.lists(st.integers(0, 2), min_size=10, max_size=10)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(12))
@given(windows=st.tuples(TRACE, TRACE), speeds=st.sampled_from([(0.0, 1.0), (0.0, 1.0, 1.8)]))
def test_a_job_that_follows_the_advice_holds_what_the_replay_holds(
    name: str, windows: tuple, speeds: tuple[float, ...]
) -> None:
    job = RentJob(
        work_seconds=4000.0, deadline_seconds=6000.0, restart_seconds=240.0, tick_seconds=600.0,
        on_demand_dollars_per_hour=3.0, spot_dollars_per_hour=(1.0, 0.9), move_dollars=0.05,
        speeds=speeds,
    )  # fmt: skip
    there = [[min(count, job.num_machines) for count in zone] for zone in windows]
    past = Traces(zones=ZONES, tick_seconds=600.0, ticks=tuple(map(tuple, windows)))

    def follows(_: RentJob, now: Moment) -> Held:
        told = RentState(
            elapsed_seconds=now.tick * 600.0,
            work_left_seconds=now.work_left_seconds,
            num_spot=now.held.num_spot,
            num_on_demand=now.held.num_on_demand,
            zone=None if now.zone is None else ZONES[now.zone],
            pending_seconds=now.pending_seconds,
            available=dict(zip(ZONES, now.available, strict=True)),
            unchanged_seconds={
                zone: (length - 1) * 600.0
                for zone, length in zip(ZONES, now.run_lengths, strict=True)
            },
        )
        said = Adviser(job, ZONES, history=[past], policies=[name])(told)
        zone = now.place if said.zone is None else ZONES.index(said.zone)
        return Held(said.num_spot, said.num_on_demand, zone)

    chain = chain_for(job, [past.of_zones(ZONES, job.num_machines).ticks])
    alone = replay(job, policy_of(name, job, chain), there)
    led = replay(job, follows, there)
    assert (led.dollars, led.is_late) == (pytest.approx(alone.dollars), alone.is_late)
    assert [held[:2] for held in led.held] == [held[:2] for held in alone.held]
