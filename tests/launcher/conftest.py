"""A small pipeline plan, made by hand, for launches."""

import pytest

from hetflow.schema.pipeline import PipelinePlan, StagePlan
from hetflow.schema.plan import Prediction, Proof


@pytest.fixture(scope="session")
def two_stages() -> PipelinePlan:
    stages = tuple(
        StagePlan(
            layers=layers,
            num_replicas=1,
            device_type="cpu:slow",
            first_device=number,
            num_in_flight=2 - number,
            weight_versions=1,
            seconds_per_input=0.02,
            compute_seconds=0.02,
            output_seconds=0.0,
            memory_bytes=1000,
        )
        for number, layers in enumerate((("0", "1"), ("2",)))
    )
    return PipelinePlan(
        model="small",
        global_batch_size=8,
        microbatch_size=2,
        microbatches=4,
        schedule="1f1b",
        recompute=False,
        stages=stages,
        predicted=Prediction(step_seconds=0.1, samples_per_second=80.0),
        proof=Proof(
            termination="feasible", objective=0.02, lower_bound=None, gap=None, method="by hand"
        ),
        noam=2,
        stage_cost="ring",
        solved="flat",
    )
