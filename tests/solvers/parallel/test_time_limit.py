"""A limit of time ends every part of a parallel search, with a plan and a bound that holds."""

from dataclasses import replace

import pytest

from hetflow.planning.checks.parallel import check
from hetflow.schema.errors import TooLittleTimeError
from hetflow.schema.optimizer import OptimizerState
from hetflow.solvers.effort import Effort
from hetflow.solvers.parallel.solve import solve
from hetflow.tests.solvers.parallel.every_plan import two_types


@pytest.mark.parametrize("chunks", [(1,), (1, 2)])
@pytest.mark.parametrize("questions", [0, 1, 3, 10, 30, 100, 300])
def test_a_search_stopped_anywhere_has_a_plan_and_a_bound(
    chunks: tuple[int, ...], questions: int
) -> None:
    problem = replace(two_types(), num_model_chunks=chunks)
    best = solve(problem).proof
    left = iter(range(questions))
    stopped = Effort().until(lambda: next(left, None) is None)
    plan = solve(problem, effort=stopped)
    assert check(plan, problem) == []
    assert plan.proof.lower_bound is not None
    assert plan.proof.lower_bound <= best.objective * (1 + 1e-9)
    assert plan.proof.objective >= (best.lower_bound or 0.0) * (1 - 1e-9)


@pytest.mark.parametrize("questions", [0, 1, 3, 10, 30, 100])
def test_a_search_of_shared_weights_may_be_stopped_before_it_has_a_plan(questions: int) -> None:
    adam = OptimizerState(name="adam", state_bytes_per_weight_byte=2)
    problem = replace(two_types(), shards=("all",), optimizer=adam)
    left = iter(range(questions))
    try:
        plan = solve(problem, effort=Effort().until(lambda: next(left, None) is None))
    except TooLittleTimeError:
        assert questions < 30
    else:
        assert check(plan, problem) == []


def test_every_table_asks_for_the_time() -> None:
    """Tables over all pairs of layers took minutes for 2,000 layers, before any clock was read."""
    asked = 0

    def never() -> bool:
        nonlocal asked
        asked += 1
        return False

    solve(two_types(), effort=Effort(should_stop=never))
    assert asked > 50
