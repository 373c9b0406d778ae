"""A stated partition costs what the search would say it costs."""

import dataclasses

import pytest
from truth_parts.stated import stated_plan

from hetflow.planning.checks.pipeline import check
from hetflow.schema.errors import ProblemError
from hetflow.schema.pipeline import PipelineProblem
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.solvers.partition_cases import chain, levels

TIMES = [(0.1, 0.2), (0.3, 0.1), (0.2, 0.4), (0.2, 0.2), (0.1, 0.3)]
SIZES = [(100, 50), (300, 400), (200, 80), (500, 70), (10, 900)]


def problem(devices: int = 4, **options: object) -> PipelineProblem:
    asked = {"num_microbatches": 6, "schedule": "1f1b", **options}
    return chain(TIMES, SIZES, levels((devices, 1000.0)), **asked)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_a_plan_of_the_search_is_priced_alike(schedule: str, num_stages: int) -> None:
    asked = problem(schedule=schedule, num_stages=num_stages)
    found = solve(asked)
    stages = [(stage.layers, stage.num_replicas) for stage in found.stages]
    plan = stated_plan(asked, stages, recompute=found.recomputes)
    assert plan.stages == found.stages
    assert plan.predicted == found.predicted
    assert (plan.proof.termination, plan.proof.lower_bound) == ("feasible", None)
    assert check(plan, asked) == []


def test_a_worse_partition_is_priced_too() -> None:
    asked = problem(devices=2)
    plan = stated_plan(asked, [(["l0"], 1), (["l1", "l2", "l3", "l4"], 1)])
    assert check(plan, asked) == []
    assert plan.predicted.step_seconds > solve(asked).predicted.step_seconds


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([(["l0", "l9"], 1)], "no layer 'l9'"),
        ([(["l0", "l2"], 1), (["l1", "l3", "l4"], 1)], "stage 0 does not end at a cut"),
        ([(["l0", "l1", "l2", "l3"], 1)], "layer 'l4' is in no stage"),
        ([(["l0", "l1"], 1), (["l1", "l2", "l3", "l4"], 1)], "stage 1 does not end at a cut"),
        ([(["l0", "l1"], 3), (["l2", "l3", "l4"], 2)], "stage 0 cannot have 3 replicas"),
    ],
)
def test_what_is_no_partition_is_refused(stages: list, said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        stated_plan(problem(), stages)


def test_only_one_pool_and_a_flush_can_be_stated() -> None:
    whole = [([f"l{i}" for i in range(5)], 1)]
    for asked in (
        problem(schedule="pipedream"),
        dataclasses.replace(
            problem(),
            pools=(problem().pools[0], dataclasses.replace(problem().pools[0], device_type="P")),
            inter_bytes_per_second=100.0,
        ),
    ):
        with pytest.raises(ProblemError, match="one device type and a flushing schedule"):
            stated_plan(asked, whole)
