"""Agnostic LAS over classes of jobs against the same policy job by job; what blind policies see."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.allocators import PolicyAllocator, allocator_named
from hetflow.clusters.mechanisms.pool import Active, ClusterPool
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, MixThroughput, ModelThroughput, Throughputs
from hetflow.solvers.allocation import policy_named
from hetflow.tests.profiles import examples

MakeJob = Callable[..., Job]
SCALES = (1, 2, 4)
MODELS = {"even": (3.0, 2.0, 1.0), "odd": (0.7, 0.9, 1.1), "fast only": (5.0, 0.0, 0.0)}


@pytest.fixture(scope="module")
def three_types() -> ClusterPool:
    """Unlike numbers of three types, and a model that runs on one of them."""
    table = Throughputs(
        models=tuple(
            ModelThroughput(
                model=name,
                scale_factor=scale,
                steps_per_second={
                    device: rate * scale
                    for device, rate in zip("abc", rates, strict=True)
                    if rate > 0
                },
            )
            for name, rates in MODELS.items()
            for scale in SCALES
        )
    )
    return ClusterPool(throughputs=table, num_devices={"a": 4, "b": 3, "c": 9})


def shares(pool: ClusterPool, jobs: list[Job], allocator: object) -> np.ndarray:
    active = Active(pool)
    active.add(jobs, 0.0)
    return allocator.allocate(active, 0.0).x  # type: ignore[attr-defined]


def job_by_job(weighted: bool, blind: bool) -> PolicyAllocator:
    policy = policy_named("las_weighted" if weighted else "las")
    return PolicyAllocator(policy, agnostic=True, blind=blind)


@settings(max_examples=examples(60))
@given(data=st.data(), weighted=st.booleans(), blind=st.booleans())
def test_classes_give_the_level_that_single_jobs_do(
    three_types: ClusterPool, data: st.DataObject, weighted: bool, blind: bool
) -> None:
    drawn = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["even", "odd", "even", "fast only"]),
                st.sampled_from(SCALES),
                st.sampled_from([1.0, 2.0]),
            ),
            min_size=1,
            max_size=30,
        )
    )
    jobs = [
        Job(id=str(n), model=model, scale_factor=scale, priority_weight=weight, steps=10.0)
        for n, (model, scale, weight) in enumerate(drawn)
    ]
    name = "las_weighted" if weighted else "las"
    found = shares(three_types, jobs, allocator_named(name, agnostic=True, blind=blind))
    expected = shares(three_types, jobs, job_by_job(weighted, blind))
    used = found @ np.array([float(job.scale_factor) for job in jobs])
    assert (used <= three_types.capacity * (1 + 1e-7)).all()
    assert (found.sum(axis=0) <= 1 + 1e-7).all()
    scale = np.array(
        [job.scale_factor / (job.priority_weight if weighted else 1.0) for job in jobs]
    )
    if not blind:
        least = (found.sum(axis=0) * scale).min()
        assert least == pytest.approx((expected.sum(axis=0) * scale).min(), rel=1e-6)
    alike: dict[tuple[str, int, float], np.ndarray] = {}
    for one, column in zip(jobs, found.T, strict=True):
        key = (one.model if not blind else "", one.scale_factor, one.priority_weight)
        assert alike.setdefault(key, column) == pytest.approx(column, abs=1e-12)


def test_in_a_full_pool_everybody_gets_the_same_devices(
    three_types: ClusterPool, job: MakeJob
) -> None:
    jobs = [job(n, model="even", scale_factor=1 + n % 2) for n in range(20)]
    found = shares(three_types, jobs, allocator_named("las", agnostic=True))
    scale = np.array([job.scale_factor for job in jobs])
    assert found * scale == pytest.approx(np.tile([[4 / 20], [3 / 20], [9 / 20]], 20))


def test_mixes_are_not_flat(three_types: ClusterPool, job: MakeJob) -> None:
    mix = MixThroughput(model="even", devices={"a": 1, "b": 1}, steps_per_second=1.0)
    table = Throughputs(models=three_types.throughputs.models, mixes=(mix,))
    pool = ClusterPool(throughputs=table, num_devices=three_types.num_devices, uses_mixes=True)
    with pytest.raises(HetflowError, match="device types only"):
        shares(pool, [job(0, model="even")], allocator_named("las", agnostic=True))
    blind = allocator_named("las", agnostic=True, columns=True)
    assert shares(pool, [job(0, model="even")], blind).shape == (4, 1)


def test_blind_policies_see_each_job_at_its_rate_on_the_first_type(job: MakeJob) -> None:
    table = Throughputs(
        models=(
            ModelThroughput(model="quick", scale_factor=1, steps_per_second={"a": 10.0, "b": 1.0}),
            ModelThroughput(model="slow", scale_factor=1, steps_per_second={"a": 1.0, "b": 1.0}),
        )
    )
    pool = ClusterPool(throughputs=table, num_devices={"a": 1})
    jobs = [job(0, model="quick", steps=36_000.0), job(1, model="slow", steps=1_800.0)]
    allocator = allocator_named("makespan", agnostic=True, blind=True)
    assert shares(pool, jobs, allocator)[0] == pytest.approx([2 / 3, 1 / 3], rel=1e-5)
