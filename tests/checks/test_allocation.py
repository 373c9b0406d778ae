"""The checker of allocations accepts what is right and names what is wrong."""

import dataclasses
import re

import pytest

from hetflow.planning.checks.allocation import check
from hetflow.schema.jobs import (
    Allocation,
    AllocationProblem,
    Certificate,
    Job,
    Jobs,
    ModelThroughput,
    PairShare,
    PairThroughput,
    Throughputs,
)

# Two equal jobs on one V100 and one K80: each runs half the time on each, 6 steps/s; equal
# share is 0.5 * 10 + 0.5 * 2 = 6 too, so LAS is 1 with prices 10/12 and 2/12.
RATES = {"V100": 10.0, "K80": 2.0}
HALVES = {"V100": 0.5, "K80": 0.5}


def problem(**options):
    jobs = tuple(
        Job(id=name, model="m", steps=60.0, slo_seconds=20.0, isolated_seconds=0.0) for name in "ab"
    )
    return AllocationProblem(
        jobs=Jobs(jobs=jobs),
        throughputs=Throughputs(
            models=(ModelThroughput(model="m", steps_per_second=RATES),),
            pairs=(PairThroughput(models=("m", "m"), steps_per_second={"V100": (4.0, 4.0)}),),
        ),
        num_devices={"V100": 1, "K80": 1},
        dollars_per_hour={"V100": 2.0, "K80": 1.0},
        **options,
    )


def allocation(**changes):
    certificate = Certificate(
        termination="optimal", sense="max", objective=1.0, bound=1.0, gap=0.0, method="by hand",
        resource_prices={"V100": 10 / 12, "K80": 2 / 12}, job_prices={"a": 1 / 12, "b": 1 / 12},
    )  # fmt: skip
    found = Allocation(
        policy="las",
        x={"a": HALVES, "b": HALVES},
        throughputs={"a": 6.0, "b": 6.0},
        certificate=certificate,
    )
    return dataclasses.replace(found, **changes)


def certified(**changes):
    return dataclasses.replace(allocation().certificate, **changes)


def test_a_right_allocation_has_no_faults():
    assert check(allocation(), problem()) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"x": {"a": {"V100": 0.6, "K80": 0.4}, "b": HALVES}}, r"V100: 1.1 devices .*\(5.3\)"),
        ({"x": {"a": {"V100": 0.5, "K80": 0.5000000000000002}, "b": HALVES}}, r"\(5.2\)"),
        ({"x": {"a": HALVES}}, "job 'b' has no row"),
        ({"x": {"a": {"T4": 0.1}, "b": HALVES}}, "no column 'T4'"),
        ({"x": {"a": HALVES, "b": HALVES, "c": {}}}, "job 'c' is not in the problem"),
        ({"throughputs": {"a": 6.1, "b": 6.0}}, "throughput 6.1 stated, 6.0 computed"),
        ({"certificate": certified(objective=1.1)}, "objective 1.1 stated, 1.0 computed"),
        ({"certificate": certified(bound=0.9)}, "prices prove 1.0"),
        ({"certificate": certified(job_prices={"a": 1 / 6})}, "prices prove"),
        ({"certificate": certified(resource_prices={"V100": 2.0, "K80": 2.0})}, "prices prove 4"),
        ({"certificate": certified(bound=1.5)}, "called optimal"),
        ({"pairs": (PairShare(jobs=("a", "b"), shares={"V100": 0.1}),)}, "sharing is off"),
        ({"policy": "min_cost_slo", "x": {"a": {"K80": 1.0}, "b": {"V100": 1.0}},
          "throughputs": {"a": 2.0, "b": 10.0}}, "'a': 2.0 steps/s miss its SLO"),
    ],
)  # fmt: skip
def test_each_fault_is_named(changes, fault):
    faults = check(allocation(**changes), problem())
    assert any(re.search(fault, line) for line in faults), faults


def test_time_where_a_job_does_not_run():
    asked = problem(space_sharing=True)
    pair = PairShare(jobs=("a", "b"), shares={"K80": 0.5})
    half = {"V100": 0.5}
    faults = check(allocation(x={"a": half, "b": half}, pairs=(pair,)), asked)
    assert any("spends 0.5 on 'K80', where it cannot" in line for line in faults)


def test_pairs_count_for_both_and_use_devices_once():
    asked = problem(space_sharing=True)
    pair = PairShare(jobs=("a", "b"), shares={"V100": 1.0})
    shared = allocation(
        x={"a": {}, "b": {}}, pairs=(pair,), throughputs={"a": 4.0, "b": 4.0},
        certificate=certified(termination="feasible", objective=4 / 6, bound=None, gap=None),
    )  # fmt: skip
    assert check(shared, asked) == []


def test_an_agnostic_objective_is_judged_by_the_flat_matrix():
    asked = problem(heterogeneity="agnostic")
    flat = allocation(
        heterogeneity="agnostic",
        x={"a": {"V100": 1.0}, "b": {"K80": 1.0}},
        throughputs={"a": 10.0, "b": 2.0},
        certificate=certified(resource_prices={"V100": 0.5, "K80": 0.5}),
    )
    assert check(flat, asked) == []
