"""Profiles and plans made by hand, which tests of several rooms share."""

from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.schema.profile import BatchPoint, Profile, Sync
from hetflow.tests.plan_parts import pipeline_plan, pipeline_stage


def profile(device_type: str, slowness: float, model: str = "resnet50") -> Profile:
    """Whole steps at four batch sizes, and a synchronisation of two devices."""
    return Profile(
        model=model,
        device_type=device_type,
        device_memory_bytes=16 << 30,
        weight_bytes=100 << 20,
        update_seconds=0.004,
        batch_curve=tuple(
            BatchPoint(
                batch_size=size,
                step_seconds=slowness * (0.002 + 0.001 * size),
                peak_memory_bytes=(1 << 30) + size * (50 << 20),
            )
            for size in (8, 16, 32, 64)
        ),
        sync=Sync(num_devices=2, sync_seconds=0.02),
        optimizer=named_optimizer("sgd"),
    )


def two_stages(types: tuple[str, str]) -> Plan:
    """A pipeline of three layers, ``0`` to ``2``, on a device of each type."""
    stages = tuple(
        pipeline_stage(
            layers=layers,
            num_replicas=1,
            device_type=kind,
            first_device=number,
            num_in_flight=2 - number,
            weight_versions=1,
            seconds_per_input=0.02,
            compute_seconds=0.02,
            output_seconds=0.0,
            memory_bytes=1000,
        )
        for number, (kind, layers) in enumerate(zip(types, (("0", "1"), ("2",)), strict=True))
    )
    return pipeline_plan(
        model="small",
        global_batch_size=8,
        microbatch_size=2,
        num_microbatches=4,
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
