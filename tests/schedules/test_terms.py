"""A pipeline's step as terms: by hand, for every kind of schedule."""

import dataclasses

import pytest

from hetflow.planning.schedules.terms import step_terms
from hetflow.schema.plan import Plan, Prediction, Proof, Stage
from hetflow.tests.plan_parts import pipeline_plan, pipeline_stage


def stage(name: str, **changes) -> Stage:
    """A forward pass of 1 s and a backward one of 2 s, each with 0.25 s of its own."""
    given = {
        "layers": (name,), "num_replicas": 1, "device_type": "A", "first_device": ord(name) - 97,
        "num_in_flight": 1, "weight_versions": 1, "seconds_per_input": 0.0, "memory_bytes": 0,
        "compute_seconds": 3.5, "forward_seconds": 1.25, "output_seconds": 0.0,
        "reduce_seconds": 0.0, "update_seconds": 0.125, "pass_seconds": 0.25,
        "message_seconds": 0.0, **changes,
    }  # fmt: skip
    return pipeline_stage(**given)


FIRST = stage("a", output_seconds=2 * 0.5 + 2 * 0.75, message_seconds=0.75)


def plan(schedule: str, stages: tuple[Stage, ...], step: float, count: int) -> Plan:
    return pipeline_plan(
        model="m",
        global_batch_size=count,
        microbatch_size=1,
        num_microbatches=count,
        schedule=schedule,
        recompute=False,
        stages=stages,
        predicted=Prediction(step_seconds=step, samples_per_second=1.0, fixed_seconds=0.5),
        proof=Proof(termination="feasible", objective=0.0, lower_bound=None, gap=None, method=""),
        noam=1,
        stage_cost="ring",
        solved="flat",
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_microbatch_through_two_stages(schedule):
    # 7 s of passes, two messages of 1.25 s, an update, the fixed cost.
    found = step_terms(plan(schedule, (FIRST, stage("b")), 7 + 2.5 + 0.125 + 0.5, 1))
    assert found.layer_seconds == 3.0
    assert found.waiting_seconds == 3.0  # the other stage's layers
    assert found.pass_seconds == 1.0
    assert found.message_seconds == 1.5
    assert found.byte_seconds == 1.0
    assert found.update_seconds == 0.125
    assert found.fixed_seconds == 0.5


def test_all_reduces_are_of_replicas_alone():
    two = stage("a", num_replicas=2, reduce_seconds=4.0)
    found = step_terms(plan("1f1b", (two,), 2 * 3.5 + 4 + 0.125 + 0.5, 4))
    assert found.reduce_seconds == 4.0
    assert found.layer_seconds == 6.0
    assert found.waiting_seconds == 0.0


def test_a_schedule_without_flushes_is_its_pace():
    # Four microbatches at the pace of the slower stage: 4 * 5 passes, an update each.
    slow = stage("b", compute_seconds=5.0)
    found = step_terms(plan("pipedream", (FIRST, slow), 4 * 5.125 + 0.5, 4))
    assert found.update_seconds == 0.5
    assert found.pass_seconds == 2.0
    assert found.message_seconds == found.byte_seconds == 0.0  # beside the passes
    assert found.layer_seconds == 18.0


def test_a_split_backward_pass_is_two_passes():
    # Without messages seven passes in turn: each rank's six, and one that the first waits for.
    stages = (dataclasses.replace(FIRST, compute_seconds=3.75), stage("b", compute_seconds=3.75))
    found = step_terms(plan("zb-h1", stages, 11.25 + 0.125 + 0.5, 2))
    assert found.pass_seconds == 7 * 0.25
    assert found.layer_seconds == 6.0
    assert found.waiting_seconds == 1.0


def test_a_step_that_the_stages_do_not_tell_is_not_taken_apart():
    assert step_terms(plan("1f1b", (FIRST, stage("b")), 11.0, 1)) is None


def test_what_older_plans_lack_is_not_guessed():
    older = dataclasses.replace(FIRST, reduce_seconds=None)
    assert step_terms(plan("1f1b", (older, stage("b")), 10.125, 1)) is None
    unknown = dataclasses.replace(FIRST, forward_seconds=None)
    assert step_terms(plan("1f1b", (unknown, stage("b")), 10.125, 1)) is None
