"""Lower a pipeline plan: stages become ranks, microbatches their virtual nodes."""

from collections.abc import Sequence
from itertools import count

from ..devices.emulated import is_emulated
from ..schedules.operations import Kind, Schedule
from ..schedules.registry import generate
from ..schema.errors import ProblemError
from ..schema.launch import LaunchConfig, PipelineStage, PipelineWork, VirtualNode, WorkerSlot
from ..schema.layer_trace import LayerTrace
from ..schema.pipeline import PipelinePlan, StagePlan


def lower_pipeline(plan: PipelinePlan, seed: int = 0) -> LaunchConfig:
    """Turn a pipeline plan into who runs what.

    Ranks follow the stages; stages on the same device (interleaved) share a rank.

    Raises:
        ProblemError: The schedule cannot run as planned; says which rule.
    """
    check_trace(plan.model, plan.trace)
    ranks_of_stage = _ranks_of_stages(plan)
    work = PipelineWork(
        schedule=plan.schedule,
        num_microbatches=plan.microbatches,
        recompute=plan.recompute,
        stages=tuple(
            _stage_of(stage, ranks, plan.recompute)
            for stage, ranks in zip(plan.stages, ranks_of_stage, strict=True)
        ),
        trace=plan.trace,
    )
    schedule = schedule_of(work, plan.microbatches)
    if schedule.weight_semantics != "flush":
        _check_rounds(plan)
    held = {
        rank: (stage.device_type, device)
        for stage, ranks in zip(plan.stages, ranks_of_stage, strict=True)
        for rank, device in zip(ranks, _devices_of(plan, stage, ranks), strict=True)
    }
    return LaunchConfig(
        model=plan.model,
        global_batch_size=plan.global_batch_size,
        seed=seed,
        pipeline=work,
        optimizer=plan.optimizer,
        workers=tuple(
            WorkerSlot(
                rank=rank,
                device_type=held[rank][0],
                device=held[rank][1],
                virtual_nodes=tuple(
                    VirtualNode(index=index, batch_size=plan.microbatch_size)
                    for index in microbatches_of(schedule, rank)
                ),
            )
            for rank in range(len(held))
        ),
    )


def schedule_of(work: PipelineWork, num_microbatches: int) -> Schedule:
    """The schedule that a lowered plan runs, for one batch or a run without flushes.

    Its ranks are the numbers of tensor-parallel groups (``PipelineWork.groups``).

    Raises:
        ProblemError: A shape that the schedule cannot have, or one with another placement.
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
    """What hooks on modules have seen of one pass cannot be run piece by piece.

    Raises:
        ProblemError: The layers were found like that.
    """
    obstacle = None if trace is None else trace.obstacle
    if obstacle is not None:
        raise ProblemError(
            f"{model} cannot be cut into stages: its layers were {obstacle}",
            hint="keep control flow on tensor values inside submodules and profile again, or "
            "solve with --strategy split",
        )


def _ranks_of_stages(plan: PipelinePlan) -> list[tuple[int, ...]]:
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


def _devices_of(
    plan: PipelinePlan, stage: StagePlan, ranks: tuple[int, ...]
) -> Sequence[int | None]:
    """The device of each rank; DualPipe's two directions run on any."""
    return [None] * len(ranks) if plan.traits.placement == "both-ways" else stage.held


def _stage_of(stage: StagePlan, ranks: tuple[int, ...], recompute: bool) -> PipelineStage:
    """An emulated device holds its passes to the plan's times.

    Where a plan does not tell forward from backward, forward is a third of both (a quarter with
    recomputation).
    """
    if not is_emulated(stage.device_type):
        return PipelineStage(layers=stage.layers, ranks=ranks)
    forward = stage.forward_seconds
    if forward is None:
        forward = stage.compute_seconds * (0.25 if recompute else 1 / 3)
    return PipelineStage(
        layers=stage.layers,
        ranks=ranks,
        forward_seconds=forward,
        backward_seconds=stage.compute_seconds - forward,
    )


def microbatches_of(schedule: Schedule, rank: int, stage: int | None = None) -> list[int]:
    """The microbatches that a rank runs, of one of its stages or of any."""
    return sorted(
        {
            op.microbatch
            for op in schedule.ranks[rank]
            if op.kind is Kind.FORWARD and stage in (None, op.stage)
        }
    )


def _check_rounds(plan: PipelinePlan) -> None:
    """Without flushes microbatch k goes to replica k mod R over the whole run."""
    for number, stage in enumerate(plan.stages):
        if plan.microbatches % stage.num_replicas:
            raise ProblemError(
                f"{plan.schedule}: {plan.microbatches} microbatches a batch do not divide among "
                f"the {stage.num_replicas} replicas of stage {number}",
                hint="make the number of microbatches a multiple",
            )
