"""Lower a plan to ranks: the devices of its replicas become ranks, its passes virtual nodes."""

from collections.abc import Sequence
from itertools import count
from typing import cast, get_args

from ...devices.cpu import is_emulated
from ...planning.schedules.registry import generate
from ...schema.errors import ProblemError
from ...schema.launch import (
    Determinism,
    LaunchConfig,
    PipelineStage,
    PipelineWork,
    VirtualNode,
    WorkerSlot,
)
from ...schema.layers import cannot_spread
from ...schema.options import option
from ...schema.parallel import first_devices, is_inside
from ...schema.plan import Plan, ReplicaGroup, Stage
from ...schema.schedule import DEFAULT_SCHEDULE, Kind, Schedule

MAX_WORKERS = 1 << 16
MAX_VIRTUAL_NODES = 1 << 20


def check_level(name: str) -> Determinism:
    """Return a level of determinism by its name.

    Raises:
        ProblemError: There is no such level.
    """
    levels = get_args(Determinism)
    if name not in levels:
        raise ProblemError(f"determinism must be one of {', '.join(levels)}, got {name!r}")
    return cast("Determinism", name)


def check_pipeline_level(level: Determinism) -> None:
    """Refuse a level of determinism that a pipeline cannot keep.

    Raises:
        ProblemError: The level needs sums that do not depend on how stages and replicas are placed.
    """
    if level in ("elastic", "heterogeneous"):
        raise ProblemError(
            f"determinism {level} is for split plans: a pipeline adds its gradients by mapping",
            hint=f"use {option('determinism', 'static')}, which repeats itself under the same plan",
        )


def obstacle_of(plan: Plan) -> str | None:
    """Why ``hetflow launch`` would refuse a plan before it starts; None if it would not.

    A plan may be a valid answer and yet not run: its layers may have been found in a way that
    cannot be cut.
    """
    try:
        lower(plan)
    except ProblemError as error:
        return error.message
    return None


def lower(plan: Plan, seed: int = 0, determinism: Determinism = "none") -> LaunchConfig:
    """Turn a plan into a launch config: the work of each rank.

    A pure function: the same plan and seed give the same config. Ranks follow the positions of the
    pipeline, then their replicas, then the devices of each replica. A position holds one stage, or
    several if stages are interleaved. Virtual nodes are numbered from 0: where the model is not cut
    into layers, along the ranks; else they are the microbatches, which a stage's replicas take in
    turn. If these do not divide evenly, the first replicas take one more.

    Args:
        plan: Any plan.
        seed: Seed of every random stream of the run.
        determinism: Which runs must end in the same bits (runtime/determinism.py).

    Raises:
        ProblemError: The plan cannot run as planned, or cannot keep the level of determinism; or
            there are too many workers or virtual nodes.
    """
    if plan.layers:
        check_pipeline_level(determinism)
        _check_layers(plan)
    _check_numbers(plan.num_devices, plan.num_microbatches)
    ranks_of_stages = _ranks_of_stages(plan)
    work = _work_of(plan, ranks_of_stages) if plan.layers else None
    places = _places_of(plan, ranks_of_stages)
    workers = zip(_devices_of(plan, places), _nodes_of(plan, work), strict=True)
    groups = [[group for group, _ in places[rank]] for rank in range(len(places))]
    return LaunchConfig(
        model=plan.model,
        global_batch_size=plan.global_batch_size,
        workers=tuple(
            WorkerSlot(
                rank=rank,
                device_type=name,
                virtual_nodes=nodes,
                device=device,
                state_share_bytes=_share_of(groups[rank]),
                activations=groups[rank][-1].activations,
                memory_bytes=max(group.memory_bytes or 0 for group in groups[rank]) or None,
            )
            for rank, ((name, device), nodes) in enumerate(workers)
        ),
        seed=seed,
        emulated=plan.emulated,
        determinism=determinism,
        pipeline=work,
        shard=plan.shard,
        copied_ratio=plan.stages[0].copied_ratio,
        blocks=plan.blocks,
        optimizer=plan.optimizer,
        predicted_step_seconds=plan.predicted.step_seconds,
    )


def _check_layers(plan: Plan) -> None:
    """Refuse a plan whose layers cannot be run as it cuts them, or whose replicas have no work."""
    obstacle = None if plan.trace is None else plan.trace.obstacle
    # A single stage of tensor-parallel groups runs the whole model, which need not be cut.
    is_cut = len(plan.stages) > 1 or plan.stage_cost is not None
    if is_cut and obstacle is not None:
        raise ProblemError(
            f"{plan.model} cannot be cut into stages: its layers were {obstacle}",
            hint="keep control flow on tensor values inside submodules and profile again, or "
            f"solve with {option('strategy', 'split')}",
        )
    if is_cut and plan.sequence_parallel and cannot_spread(plan.trace):
        raise ProblemError(
            f"{plan.model} cannot be cut into stages that spread tokens: its layers were found "
            "by torch.export, whose graph does not show where sequence parallelism begins",
            hint=f"solve with {option('sequence_parallel', False)}",
        )
    most = max(stage.num_replicas for stage in plan.stages)
    if plan.shard is not None:
        _check_shares(plan)
    if plan.num_microbatches < most:
        raise ProblemError(
            f"a global batch of {plan.global_batch_size} is {plan.num_microbatches} microbatch(es) "
            f"of {plan.microbatch_size}, too few for {most} replicas",
            hint=f"give a global batch of at least {most * plan.microbatch_size}",
        )
    if plan.traits.weight_semantics == "flush":
        return
    # Without flushes, replica k mod R runs microbatch k: replicas must divide a batch.
    for number, stage in enumerate(plan.stages):
        if plan.num_microbatches % stage.num_replicas:
            raise ProblemError(
                f"{plan.schedule}: {plan.num_microbatches} microbatches a batch do not divide "
                f"among the {stage.num_replicas} replicas of stage {number}",
                hint="make the number of microbatches a multiple",
            )


def _check_shares(plan: Plan) -> None:
    """Refuse stages that share weights where replicas would not meet in every pass."""
    traits = plan.traits
    said = None
    if plan.shard != "all" or any(stage.shard != plan.shard for stage in plan.stages):
        said = "stages share either the weights of all, or by shard_optimizer"
    elif not traits.flushes or traits.splits_backward:
        said = f"{plan.schedule} runs halves of passes, or updates in between"
    elif traits.placement not in ("line", "round-robin"):
        said = f"{plan.schedule} places stages {traits.placement}"
    elif len({stage.num_replicas for stage in plan.stages}) > 1:
        said = "stages have unlike numbers of replicas"
    elif any(len({g.tensor_parallel_size for g in stage.replicas}) > 1 for stage in plan.stages):
        said = "replicas of a stage have unlike tensor parallel sizes"
    elif plan.num_microbatches % plan.stages[0].num_replicas:
        said = f"{plan.num_microbatches} microbatches do not divide among the replicas"
    if said is not None:
        raise ProblemError(
            f"stages share weights where replicas run alike, and {said}",
            hint=f"solve with {option('shard', 'none')}, or {option('schedule', DEFAULT_SCHEDULE)}",
        )


def _check_numbers(num_workers: int, num_virtual_nodes: int) -> None:
    for number, most, name in (
        (num_workers, MAX_WORKERS, "workers"),
        (num_virtual_nodes, MAX_VIRTUAL_NODES, "virtual nodes in a step"),
    ):
        if number > most:
            raise ProblemError(
                f"the plan has {number} {name}; at most {most} are launched",
                hint="take larger virtual nodes or microbatches, or a smaller batch",
            )


def _ranks_of_stages(plan: Plan) -> list[tuple[int, ...]]:
    """[stages] the ranks that hold each stage: chunks on the same devices share theirs."""
    if plan.traits.placement == "both-ways":
        # One pipeline in each direction: rank r holds stages r and p - 1 - r.
        last = len(plan.stages) - 1
        return [(min(s, last - s), max(s, last - s)) for s in range(last + 1)]
    if plan.traits.is_chunked and _states_devices(plan):
        # A device is one rank, numbered where it first occurs, however many chunks name it.
        known: dict[tuple[str, int], int] = {}
        return [
            tuple(
                known.setdefault((group.device_type, one), len(known))
                for group in stage.replicas
                for one in group.held
            )
            for stage in plan.stages
        ]
    rank = count()
    ranks = [
        tuple(next(rank) for group in stage.replicas for _ in range(group.num_devices))
        for stage in plan.stages[: plan.num_positions]
    ]
    return [ranks[number % plan.num_positions] for number in range(len(plan.stages))]


def _work_of(plan: Plan, ranks_of_stages: Sequence[tuple[int, ...]]) -> PipelineWork:
    """Lower the stages. Plans priced as a chain's state no degrees: each rank is a replica."""
    is_chain = plan.stage_cost is not None
    return PipelineWork(
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        recompute=is_chain and plan.recomputes,
        stages=tuple(
            _stage_of(stage, ranks, is_chain=is_chain)
            for stage, ranks in zip(plan.stages, ranks_of_stages, strict=True)
        ),
        trace=plan.trace,
        sequence_parallel=plan.sequence_parallel,
        shard_optimizer=plan.shard_optimizer,
        shard_gradients=plan.shard_gradients,
    )


def _stage_of(stage: Stage, ranks: tuple[int, ...], *, is_chain: bool) -> PipelineStage:
    """Lower one stage, with the times to which emulated devices stretch its passes."""
    recomputes = stage.recompute == "full"
    forward = backward = None
    if all(is_emulated(group.device_type) for group in stage.replicas) and stage.compute_seconds:
        forward = stage.forward_seconds
        # One time for both passes: a backward pass takes about two forward passes, and recomputing
        # one more. So forward is a third of the sum, or a quarter.
        if forward is None:
            forward = stage.compute_seconds * (0.25 if recomputes else 1 / 3)
        backward = stage.compute_seconds - forward
    return PipelineStage(
        layers=stage.layers,
        ranks=ranks,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_gradient_seconds=None if backward is None else stage.weight_gradient_seconds,
        tensor_parallel_sizes=()
        if is_chain
        else tuple(g.tensor_parallel_size for g in stage.replicas for _ in range(g.num_replicas)),
        recompute=None if is_chain else recomputes,
        recompute_cores=stage.recompute == "selective" or None,
    )


def _nodes_of(plan: Plan, work: PipelineWork | None) -> list[tuple[VirtualNode, ...]]:
    """[ranks] the virtual nodes of each rank."""
    if work is None:
        index = count()
        return [
            tuple(
                VirtualNode(index=next(index), batch_size=group.virtual_node_batch_size)
                for _ in range(group.virtual_nodes)
            )
            for group in plan.groups
            for _ in range(group.num_devices)
        ]
    schedule = schedule_of(work, plan.num_microbatches)
    sizes = [plan.microbatch_size] * plan.num_microbatches  # [microbatches] samples
    # The last one takes the difference, where microbatches do not divide the batch.
    sizes[-1] += plan.global_batch_size - sum(sizes)
    group_of = {rank: number for number, ranks in enumerate(work.groups) for rank in ranks}
    return [
        tuple(
            VirtualNode(index=index, batch_size=sizes[index])
            for index in microbatches_of(schedule, group_of[rank])
        )
        for rank in range(len(group_of))
    ]


def _states_devices(plan: Plan) -> bool:
    return all(g.first_device is not None for stage in plan.stages for g in stage.replicas)


_Places = dict[int, list[tuple[ReplicaGroup, int]]]
"""Rank -> of each stage on it, the replicas that it is one of, and the index of its device."""


def _places_of(plan: Plan, ranks_of_stages: Sequence[tuple[int, ...]]) -> _Places:
    found: _Places = {}
    for stage, ranks in zip(plan.stages, ranks_of_stages, strict=True):
        held = [(group, one) for group in stage.replicas for one in group.held]
        # A stage of both directions has one replica, and a rank in each.
        for rank, place in zip(ranks, held * (len(ranks) // len(held)), strict=True):
            found.setdefault(rank, []).append(place)
    return found


def _share_of(groups: Sequence[ReplicaGroup]) -> int | None:
    """What a rank keeps of the states of its stages, as replicas of each; None if none says."""
    stated = [group.state_share_bytes for group in groups]
    return None if None in stated else sum(share or 0 for share in stated)


def _devices_of(plan: Plan, places: _Places) -> list[tuple[str, int | None]]:
    """[ranks] the device type of each, and its index among the devices of that type."""
    # None where the launch chooses: for a model that is not cut, and for both directions.
    is_free = not plan.layers or plan.traits.placement == "both-ways"
    last = [places[rank][-1] for rank in range(len(places))]
    in_order = [(group.device_type, None if is_free else one) for group, one in last]
    if is_free or _states_devices(plan):
        return in_order
    return [(name, one) for (name, _), one in zip(in_order, _placed(plan), strict=True)]


def _placed(plan: Plan) -> list[int]:
    """[ranks] index of each rank's device among those of its type."""
    # By device type: of each group of replicas its ranks, tensor degree, and whether it is alone in
    # its stage.
    groups: dict[str, list[tuple[range, int, bool]]] = {}
    size = 0
    for stage in plan.stages[: plan.num_positions]:
        for group in stage.replicas:
            ranks = range(size, size := size + group.num_devices)
            alone = len(stage.replicas) == 1
            known = groups.setdefault(group.device_type, [])
            known.append((ranks, group.tensor_parallel_size, alone))
    found = [0] * size
    for name, each in groups.items():
        number = width = sum(len(ranks) for ranks, *_ in each)
        if plan.cluster is not None and name in plan.cluster.num_devices:
            number, width = plan.cluster.num_devices[name], plan.cluster.common_width(name)
        # First as the plan counts: no tensor-parallel group is split over two servers, nor is a
        # stage whose devices divide a server's. Where that does not fit, only groups stay whole;
        # then the pool counts as one server. ``first_devices`` packs from the largest set down.
        for whole, room in ((True, width), (False, width), (False, number)):
            sets = [
                ranks[start : start + step]
                for ranks, degree, alone in each
                for is_one in [whole and alone and is_inside(len(ranks), width)]
                for step in [len(ranks) if is_one else degree]
                for start in range(0, len(ranks), step)
            ]
            begins = first_devices([len(one) for one in sets], number, room)
            if begins is not None:
                break
        for one, begin in zip(sets, begins or [], strict=True):
            for place, rank in enumerate(one):
                found[rank] = begin + place
    return found


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


def microbatches_of(schedule: Schedule, rank: int, stage: int | None = None) -> list[int]:
    """List the microbatches that a rank runs, on one of its stages or on any of them."""
    return sorted(
        {
            op.microbatch
            for op in schedule.ranks[rank]
            if op.kind is Kind.FORWARD and stage in (None, op.stage)
        }
    )
