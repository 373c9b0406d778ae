"""A limit of time ends the set-up of a search too, with a plan and a bound that holds."""

import pytest

from hetflow.checks.pipeline import check
from hetflow.schema.pipeline import PipelineProblem
from hetflow.solvers.effort import Effort
from hetflow.solvers.pipeline.placements import build
from hetflow.solvers.pipeline.solve import solve

from .test_placements import drawn


def ends_after(questions: int) -> Effort:
    """An effort whose time is over when it was asked so many times."""
    left = iter(range(questions))
    return Effort().until(lambda: next(left, None) is None)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("questions", [0, 1, 3, 10, 30, 100, 300, 1000])
def test_a_search_stopped_anywhere_has_a_plan_and_a_bound(schedule: str, questions: int) -> None:
    problem: PipelineProblem = drawn(7, schedule=schedule)
    best = solve(problem).proof
    plan = solve(problem, effort=ends_after(questions))
    assert check(plan, problem) == []
    assert plan.proof.lower_bound is not None
    assert plan.proof.lower_bound <= best.objective * (1 + 1e-9)
    assert plan.proof.objective >= (best.lower_bound or 0.0) * (1 - 1e-9)


def test_the_list_of_moves_asks_for_the_time_all_along() -> None:
    """It took most of the time on 64 devices, before any clock was read."""
    asked = 0

    def never() -> bool:
        nonlocal asked
        asked += 1
        return False

    problem = drawn(7)
    build(problem, Effort(should_stop=never))
    assert asked > problem.num_devices
