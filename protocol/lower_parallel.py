"""Lower a parallel plan: each replica of a stage becomes a tensor-parallel group of ranks."""

from itertools import count

from ..devices.emulated import is_emulated
from ..schema.errors import ProblemError
from ..schema.launch import LaunchConfig, PipelineStage, PipelineWork
from ..schema.layer_trace import cannot_spread
from ..schema.options import option
from ..schema.parallel import first_devices, is_inside
from ..schema.plan import Plan, Stage
from .limits import check_numbers
from .lower_pipeline import check_trace, config_of, schedule_of


def lower_parallel(plan: Plan, seed: int = 0) -> LaunchConfig:
    """Turn a parallel plan into a launch config: the work of each rank.

    Ranks follow the positions of the pipeline, then their replicas, then the devices of each
    replica. A position holds one stage, or several if stages are interleaved. A stage's replicas
    take microbatches in turn. If these do not divide evenly, the first replicas take one more.

    Raises:
        ProblemError: The runtime cannot run the plan; the message says why.
    """
    if len(plan.stages) > 1:
        check_trace(plan.model, plan.trace)
        if plan.sequence_parallel and cannot_spread(plan.trace):
            raise ProblemError(
                f"{plan.model} cannot be cut into stages that spread tokens: its layers were found "
                "by torch.export, whose graph does not show where sequence parallelism begins",
                hint=f"solve with {option('sequence_parallel', False)}",
            )
    num_microbatches = -(-plan.global_batch_size // plan.microbatch_size)
    most = max(stage.num_replicas for stage in plan.stages)
    if num_microbatches < most:
        raise ProblemError(
            f"a global batch of {plan.global_batch_size} is {num_microbatches} microbatch(es) of "
            f"{plan.microbatch_size}, too few for {most} replicas",
            hint=f"give a global batch of at least {most * plan.microbatch_size}",
        )
    check_numbers(plan.num_devices, num_microbatches)
    ranks = _ranks_of(plan)
    work = PipelineWork(
        schedule=plan.schedule,
        num_microbatches=num_microbatches,
        recompute=False,
        stages=tuple(
            _stage_of(stage, ranks[number % plan.num_positions])
            for number, stage in enumerate(plan.stages)
        ),
        trace=plan.trace,
        sequence_parallel=plan.sequence_parallel,
        shard_optimizer=plan.shard_optimizer,
    )
    schedule = schedule_of(work, num_microbatches)
    last = plan.global_batch_size - (num_microbatches - 1) * plan.microbatch_size
    sizes = [plan.microbatch_size] * (num_microbatches - 1) + [last]
    devices = list(zip(_types_of(plan), _devices_of(plan), strict=True))
    return config_of(plan, work, schedule, seed, devices, sizes)


def _ranks_of(plan: Plan) -> list[tuple[int, ...]]:
    """[positions] the ranks that hold a position's stages."""
    rank = count()
    return [
        tuple(next(rank) for group in stage.replicas for _ in range(group.num_devices))
        for stage in plan.stages[: plan.num_positions]
    ]


def _stage_of(stage: Stage, ranks: tuple[int, ...]) -> PipelineStage:
    degrees = tuple(
        group.tensor_parallel_size for group in stage.replicas for _ in range(group.num_replicas)
    )
    recomputes = stage.recompute == "full"
    forward = backward = None
    if all(is_emulated(group.device_type) for group in stage.replicas) and stage.compute_seconds:
        # The plan has one time for both passes; a backward pass takes about twice as long.
        forward = stage.compute_seconds * (0.25 if recomputes else 1 / 3)
        backward = stage.compute_seconds - forward
    return PipelineStage(
        layers=stage.layers,
        ranks=ranks,
        forward_seconds=forward,
        backward_seconds=backward,
        tensor_parallel_sizes=degrees,
        recompute=recomputes,
        recompute_cores=stage.recompute == "selective" or None,
    )


def _types_of(plan: Plan) -> list[str]:
    """[ranks] the device type of each rank."""
    return [
        group.device_type
        for stage in plan.stages[: plan.num_positions]
        for group in stage.replicas
        for _ in range(group.num_devices)
    ]


def _devices_of(plan: Plan) -> list[int]:
    """[ranks] index of each rank's device among those of its type.

    No group is split over two servers, nor is a stage whose devices divide a server's, which the
    plan counts inside one. Sets of devices are placed from the largest down.
    """
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
        for whole in (True, False):  # else groups only, as in pools of one server
            sets = [
                ranks[start : start + step]
                for ranks, degree, alone in each
                for is_one in [whole and alone and is_inside(len(ranks), width)]
                for step in [len(ranks) if is_one else degree]
                for start in range(0, len(ranks), step)
            ]
            begins = first_devices([len(one) for one in sets], number, width if whole else number)
            if begins is not None:
                break
        for one, begin in zip(sets, begins or [], strict=True):
            for place, rank in enumerate(one):
                found[rank] = begin + place
    return found
