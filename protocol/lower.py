"""Lower a plan to ranks: assign its groups to ranks in order, and number its virtual nodes."""

from dataclasses import replace
from itertools import count
from typing import cast, get_args

from ..schema.errors import ProblemError
from ..schema.launch import Determinism, LaunchConfig, VirtualNode, WorkerSlot
from ..schema.options import option
from ..schema.plan import Plan
from .limits import check_numbers
from .lower_parallel import lower_parallel
from .lower_pipeline import lower_pipeline


def check_level(name: str) -> Determinism:
    """Return a level of determinism by its name.

    Raises:
        ProblemError: There is no such level.
    """
    levels = get_args(Determinism)
    if name not in levels:
        raise ProblemError(f"determinism must be one of {', '.join(levels)}, got {name!r}")
    return cast(Determinism, name)


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

    A pure function: the same plan and seed give the same config. Virtual nodes are numbered from 0
    along the ranks, which follow the groups of the plan and the devices of each group.

    Args:
        plan: A split, pipeline or parallel plan.
        seed: Seed of every random stream of the run.
        determinism: Which runs must end in the same bits (runtime/determinism.py).

    Raises:
        ProblemError: A pipeline or parallel plan cannot run as planned, or cannot keep the level of
            determinism; or there are too many workers or virtual nodes.
    """
    if plan.kind != "split":
        check_pipeline_level(determinism)
        if plan.kind == "pipeline":
            lowered = lower_pipeline(plan, seed)
        else:
            lowered = lower_parallel(plan, seed)
        return replace(lowered, determinism=determinism)
    if plan.shard is not None:
        raise ProblemError(
            "plans whose devices share states are planned and checked, and not launched yet",
            hint="solve without sharing, or take a pipeline",
        )
    nodes = sum(group.num_devices * group.virtual_nodes for group in plan.groups)
    check_numbers(plan.num_devices, nodes)
    rank, index = count(), count()
    workers = tuple(
        WorkerSlot(
            rank=next(rank),
            device_type=group.device_type,
            virtual_nodes=tuple(
                VirtualNode(index=next(index), batch_size=group.virtual_node_batch_size)
                for _ in range(group.virtual_nodes)
            ),
        )
        for group in plan.groups
        for _ in range(group.num_devices)
    )
    return LaunchConfig(
        model=plan.model,
        global_batch_size=plan.global_batch_size,
        workers=workers,
        seed=seed,
        emulated=plan.emulated,
        determinism=determinism,
        optimizer=plan.optimizer,
        predicted_step_seconds=plan.predicted.step_seconds,
    )
