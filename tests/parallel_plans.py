"""Small parallel plans, made by hand."""

from collections.abc import Sequence

from hetflow.schema.plan import Plan, Prediction, Proof, Stage
from hetflow.tests.plan_parts import parallel_plan_of, replica_group

GLOBAL_BATCH_SIZE = 8


def parallel_plan(
    stages: Sequence[tuple[tuple[str, ...], tuple[int, ...]]],
    *,
    microbatch_size: int = 2,
    num_model_chunks: int = 1,
) -> Plan:
    """A plan of a batch of 8 samples; (layers, the degree of each replica) for each stage."""
    return parallel_plan_of(
        model="m",
        global_batch_size=GLOBAL_BATCH_SIZE,
        microbatch_size=microbatch_size,
        num_microbatches=-(-GLOBAL_BATCH_SIZE // microbatch_size),
        schedule="1f1b" if num_model_chunks == 1 else "interleaved",
        num_model_chunks=num_model_chunks,
        stages=tuple(
            Stage(
                layers=layers,
                recompute="none",
                replicas=tuple(
                    replica_group(
                        device_type="cpu:x",
                        tensor_parallel_size=degree,
                        num_replicas=1,
                        samples=GLOBAL_BATCH_SIZE * (number + 1) // len(degrees)
                        - GLOBAL_BATCH_SIZE * number // len(degrees),
                    )
                    for number, degree in enumerate(degrees)
                ),
            )
            for layers, degrees in stages
        ),
        predicted=Prediction(step_seconds=0.1, samples_per_second=80.0),
        proof=Proof(
            termination="feasible",
            objective=0.1,
            lower_bound=None,
            gap=None,
            method="by hand",
            space="this plan",
        ),
    )
