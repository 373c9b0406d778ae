"""Plans in the form that Sailor writes them, as hetflow's; what they predict is left out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hetflow.schema.plan import Plan, Prediction, Proof, Stage
from hetflow.solvers.parallel.solve import shares_of
from hetflow.tests.plan_parts import parallel_plan_of, replica_group


def plan_of(
    model: str,
    layers_per_stage: Sequence[Sequence[int]],
    replicas_per_stage: Sequence[Sequence[Any]],
    *,
    global_batch_size: int,
    microbatch_size: int,
    data_parallel_size: int,
) -> Plan:
    """One of Sailor's plans.

    Args:
        model: Its name.
        layers_per_stage: Numbers of layers.
        replicas_per_stage: For each replica of a stage its servers, of which the first one's
            device type counts, and its tensor parallel degree.
        global_batch_size: Samples of a step.
        microbatch_size: Samples of a microbatch.
        data_parallel_size: Pipelines side by side.
    """
    rounds = -(-global_batch_size // (microbatch_size * data_parallel_size))
    stages = []
    for layers, replicas in zip(layers_per_stage, replicas_per_stage, strict=True):
        counts = Counter((servers[0][0], degree) for servers, degree, *_ in replicas)
        shares = shares_of(global_batch_size, tuple(counts.values()), rounds * microbatch_size)
        groups = tuple(
            replica_group(
                device_type=name,
                tensor_parallel_size=degree,
                num_replicas=count,
                samples=share,
            )
            for ((name, degree), count), share in zip(counts.items(), shares, strict=True)
        )
        names = tuple(f"layer{layer}" for layer in layers)
        stages.append(Stage(layers=names, recompute="none", replicas=groups))
    return unjudged(model, global_batch_size, microbatch_size, rounds, stages)


def unjudged(
    model: str,
    global_batch_size: int,
    microbatch_size: int,
    num_microbatches: int,
    stages: Sequence[Stage],
) -> Plan:
    """A plan without a prediction or a proof of its own."""
    return parallel_plan_of(
        model=model,
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        num_model_chunks=1,
        stages=tuple(stages),
        predicted=Prediction(step_seconds=0.0, samples_per_second=0.0),
        proof=Proof(
            termination="feasible", objective=0.0, lower_bound=None, gap=None, method="", space=""
        ),
    )
