"""The planner's bounds against every plan of small problems, counted by the checker."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from hetflow.planning.checks.parallel import counted_step
from hetflow.schema.parallel import ParallelProblem
from hetflow.solvers.parallel.gradients import Rings, replica_counts
from hetflow.solvers.parallel.search import ReplicaSearch
from hetflow.solvers.parallel.space import microbatch_sizes, space_of
from hetflow.tests.profiles import examples
from hetflow.tests.solvers.parallel.every_plan import fits, plans, problems, two_types


@settings(max_examples=examples(25))
@given(problems())
def test_no_plan_is_below_its_search_s_bounds(problem: ParallelProblem) -> None:
    devices = sum(pool.num_devices for pool in problem.pools)
    for size in microbatch_sizes(problem):
        for replicas in replica_counts(problem, size, devices):
            space = space_of(problem, size, replicas)
            steps = [
                counted_step(plan, problem)
                for plan in plans(problem, size, replicas)
                if fits(plan, problem)
            ]
            if not steps:
                continue
            search, least = ReplicaSearch(problem, space, replicas), min(steps)
            assert search.least_by_capacity <= least * (1 + 1e-9)
            for below in (1.01 * least, 3 * least):  # bounds hold for plans under ``below``
                regions = search.relaxation.regions(search.least_slowest, below, below)
                for _ in range(6):  # of any split into regions one has the plan
                    assert min(r.least_seconds for r in regions) <= least * (1 + 1e-9)
                    first = min(regions, key=lambda r: r.least_seconds)
                    parts = search.relaxation.split(first, below)
                    regions = [r for r in regions if r is not first] + (parts or [first])


@pytest.mark.parametrize("bucket_bytes", [None, 1_000_000])
def test_all_reduces_of_every_stage(bucket_bytes: int | None) -> None:
    """A ring of 3 sends 2 (3 - 1) messages of a third of each bucket, here at 1e9 bytes/s."""
    problem = replace(two_types(), bucket_bytes=bucket_bytes)
    seconds = 4 * (2 << 20) / 3 / 1e9  # two layers of 1 MiB at every degree
    for pools in ((0,), (1,), (0, 1)):
        degrees = (2,) * len(pools)
        assert Rings(problem, 3).table(pools, degrees)[1, 3] == pytest.approx(seconds)
        assert not np.any(Rings(problem, 1).table(pools, degrees))  # one replica reduces nothing
    unlike = Rings(problem, 3).table((0, 1), (1, 2))[1, 3]  # whole gradients, as if of 6 devices
    assert unlike == pytest.approx(10 * (2 << 20) / 6 / 1e9)
    assert not np.any(Rings(problem, 1).table((0, 1), (1, 2)))
