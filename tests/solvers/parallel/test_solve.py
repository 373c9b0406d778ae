"""The planner of three dimensions against every plan of small problems, counted by the checker."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from hetflow.checks.parallel import check
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.parallel import ParallelProblem
from hetflow.solvers.parallel.counts import deal
from hetflow.solvers.parallel.solve import solve
from hetflow.tests.profiles import examples
from hetflow.tests.solvers.parallel.every_plan import fastest, problems, two_types


@settings(max_examples=examples(60))
@given(problems())
def test_no_plan_of_the_space_is_faster(problem: ParallelProblem) -> None:
    expected = fastest(problem)
    if expected is None:
        with pytest.raises(InfeasibleError):
            solve(problem)
        return
    plan = solve(problem)
    assert check(plan, problem) == []
    assert plan.proof.termination == "optimal"
    assert plan.predicted.step_seconds == pytest.approx(expected, rel=1e-9)


def test_more_devices_never_hurt_and_faster_ones_scale() -> None:
    problem = two_types()
    step = solve(problem).predicted.step_seconds
    more = tuple(replace(pool, num_devices=pool.num_devices + 2) for pool in problem.pools)
    assert solve(replace(problem, pools=more)).predicted.step_seconds <= step
    assert solve(problem) == solve(problem)


def test_unlike_types_share_by_layers_or_degree() -> None:
    plan = solve(two_types())
    used = {group.device_type for stage in plan.stages for group in stage.replicas}
    assert used == {"fast", "slow"}
    # 4 fast and 4 slow are worth 6 fast ones: 16 samples of 4 layers x 3 s take 32 s on those.
    assert 32 < plan.predicted.step_seconds < 48


def test_a_model_too_big_says_so() -> None:
    problem = two_types()
    small = tuple(replace(pool, memory_bytes=1 << 20) for pool in problem.pools)
    with pytest.raises(InfeasibleError, match="MiB more than any device"):
        solve(replace(problem, pools=small))
    times = tuple(replace(t, microbatch_size=32) for t in problem.pools[0].times)
    large = replace(problem, pools=(replace(problem.pools[0], times=times),))
    with pytest.raises(ProblemError, match="no microbatch size"):
        solve(large)


def test_dealing_takes_what_the_pool_has() -> None:
    # Two mixed stages of 3 replicas: 3 devices of the first type in all, 2 a replica of the other.
    stages = [((0, 1), (1, 2)), ((0, 1), (1, 2))]
    assert deal(stages, 3, [3, 6]) in (((1, 2), (2, 1)), ((2, 1), (1, 2)))
    assert deal(stages, 3, [3, 5]) is None
