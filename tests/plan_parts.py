"""Plans made by hand, from the facts that a kind of plan is thought of in."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from hetflow.schema.parallel import Recompute
from hetflow.schema.plan import Alternative, Plan, ReplicaGroup, Stage, device_group, passes_of
from hetflow.schema.plan import split_plan as split_plan
from hetflow.schema.schedule import traits

P = TypeVar("P", Plan, Alternative)


def kind_of(plan: dict[str, Any]) -> str:
    """The kind of a plan, as its file has it."""
    if "layers" not in plan["stages"][0]:
        return "split"
    return "pipeline" if "stage_cost" in plan else "parallel"


def whole_group(*, device_batch_size: int, **given: Any) -> ReplicaGroup:
    """Devices that hold the whole model; their virtual nodes are ``device_batch_size`` samples."""
    group = device_group(**given)
    assert group.device_batch_size == device_batch_size
    return group


def replica_group(
    *, samples: int, num_replicas: int, tensor_parallel_size: int = 1, **given: Any
) -> ReplicaGroup:
    """Replicas whose plan says how many passes they run (``parallel_plan_of``)."""
    return ReplicaGroup(
        samples=samples,
        num_replicas=num_replicas,
        tensor_parallel_size=tensor_parallel_size,
        virtual_nodes=-(-samples // num_replicas),
        virtual_node_batch_size=1,
        **given,
    )


def pipeline_stage(
    *,
    num_replicas: int,
    device_type: str,
    first_device: int,
    memory_bytes: int,
    devices: tuple[int, ...] = (),
    **costs: Any,
) -> Stage:
    """A stage on single devices; its plan (``pipeline_plan``) says how many passes they run."""
    group = ReplicaGroup(
        device_type=device_type,
        num_replicas=num_replicas,
        samples=1,
        virtual_nodes=1,
        virtual_node_batch_size=1,
        first_device=first_device,
        devices=devices,
        memory_bytes=memory_bytes,
    )
    return Stage(replicas=(group,), **costs)


def pipeline_plan(
    *,
    global_batch_size: int,
    microbatch_size: int,
    num_microbatches: int,
    schedule: str,
    stages: Sequence[Stage],
    recompute: bool = False,
    objective: str = "bottleneck",
    **facts: Any,
) -> Plan:
    """A pipeline of single devices."""
    kept = "full" if recompute else "none"
    made = [
        _with_passes(stage, global_batch_size, num_microbatches, microbatch_size, kept)
        for stage in stages
    ]
    first = [(stage.device_type, stage.first_device) for stage in stages]
    chunks = first.count(first[0]) if traits(schedule).is_chunked else 1
    return Plan(
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
        num_model_chunks=chunks,
        stages=tuple(made),
        objective="step_seconds" if objective == "step" else objective,
        **{"workers": "at_most", **facts},
    )


@lru_cache(maxsize=4096)  # an oracle makes thousands of plans of the same stages
def _with_passes(stage: Stage, samples: int, number: int, size: int, kept: Recompute) -> Stage:
    (group,) = stage.replicas
    passes = replace(
        group, samples=samples, virtual_nodes=-(-number // stage.num_replicas),
        virtual_node_batch_size=size,
    )  # fmt: skip
    return replace(stage, replicas=(passes,), recompute=kept)


def parallel_plan_of(
    *,
    global_batch_size: int,
    microbatch_size: int,
    num_microbatches: int,
    stages: Sequence[Stage],
    **facts: Any,
) -> Plan:
    """A plan of tensor-parallel groups, of which each runs up to ``num_microbatches``."""
    return Plan(
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        num_microbatches=-(-global_batch_size // microbatch_size),
        stages=with_rounds(stages, num_microbatches, microbatch_size),
        **facts,
    )


def with_rounds(stages: Sequence[Stage], number: int, size: int) -> tuple[Stage, ...]:
    """The stages with replicas that each run up to ``number`` passes of a size."""
    return tuple(
        replace(
            stage,
            replicas=tuple(
                replace(group, virtual_nodes=number, virtual_node_batch_size=size)
                for group in stage.replicas
            ),
        )
        for stage in stages
    )


def with_groups(plan: P, *, groups: Sequence[ReplicaGroup], **facts: Any) -> P:
    """A split, or an alternative to one, with other groups of devices."""
    stages = (replace(plan.stages[0], replicas=tuple(groups)),)
    return replace(plan, stages=stages, **passes_of(groups), **facts)


def with_replicas(stage: Stage, **facts: Any) -> Stage:
    """A stage with other facts of its first replicas."""
    first, *others = stage.replicas
    return replace(stage, replicas=(replace(first, **facts), *others))
