"""Lower a pipeline plan: stages become ranks, microbatches their virtual nodes."""

from collections.abc import Sequence
from itertools import count

from ..devices.emulated import is_emulated
from ..schedules.registry import generate
from ..schema.errors import ProblemError
from ..schema.launch import LaunchConfig, PipelineStage, PipelineWork, VirtualNode, WorkerSlot
from ..schema.layer_trace import LayerTrace
from ..schema.operations import Kind, Schedule
from ..schema.options import option
from ..schema.plan import Plan, Stage


def lower_pipeline(plan: Plan, seed: int = 0) -> LaunchConfig:
    """Turn a pipeline plan into a launch config: the work of each rank.

    Ranks follow the stages; stages on the same device (interleaved) share a rank.

    Raises:
        ProblemError: The schedule cannot run as planned; the message states the rule.
    """
    check_trace(plan.model, plan.trace)
    ranks_of_stage = _ranks_of_stages(plan)
    work = PipelineWork(
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        recompute=plan.recomputes,
        stages=tuple(
            _stage_of(stage, ranks, plan.recomputes)
            for stage, ranks in zip(plan.stages, ranks_of_stage, strict=True)
        ),
        trace=plan.trace,
    )
    schedule = schedule_of(work, plan.num_microbatches)
    if schedule.weight_semantics != "flush":
        _check_rounds(plan)
    held = {
        rank: (stage.device_type, device)
        for stage, ranks in zip(plan.stages, ranks_of_stage, strict=True)
        for rank, device in zip(ranks, _devices_of(plan, stage, ranks), strict=True)
    }
    sizes = [plan.microbatch_size] * plan.num_microbatches
    return config_of(plan, work, schedule, seed, [held[rank] for rank in range(len(held))], sizes)


def config_of(
    plan: Plan,
    work: PipelineWork,
    schedule: Schedule,
    seed: int,
    devices: Sequence[tuple[str, int | None]],
    sizes: Sequence[int],
) -> LaunchConfig:
    """Put a launch config together: each rank's device, and its microbatches as virtual nodes.

    Args:
        plan: What is launched.
        work: The plan, lowered.
        schedule: The schedule of the work; its ranks are tensor-parallel groups.
        seed: Of the training.
        devices: [ranks] the device type of each, and its index among the devices of that type.
        sizes: [microbatches] samples of each.
    """
    group_of = {rank: number for number, ranks in enumerate(work.groups) for rank in ranks}
    return LaunchConfig(
        model=plan.model,
        global_batch_size=plan.global_batch_size,
        seed=seed,
        pipeline=work,
        optimizer=plan.optimizer,
        predicted_step_seconds=plan.predicted.step_seconds,
        workers=tuple(
            WorkerSlot(
                rank=rank,
                device_type=device_type,
                device=device,
                virtual_nodes=tuple(
                    VirtualNode(index=index, batch_size=sizes[index])
                    for index in microbatches_of(schedule, group_of[rank])
                ),
            )
            for rank, (device_type, device) in enumerate(devices)
        ),
    )


def schedule_of(work: PipelineWork, num_microbatches: int) -> Schedule:
    """Generate the schedule of a lowered plan, for one batch or for a run without flushes.

    The schedule's ranks are the numbers of tensor-parallel groups (``PipelineWork.groups``).

    Raises:
        ProblemError: The schedule does not support the shape, or places its stages differently.
    """
    stages, planned = work.stages, work.placement
    is_two_way = work.traits.placement == "both-ways"
    chunks = 1 if is_two_way else sum(planned[0][0] in groups for groups in planned)
    size = len(stages) // chunks
    schedule = generate(
        work.schedule,
        pipeline_parallel_size=size,
        num_microbatches=num_microbatches,
        num_model_chunks=chunks,
        replicas=None if is_two_way else [len(groups) for groups in planned[:size]],
        microbatches_per_update=work.num_microbatches if work.traits.is_double_buffered else None,
    )
    if schedule.placement != planned:
        raise ProblemError(
            f"{work.schedule} places its stages on ranks {schedule.placement}, the plan on "
            f"{planned}"
        )
    return schedule


def check_trace(model: str, trace: LayerTrace | None) -> None:
    """Refuse layers that were found by hooks on modules, which cannot be run separately.

    Raises:
        ProblemError: The layers were found by hooks.
    """
    obstacle = None if trace is None else trace.obstacle
    if obstacle is not None:
        raise ProblemError(
            f"{model} cannot be cut into stages: its layers were {obstacle}",
            hint="keep control flow on tensor values inside submodules and profile again, or "
            f"solve with {option('strategy', 'split')}",
        )


def _ranks_of_stages(plan: Plan) -> list[tuple[int, ...]]:
    if plan.traits.placement == "both-ways":
        # One pipeline in each direction: rank r holds stages r and p - 1 - r.
        last = len(plan.stages) - 1
        return [(min(s, last - s), max(s, last - s)) for s in range(last + 1)]
    if not plan.traits.is_chunked:
        rank = count()
        return [tuple(next(rank) for _ in range(stage.num_replicas)) for stage in plan.stages]
    known: dict[tuple[str, int], int] = {}
    return [
        tuple(known.setdefault((stage.device_type, device), len(known)) for device in stage.held)
        for stage in plan.stages
    ]


def _devices_of(plan: Plan, stage: Stage, ranks: tuple[int, ...]) -> Sequence[int | None]:
    """Return the planned device of each rank; None (any device) for DualPipe's two directions."""
    return [None] * len(ranks) if plan.traits.placement == "both-ways" else stage.held


def _stage_of(stage: Stage, ranks: tuple[int, ...], recompute: bool) -> PipelineStage:
    """Lower one stage, with the times to which an emulated device stretches its passes.

    If the plan has one time for both passes, the forward pass takes a third of it, or a quarter
    with recomputation.
    """
    if not is_emulated(stage.device_type):
        return PipelineStage(layers=stage.layers, ranks=ranks)
    forward = stage.forward_seconds
    if forward is None:
        forward = (stage.compute_seconds or 0.0) * (0.25 if recompute else 1 / 3)
    return PipelineStage(
        layers=stage.layers,
        ranks=ranks,
        forward_seconds=forward,
        backward_seconds=(stage.compute_seconds or 0.0) - forward,
    )


def microbatches_of(schedule: Schedule, rank: int, stage: int | None = None) -> list[int]:
    """List the microbatches that a rank runs, on one of its stages or on any of them."""
    return sorted(
        {
            op.microbatch
            for op in schedule.ranks[rank]
            if op.kind is Kind.FORWARD and stage in (None, op.stage)
        }
    )


def _check_rounds(plan: Plan) -> None:
    """Check that replicas divide a batch: without flushes, replica k mod R runs microbatch k."""
    for number, stage in enumerate(plan.stages):
        if plan.num_microbatches % stage.num_replicas:
            raise ProblemError(
                f"{plan.schedule}: {plan.num_microbatches} microbatches a batch do not divide "
                f"among the {stage.num_replicas} replicas of stage {number}",
                hint="make the number of microbatches a multiple",
            )
