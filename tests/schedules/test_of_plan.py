"""A plan's schedule, timed with the plan's own numbers, takes the step the plan predicts."""

from dataclasses import replace

import pytest

from hetflow.planning.checks.schedule import validate
from hetflow.planning.schedules.of_plan import schedule_of, timed
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.schema.plan import Plan
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.plan_parts import with_replicas


def planned(schedule: str) -> Plan:
    layers = tuple(PipelineLayer(id=f"l{i}", activation_bytes=0, weight_bytes=1) for i in range(4))
    pool = DevicePool(
        device_type="V100",
        levels=(TopologyLevel(num_components=4, bytes_per_second=1e12),),
        forward_seconds=(1.0,) * 4,
        backward_seconds=(2.0,) * 4,
    )
    problem = PipelineProblem(
        model="m",
        layers=layers,
        pools=(pool,),
        microbatch_size=1,
        num_microbatches=8,
        optimizer=OptimizerState(name="sgd", state_bytes_per_weight_byte=0.0),
        schedule=schedule,
        replication=False,
        num_stages=4,
    )
    return solve(problem)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_take_the_predicted_step(schedule: str) -> None:
    plan = planned(schedule)
    timing = timed(plan)
    assert plan.predicted.step_seconds == pytest.approx((4 + 8 - 1) * 3.0)
    assert timing.makespan_seconds == pytest.approx(plan.predicted.step_seconds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream", "2bw"])
def test_the_schedule_of_a_plan_is_valid(schedule: str) -> None:
    assert validate(schedule_of(planned(schedule))) == []


def test_a_plan_of_dualpipe_v_holds_two_stages_a_device() -> None:
    """Its pipeline is as long as there are devices, not as there are stages."""
    chunked = planned("1f1b")
    stages = tuple(
        with_replicas(stage, first_device=min(number, 3 - number), devices=())
        for number, stage in enumerate(chunked.stages)
    )
    plan = replace(chunked, schedule="dualpipe-v", num_model_chunks=2, stages=stages)
    schedule = schedule_of(plan)
    assert schedule.placement == ((0,), (1,), (1,), (0,))
    assert validate(schedule) == []
