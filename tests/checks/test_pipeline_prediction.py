"""A pipeline plan's parts, interval and tolerance are judged from the problem."""

import dataclasses

import pytest

from hetflow.planning.checks.pipeline import check
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.schema.plan import Plan
from hetflow.solvers.pipeline.solve import solve

POOL = DevicePool(
    device_type="V100",
    levels=(TopologyLevel(num_components=3, bytes_per_second=100.0),),
    forward_seconds=(1.0,) * 6,
    backward_seconds=(2.0,) * 6,
    update_seconds=0.5,
    pass_seconds=0.25,
    fixed_seconds=1.5,
)
PROBLEM = PipelineProblem(
    model="m",
    layers=tuple(
        PipelineLayer(id=f"l{index}", activation_bytes=10, weight_bytes=20) for index in range(6)
    ),
    pools=(POOL,),
    microbatch_size=1,
    num_microbatches=8,
    optimizer=OptimizerState(name="sgd", state_bytes_per_weight_byte=0.0),
    replication=False,
    message_seconds=0.125,
    step_error=0.02,
)
PLAN = solve(PROBLEM)


def test_the_solver_s_plan_holds() -> None:
    assert len(PLAN.stages) == 3
    assert check(PLAN, PROBLEM) == []


def test_parts_need_not_be_claimed() -> None:
    bare = dict.fromkeys(
        (
            "compute_seconds", "virtual_node_seconds", "transfer_seconds", "sync_seconds",
            "update_seconds", "fixed_seconds",
        )
    )  # fmt: skip
    plan = dataclasses.replace(PLAN, predicted=dataclasses.replace(PLAN.predicted, **bare))
    assert check(plan, PROBLEM) == []


@pytest.mark.parametrize(
    "part",
    ["compute_seconds", "virtual_node_seconds", "transfer_seconds", "update_seconds",
     "fixed_seconds", "step_seconds_low", "step_seconds_high"],
)  # fmt: skip
def test_a_part_that_is_wrong_is_a_fault(part: str) -> None:
    wrong = getattr(PLAN.predicted, part) * 1.01
    predicted = dataclasses.replace(PLAN.predicted, **{part: wrong})
    faults = check(dataclasses.replace(PLAN, predicted=predicted), PROBLEM)
    assert len(faults) == 1
    assert faults[0].startswith(f"predicted.{part} is ")


@pytest.mark.parametrize("name", ["pass_seconds", "message_seconds"])
def test_own_costs_of_a_stage_are_the_problem_s(name: str) -> None:
    first = dataclasses.replace(PLAN.stages[0], **{name: 0.5})
    plan = dataclasses.replace(PLAN, stages=(first, *PLAN.stages[1:]))
    assert any(f"stage 0: {name} is 0.5" in fault for fault in check(plan, PROBLEM))


def test_a_step_without_its_fixed_cost_is_a_fault() -> None:
    free = dataclasses.replace(PROBLEM, pools=(dataclasses.replace(POOL, fixed_seconds=0.0),))
    assert any("predicted.step_seconds" in fault for fault in check(solve(free), PROBLEM))


def with_bound(bound: float, tolerance: float | None = PLAN.proof.tolerance) -> Plan:
    objective = PLAN.proof.objective
    gap = (objective - bound) / objective
    proof = dataclasses.replace(PLAN.proof, lower_bound=bound, gap=gap, tolerance=tolerance)
    return dataclasses.replace(PLAN, proof=proof)


def test_an_optimum_may_be_as_far_from_its_bound_as_steps_are_off() -> None:
    objective = PLAN.proof.objective
    assert check(with_bound(objective / 1.015), PROBLEM) == []
    for plan in (with_bound(objective / 1.03), with_bound(objective / 1.015, None)):
        assert any("leaves a gap" in fault for fault in check(plan, PROBLEM))
    assert any("tolerance" in fault for fault in check(with_bound(objective, 0.5), PROBLEM))
