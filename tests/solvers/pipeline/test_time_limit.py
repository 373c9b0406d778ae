"""A limit of time ends the set-up of a search too, with a plan and a bound that holds."""

import dataclasses
import random
import sys
from itertools import pairwise
from typing import Any

import pytest
from partition_cases import chain, levels

from hetflow.planning.checks.pipeline import check
from hetflow.schema.pipeline import PipelineProblem
from hetflow.solvers.effort import Effort
from hetflow.solvers.pipeline.placements import build
from hetflow.solvers.pipeline.solve import solve
from hetflow.solvers.pipeline.uniform import ShapeOption

from .test_placements import drawn


def ends_after(questions: int) -> Effort:
    """An effort whose time is over when it was asked so many times."""
    left = iter(range(questions))
    return Effort().until(lambda: next(left, None) is None)


SCHEDULES = ["1f1b", "pipedream", "interleaved", "zb-h1", "pipedream-vertical-sync"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("questions", [0, 1, 10, 100, 1000])
@pytest.mark.slow
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


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream-vertical-sync"])
@pytest.mark.slow
def test_little_is_done_after_the_limit(schedule: str) -> None:
    """Searches for simpler plans, and for those of fewer types, began after the limit."""
    problem = dataclasses.replace(long_chain(schedule), step_error=0.02)
    whole = calls_after(problem, questions=0, ends=False)
    for questions in (0, 20):
        after = calls_after(problem, questions, ends=True)
        assert after < whole / 4, (questions, after, whole)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
@pytest.mark.slow
def test_no_table_of_all_cuts_is_made_without_asking_for_the_time(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape of 256 stages over 2,000 cuts has so many tables, each of a tenth of a second."""
    events: list[str] = []
    made = ShapeOption.matrix

    def matrix(*given: Any) -> Any:
        events.append("table")
        return made(*given)

    def should_stop() -> bool:
        events.append("asked")
        return False

    monkeypatch.setattr(ShapeOption, "matrix", matrix)
    solve(long_chain(schedule), effort=Effort(should_stop=should_stop))
    assert events.count("table") > 100
    assert all(pair != ("table", "table") for pair in pairwise(events))


def long_chain(schedule: str) -> PipelineProblem:
    """Unlike layers on two types with a fixed cost each, which make several searches of one."""
    draw = random.Random(0)
    times = [(draw.uniform(1, 2), draw.uniform(2, 4)) for _ in range(12)]
    sizes = [(draw.choice([1, 2, 3]), 1) for _ in times]
    problem = chain(times, sizes, levels((4, 4.0)), schedule=schedule, num_microbatches=8)
    (pool,) = problem.pools
    pools = (
        dataclasses.replace(pool, fixed_seconds=0.1),
        dataclasses.replace(pool, device_type="other", fixed_seconds=0.2),
    )
    return dataclasses.replace(problem, pools=pools, inter_bytes_per_second=1.0)


def calls_after(problem: PipelineProblem, questions: int, *, ends: bool) -> int:
    """How many functions a search calls from a question on: what it does, on any machine.

    ``ends``: whether the question is answered with the end of the time.
    """
    left, calls, counts = iter(range(questions)), 0, False

    def should_stop() -> bool:
        nonlocal counts
        counts = counts or next(left, None) is None
        return counts and ends

    def count(*_: object) -> None:
        nonlocal calls
        calls += counts

    sys.setprofile(count)
    try:
        solve(problem, effort=Effort(should_stop=should_stop))
    finally:
        sys.setprofile(None)
    return calls
