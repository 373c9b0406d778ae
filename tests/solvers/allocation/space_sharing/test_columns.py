"""Placement (5.3.1) and mixes of device types held at once (VirtualFlow 6.5.2)."""

import pytest

from hetflow.planning.checks.allocation import check
from hetflow.schema.jobs import (
    AllocationProblem,
    Job,
    Jobs,
    MixThroughput,
    ModelThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import allocate


def problem(mixes=(), num_jobs=1, scale=2, devices=None, **options):
    entry = ModelThroughput(
        model="m",
        scale_factor=scale,
        steps_per_second={"V100": 10.0, "P100": 4.0},
        unconsolidated_steps_per_second={"V100": 5.0, "P100": 3.0},
    )
    return AllocationProblem(
        jobs=Jobs(jobs=tuple(
            Job(id=f"j{i}", model="m", steps=100.0, scale_factor=scale) for i in range(num_jobs)
        )),
        throughputs=Throughputs(models=(entry,), mixes=mixes),
        num_devices=devices or {"V100": 4, "P100": 4},
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("placement", "best"), [("consolidated", 10.0), ("unconsolidated", 5.0), ("mixed", 10.0)]
)
def test_placement_picks_the_throughputs(placement, best):
    asked = problem(placement=placement)
    found = allocate(asked, "max_throughput")
    assert found.throughputs["j0"] == pytest.approx(best, rel=1e-9)
    assert check(found, asked) == []


def test_mixed_placement_spills_over_what_can_be_consolidated():
    asked = problem(
        placement="mixed", num_jobs=2, devices={"V100": 4}, consolidated_devices={"V100": 2}
    )
    found = allocate(asked, "max_throughput")
    assert sum(found.throughputs.values()) == pytest.approx(10.0 + 5.0, rel=1e-9)
    assert check(found, asked) == []
    fair = allocate(asked, "las")
    assert list(fair.throughputs.values()) == pytest.approx([7.5, 7.5], rel=1e-9)


def test_a_mix_uses_all_its_types_at_once_and_never_hurts():
    mix = MixThroughput(
        model="m", scale_factor=2, devices={"V100": 2, "P100": 4}, steps_per_second=16.0
    )
    alone, mixed = problem(), problem(mixes=(mix,))
    found = allocate(mixed, "max_throughput")
    assert found.throughputs["j0"] == pytest.approx(16.0, rel=1e-9)
    assert found.x["j0"]["2xV100+4xP100"] == pytest.approx(1.0, rel=1e-9)
    assert check(found, mixed) == []
    assert allocate(alone, "max_throughput").throughputs["j0"] == pytest.approx(10.0, rel=1e-9)
    crowded = problem(mixes=(mix,), num_jobs=4)
    with_mix = allocate(crowded, "makespan").certificate.objective
    without = allocate(problem(num_jobs=4), "makespan").certificate.objective
    assert with_mix <= without * (1 + 1e-9)


def test_a_mix_with_more_devices_than_the_pool_is_not_offered():
    mix = MixThroughput(model="m", scale_factor=2, devices={"V100": 9}, steps_per_second=99.0)
    found = allocate(problem(mixes=(mix,)), "max_throughput")
    assert found.throughputs["j0"] == pytest.approx(10.0, rel=1e-9)
