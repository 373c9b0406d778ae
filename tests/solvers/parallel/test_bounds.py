"""The planner's bounds against every plan of small problems, counted by the checker."""

import numpy as np
import pytest
from hypothesis import given, settings

from hetflow.checks.parallel import counted_step
from hetflow.costs.parallel_stage import bucketed_ring_seconds
from hetflow.schema.parallel import ParallelProblem
from hetflow.solvers.parallel.gradients import reduce_tables
from hetflow.solvers.parallel.search import Search
from hetflow.solvers.parallel.solve import replica_counts
from hetflow.solvers.parallel.space import microbatch_sizes, space_of
from hetflow.tests.profiles import examples
from hetflow.tests.solvers.parallel.every_plan import fits, plans, problems, two_types


@settings(max_examples=examples(25))
@given(problems())
def test_no_plan_is_below_its_search_s_bounds(problem: ParallelProblem) -> None:
    devices = sum(pool.num_devices for pool in problem.pools)
    for size in microbatch_sizes(problem):
        space = space_of(problem, size)
        for replicas in replica_counts(problem.global_batch_size, size, devices):
            steps = [
                counted_step(plan, problem)
                for plan in plans(problem, size, replicas)
                if fits(plan, problem)
            ]
            if not steps:
                continue
            search, least = Search(problem, space, replicas), min(steps)
            assert search.least_by_capacity <= least * (1 + 1e-9)
            for below in (1.01 * least, 3 * least):  # bounds hold for plans under ``below``
                assert search.least_step(below) <= least * (1 + 1e-9)
                assert search.root(below).least_seconds <= least * (1 + 1e-9)


def test_all_reduces_of_every_stage_are_those_of_the_cost_model() -> None:
    problem = two_types()
    space = space_of(problem, 1)
    by_mix, by_option = reduce_tables(problem, space, 3)
    start, end = 1, 3
    for number, mix in enumerate(space.mixes):
        options = [space.options[o] for o in mix]
        sizes = problem.sizes_of(min(o.tensor_parallel_size for o in options))
        assert sizes is not None
        expected = max(
            bucketed_ring_seconds(
                sum(sizes.weight_bytes[start:end]), 3, problem.pools[o.pool].link(1), None
            )
            for o in options
        )
        assert by_mix[number, start, end] == pytest.approx(expected)
        assert all(by_option[o, start, end] <= expected * (1 + 1e-12) for o in mix)
    assert not np.any(reduce_tables(problem, space, 1)[0])  # one replica reduces nothing
