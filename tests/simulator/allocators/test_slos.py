"""SLOs that cannot be met mid-run are given up one by one; the run goes on."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hetflow.clusters.mechanisms.allocators import allocator_named, solve_what_can_be_met
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.simulator.cases import simulate_rounds
from hetflow.clusters.simulator.metrics import summarise
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.jobs import Job, Throughputs
from hetflow.solvers.allocation import Instance, make_instance, policy_named

MakeJob = Callable[..., Job]
SLO_POLICIES = ["min_cost_slo", "min_cost_ratio_slo", "min_dollars_slo"]


def instance(steps: list[float], slo: list[float], devices: float) -> Instance:
    number = len(steps)
    return make_instance(
        rate=np.ones((number, 1)), scale=np.ones(number), capacity=np.array([devices]),
        columns=("V100",), steps=np.array(steps), slo_seconds=np.array(slo),
        dollars=np.array([1.0]),
    )  # fmt: skip


@pytest.mark.parametrize("policy", SLO_POLICIES)
def test_the_dearest_slo_is_given_up(policy: str) -> None:
    # One device: 0.8 + 0.3 + 0.4 is too much; without the first, 0.7 fits.
    case = instance([80.0, 30.0, 40.0], [100.0, 100.0, 100.0], 1.0)
    found, lost = solve_what_can_be_met(case, policy_named(policy))
    assert lost == [0]
    assert found.throughput[1] >= 0.3
    assert found.throughput[2] >= 0.4


def test_hopeless_and_past_slos_go_first() -> None:
    case = instance([80.0, 30.0, 40.0], [79.0, -5.0, 100.0], 1.0)
    found, lost = solve_what_can_be_met(case, policy_named("min_cost_slo"))
    assert lost == [0, 1]
    assert found.throughput[2] >= 0.4


def test_what_can_be_met_is_kept() -> None:
    case = instance([80.0, 10.0], [100.0, 100.0], 1.0)
    assert solve_what_can_be_met(case, policy_named("min_cost_slo"))[1] == []
    assert solve_what_can_be_met(case, policy_named("min_cost"))[1] == []


def test_other_limits_still_stop_a_run() -> None:
    case = instance([80.0, 10.0], [100.0, 100.0], 1.0)
    budget = policy_named("makespan_budget")
    with pytest.raises(InfeasibleError, match="budget"):
        solve_what_can_be_met(replace(case, budget_dollars=1e-6), budget)


@pytest.mark.parametrize("policy", SLO_POLICIES)
def test_a_run_goes_on_without_the_slos_that_break(
    table: Throughputs, job: MakeJob, policy: str
) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 1}, dollars_per_hour={"fast": 2.0})
    jobs = [
        job(0, steps=2880.0, slo_seconds=1100.0),  # 720 s of work
        job(1, steps=2880.0, slo_seconds=1500.0, arrival_seconds=400.0),
        job(2, steps=2880.0, slo_seconds=10.0, arrival_seconds=400.0),  # hopeless
    ]
    run = simulate_rounds(jobs, pool, allocator_named(policy), RoundOptions(reset_seconds=0.0))
    assert len(run.jobs) == 3
    figures = summarise(run)
    late = {done.id for done in run.jobs if done.violates_slo}
    assert "2" in late
    assert figures.num_slo_violations == len(late)
    assert {done.id for done in run.jobs if done.slo_given_up} >= {"2"}
    assert figures.num_slos_given_up == sum(done.slo_given_up for done in run.jobs)
    assert "0" not in late
