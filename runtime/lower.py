"""Lower a plan: its groups in order become ranks, its virtual nodes are numbered in order."""

from itertools import count

from ..schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from ..schema.plan import SplitPlan


def lower(plan: SplitPlan, seed: int = 0) -> LaunchConfig:
    """Turn a split plan into who runs what.

    Pure: the same plan and seed give the same config. Virtual node 0 is the first of rank 0,
    and numbering goes on through the devices of each group and through the groups.

    Args:
        plan: The split of the global batch.
        seed: Seed of every random stream of the run.
    """
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
    )
