"""Between schedules and microbatch sizes, too, a simpler plan is taken that is as good."""

import dataclasses

import pytest
from partition_cases import chain, levels

from hetflow.schema.plan import Plan
from hetflow.solvers.pipeline.simplest import simplest_of
from hetflow.solvers.pipeline.solve import solve

LAYERS = chain([(1.0, 2.0)] * 4, [(1, 1)] * 4, levels((4, 1e9)), replication=False)


def plan(
    seconds: float,
    *,
    stages: int = 1,
    schedule: str = "1f1b",
    microbatch_size: int = 4,
    error: float | None = 0.02,
    fastest: float | None = None,
) -> Plan:
    """A plan of so many stages whose step is predicted to take ``seconds``."""
    asked = dataclasses.replace(LAYERS, num_stages=stages, microbatch_size=microbatch_size)
    found = solve(asked)
    least = None
    if fastest is not None:
        least = {"fastest": {"config": "1-1-1-1", "step_seconds": fastest}}
    return dataclasses.replace(
        found,
        schedule=schedule,
        predicted=dataclasses.replace(found.predicted, step_seconds=seconds),
        proof=dataclasses.replace(found.proof, tolerance=error),
        provenance=least,
    )


def test_fewer_stages_are_taken_where_they_are_as_good():
    least, simple = plan(1.0, stages=2, schedule="gpipe"), plan(1.015)
    chosen = simplest_of([least, simple])
    assert chosen.config == "1"
    assert chosen.provenance == {
        "fastest": {
            "config": "1-1", "step_seconds": 1.0, "schedule": "gpipe", "microbatch_size": 4,
        }
    }  # fmt: skip
    assert dataclasses.replace(chosen, provenance=None) == simple


def test_what_is_slower_than_that_is_not():
    least = plan(1.0, stages=2, schedule="gpipe")
    assert simplest_of([plan(1.025), least]) is least


def test_of_as_many_stages_1f1b_and_then_the_larger_microbatches():
    one, other = plan(1.0, schedule="gpipe"), plan(1.01)
    assert simplest_of([one, other]).schedule == "1f1b"
    small, large = plan(1.0), plan(1.01, microbatch_size=8)
    assert simplest_of([small, large]).microbatch_size == 8


def test_what_is_given_up_counts_from_the_fastest_plan_that_any_stands_for():
    # 2 % above a plan that was 2 % above the fastest would be 4 %.
    best = plan(1.02, stages=2, fastest=1.0)
    assert simplest_of([best, plan(1.03)]).config == "1-1"
    assert simplest_of([best, plan(1.03)]).provenance["fastest"]["config"] == "1-1-1-1"
    assert simplest_of([best, plan(1.019)]).config == "1"


@pytest.mark.parametrize("stages", [1, 2])
def test_where_no_error_is_known_the_least_step_is_taken(stages):
    least = plan(1.0, stages=3 - stages, schedule="gpipe", error=None)
    other = plan(1.0001, stages=stages, error=None)
    assert simplest_of([other, least]) is least


def test_equal_steps_without_an_error_go_to_1f1b():
    one, other = plan(1.0, schedule="gpipe", error=None), plan(1.0, stages=2, error=None)
    assert simplest_of([one, other]) is other
